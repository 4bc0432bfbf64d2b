"""The root file system of kind's nodes: Debian with systemd and the programs that Kubernetes and its network call."""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from testcluster.cluster_state import cache, locked
from testcluster.commands import run_command
from testcluster.errors import UsageError

SUITE = "bookworm"
PACKAGES = [
    "ca-certificates",
    "conntrack",
    "containernetworking-plugins",
    "e2fsprogs",
    "ethtool",
    "iproute2",
    "iptables",
    "jq",
    "kmod",
    "libseccomp2",
    "mount",
    "nftables",
    "pigz",
    "procps",
    "systemd",
    "util-linux",
]
"""What kind's own base image installs, without clients of network disks, and the plugins of the pods' network."""
BUILD_TIMEOUT = 900
"""Seconds that debootstrap may take."""
_UNITS = (
    "lib/systemd/system/sysinit.target.wants/systemd-tmpfiles-setup.service",
    "lib/systemd/system/multi-user.target.wants/*",
    "etc/systemd/system/*.wants/*",
    "lib/systemd/system/local-fs.target.wants/*",
    "lib/systemd/system/sockets.target.wants/*udev*",
    "lib/systemd/system/sockets.target.wants/*initctl*",
    "lib/systemd/system/basic.target.wants/*",
)
"""Links to units that would change the host, or wait for devices that a container does not have."""
_UNREAD = (
    "var/cache/apt",
    "var/lib/apt/lists",
    "var/log",
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
)


def folder() -> Path:
    """Return the folder of the archives."""
    return cache() / "kind"


def archive() -> Path:
    """Return the path of the archive, which need not exist yet; its name has a hash of this module's source."""
    source = inspect.getsource(sys.modules[__name__])
    return folder() / f"root-{hashlib.sha256(source.encode()).hexdigest()[:16]}.tar"


def provide(report: Callable[[str], None]) -> Path:
    """Build the archive unless it exists, and return its path. Raises UsageError and TimedOut."""
    with locked(folder()):
        if not archive().exists():
            _build(archive(), report)
    return archive()


def _build(target: Path, report: Callable[[str], None]) -> None:
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        raise UsageError(
            "a node image is built by debootstrap as root; run `make cluster-deps` as root, or name an image"
        )
    report("building the root file system of kind's nodes by debootstrap …")
    for leftover in target.parent.glob(".root-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        dir=target.parent, prefix=".root-", ignore_cleanup_errors=True
    ) as scratch:
        root = Path(scratch) / "root"
        options = ["--variant=minbase", f"--include={','.join(PACKAGES)}"]
        run_command(
            "debootstrap",
            *options,
            SUITE,
            str(root),
            called="debootstrap",
            timeout=BUILD_TIMEOUT,
        )
        _adapt(root)
        pack(root, target)


def _adapt(root: Path) -> None:
    """Delete what a node never reads, and prepare systemd for a container."""
    for name in _UNREAD:
        shutil.rmtree(root / name, ignore_errors=True)
    # journald and apt expect these.
    (root / "var/log").mkdir()
    (root / "etc/apt/sources.list").write_text("")
    for pattern in _UNITS:
        for link in root.glob(pattern):
            link.unlink()
    with (root / "etc/systemd/journald.conf").open("a") as settings:
        settings.write("ReadKMsg=no\n")
    (root / "sbin/init").unlink(missing_ok=True)
    (root / "sbin/init").symlink_to("/usr/lib/systemd/systemd")
    # binfmt_misc belongs to the whole kernel, so a node must not register anything in it.
    (root / "etc/systemd/system/systemd-binfmt.service").symlink_to("/dev/null")


def pack(tree: Path, target: Path) -> None:
    """Write a folder as an uncompressed archive; the file gets its name when it is complete."""
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        run_command(
            "tar",
            "--numeric-owner",
            "--sort=name",
            "-C",
            str(tree),
            "-cf",
            str(fresh),
            ".",
            timeout=BUILD_TIMEOUT,
        )
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)
