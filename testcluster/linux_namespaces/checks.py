"""Requirements for the host, checked before a cluster is created."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from testcluster.errors import UsageError
from testcluster.linux_namespaces.node import CNI_PLUGINS

MIN_FREE_BYTES = 2 << 30
"""Free bytes for etcd, logs and volumes of a small cluster, without images."""
INOTIFY_PER_NODE = 8
"""inotify instances: five for a kubelet, two for containerd, one for kube-proxy, as counted in /proc/*/fd."""
_PROGRAMS = {
    "ip": "iproute2",
    "nft": "nftables",
    "nsenter": "util-linux",
    "pivot_root": "util-linux",
    "mount": "mount",
}
_KERNEL_TEST = """
set -e
mount -t tmpfs trial /mnt
mkdir /mnt/l /mnt/u /mnt/w /mnt/m
mount -t overlay trial -o lowerdir=/mnt/l,upperdir=/mnt/u,workdir=/mnt/w /mnt/m || { echo overlayfs; exit 1; }
ip link add trial type bridge || { echo bridge links; exit 1; }
ip link add trial0 type veth peer name trial1 || { echo veth links; exit 1; }
nft add table ip trial || { echo nftables; exit 1; }
"""


def check(folder: Path) -> None:
    """Raise UsageError with the first requirement that is not met, and its fix."""
    if sys.platform != "linux":
        raise UsageError(
            f"--provider linux-namespaces needs Linux, this is {sys.platform}; "
            "start a Docker engine for --provider kind"
        )
    if os.geteuid() != 0:
        raise UsageError(
            "--provider linux-namespaces needs root for namespaces and mounts; "
            "run it with sudo, or start a Docker engine for --provider kind"
        )
    for program, package in _PROGRAMS.items():
        if not shutil.which(program):
            raise UsageError(
                f"{program} is missing; `make cluster-deps` installs it (Debian: apt install {package})"
            )
    if not (CNI_PLUGINS / "bridge").exists():
        raise UsageError(
            f"{CNI_PLUGINS}/bridge is missing; `make cluster-deps` installs it "
            "(Debian: apt install containernetworking-plugins)"
        )
    if any(character.isspace() for character in str(folder)):
        raise UsageError(
            f"CoreDNS cannot read paths with blanks, such as {folder}; set FINETUNE_CACHE to another folder"
        )
    check_disk(folder)
    check_kernel()


def check_disk(folder: Path) -> None:
    """Raise UsageError when the disk has too little space for the data of a cluster."""
    present = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(present).free
    if free < MIN_FREE_BYTES:
        raise UsageError(
            f"{free / (1 << 30):.1f} GiB free at {present}, a cluster needs {MIN_FREE_BYTES >> 30}; "
            "free disk space, or set FINETUNE_CACHE to a folder on a larger disk"
        )


def check_inotify(nodes: int) -> None:
    """Raise UsageError when that many more nodes would exceed the kernel's limit of inotify instances.

    Kubelets beyond the limit would never register.
    """
    limit = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
    used = sum(map(_inotify_instances, Path("/proc").glob("[0-9]*")))
    needed = used + INOTIFY_PER_NODE * (nodes + 1)
    if needed > limit:
        raise UsageError(
            f"{nodes} more nodes need {needed} inotify instances, the limit is {limit}; "
            f"run `sysctl fs.inotify.max_user_instances={max(1024, 2 * needed)}`, or delete clusters"
        )


def _inotify_instances(process: Path) -> int:
    """Return how many inotify instances a process has; 0 for one that has ended meanwhile."""
    try:
        return sum(map(_is_inotify, (process / "fd").iterdir()))
    except OSError:
        return 0


def _is_inotify(descriptor: Path) -> bool:
    try:
        return str(descriptor.readlink()) == "anon_inode:inotify"
    except OSError:  # closed meanwhile
        return False


def check_kernel() -> None:
    """Try every kernel feature in temporary namespaces. Raises UsageError with the first that is missing."""
    unshare = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--uts",
        "--ipc",
        "--net",
        "--cgroup",
    ]
    done = subprocess.run(
        [*unshare, "sh", "-c", _KERNEL_TEST],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        feature = done.stdout.strip() or "new namespaces"
        raise UsageError(
            f"this kernel does not offer {feature} ({' '.join(done.stderr.split())[:200]}); "
            "use a full virtual machine rather than a container, or start a Docker engine and use --provider kind"
        )
    if "cgroup" not in Path("/proc/self/mountinfo").read_text():
        raise UsageError(
            "no control groups are mounted on this host; mount them at /sys/fs/cgroup"
        )
