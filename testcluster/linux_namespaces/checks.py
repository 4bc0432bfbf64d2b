"""What this host must offer, asked before anything is begun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from testcluster.errors import UsageError
from testcluster.linux_namespaces.node import CNI_PLUGINS

LEAST_DISK = 2 << 30
"""Bytes free; etcd, logs and volumes of a small cluster, without images."""
WATCHES_OF_A_NODE = 8
"""inotify instances: five of a kubelet, two of a containerd, one of a kube-proxy; counted in /proc/*/fd."""
_PROGRAMS = {
    "ip": "iproute2",
    "nft": "nftables",
    "nsenter": "util-linux",
    "pivot_root": "util-linux",
    "mount": "mount",
}
_TRIAL = """
set -e
mount -t tmpfs trial /mnt
mkdir /mnt/l /mnt/u /mnt/w /mnt/m
mount -t overlay trial -o lowerdir=/mnt/l,upperdir=/mnt/u,workdir=/mnt/w /mnt/m || { echo overlayfs; exit 1; }
ip link add trial type bridge || { echo bridge links; exit 1; }
ip link add trial0 type veth peer name trial1 || { echo veth links; exit 1; }
nft add table ip trial || { echo nftables; exit 1; }
"""


def check(folder: Path) -> None:
    """Raise Refused with the first thing that is missing and how to mend it."""
    if sys.platform != "linux":
        raise UsageError(
            f"a cluster without Docker needs Linux, this is {sys.platform}; start a Docker engine for --provider kind"
        )
    if os.geteuid() != 0:
        raise UsageError(
            "a cluster without Docker needs root (namespaces and mounts); run it with sudo, or start a Docker engine"
        )
    for program, package in _PROGRAMS.items():
        if not shutil.which(program):
            raise UsageError(f"{program} is missing; `make cluster-deps` installs it (Debian: apt install {package})")
    if not (CNI_PLUGINS / "bridge").exists():
        raise UsageError(
            f"{CNI_PLUGINS}/bridge is missing; `make cluster-deps` installs it "
            "(Debian: apt install containernetworking-plugins)"
        )
    if any(letter.isspace() for letter in str(folder)):
        raise UsageError(f"{folder} has a blank in it, which CoreDNS cannot read; set FINETUNE_CACHE to another folder")
    check_disk(folder)
    check_kernel()


def check_disk(folder: Path) -> None:
    """Raise Refused when a cluster could not keep its books."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(there).free
    if free < LEAST_DISK:
        raise UsageError(
            f"{free / (1 << 30):.1f} GiB free at {there}, a cluster needs {LEAST_DISK >> 30}; "
            "make room, or set FINETUNE_CACHE to a folder on a larger disk"
        )


def check_watches(nodes: int) -> None:
    """Raise Refused when the kernel would not let so many more kubelets watch files; they would never register."""
    limit = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
    used = sum(_is_inotify(handle) for handle in Path("/proc").glob("[0-9]*/fd/*"))
    wanted = used + WATCHES_OF_A_NODE * (nodes + 1)
    if wanted > limit:
        raise UsageError(
            f"{nodes} more nodes need {wanted} inotify instances, the limit is {limit}; "
            f"run `sysctl fs.inotify.max_user_instances={max(1024, 2 * wanted)}`, or take clusters down"
        )


def _is_inotify(handle: Path) -> bool:
    try:
        return str(handle.readlink()) == "anon_inode:inotify"
    except OSError:
        return False


def check_kernel() -> None:
    """Try every feature of the kernel in namespaces that vanish again."""
    apart = ["unshare", "--mount", "--pid", "--fork", "--uts", "--ipc", "--net", "--cgroup"]
    done = subprocess.run([*apart, "sh", "-c", _TRIAL], capture_output=True, text=True, check=False)
    if done.returncode:
        what = done.stdout.strip() or "namespaces of its own"
        raise UsageError(
            f"this kernel does not offer {what} ({' '.join(done.stderr.split())[:200]}); "
            "use a full virtual machine rather than a container, or start a Docker engine and use --provider kind"
        )
    if "cgroup" not in Path("/proc/self/mountinfo").read_text():
        raise UsageError("no control groups are mounted on this host; mount them at /sys/fs/cgroup")
