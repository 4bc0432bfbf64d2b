"""The images of the control plane that kubeadm starts, made of the programs that this machine has built."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from testcluster import binaries, go_modules
from testcluster.commands import contained, run_command
from testcluster.errors import TimedOut, UsageError
from testcluster.images import image_layers

_NAMESPACE = ("--namespace", "k8s.io")
LAYERS = "kind/layers"
"""Folder of the image with the unpacked layers. Docker copies /var of the image into a volume of each node."""
_START_TIMEOUT = 30
"""Seconds until containerd must answer."""
IPTABLES = [
    "iptables",
    "iptables-save",
    "iptables-restore",
    "ip6tables",
    "ip6tables-save",
    "ip6tables-restore",
]
"""Programs that kube-proxy calls."""


def fill_store(store: Path, root: Path, sandbox_image: str, scratch: Path) -> None:
    """Unpack every image into a new folder, which becomes /var/lib/containerd of the nodes.

    `root` is the root file system of a node: kube-proxy's image gets iptables from it, and the layers are moved to it.
    Raises UsageError and TimedOut.
    """
    archives = [
        _archive(image, root, scratch) for image in [*_needed_images(), sandbox_image]
    ]
    _import(store, archives, scratch)
    _move_layers(store, root)


def _needed_images() -> list[str]:
    version = f"v{go_modules.version(go_modules.BINARIES['kubeadm'])}"
    command = ["config", "images", "list", f"--kubernetes-version={version}"]
    listed = run_command(str(binaries.program("kubeadm")), *command).split()
    # kind's configuration of containerd names the sandbox's image instead.
    return [image for image in listed if "/pause:" not in image]


def _archive(image: str, root: Path, scratch: Path) -> Path:
    name = re.sub(r"^.*/|:.*$", "", image)
    if name not in go_modules.BINARIES:
        raise UsageError(
            f"kubeadm needs the image {image}, but this repository builds no program {name}; add it"
        )
    # The manifests of kubeadm call the programs by these paths, and /coredns and /pause by the image's entry point.
    path = name if name in {"coredns", "pause"} else f"usr/local/bin/{name}"
    programs = {path: binaries.program(name)} | (
        _iptables(root) if name == "kube-proxy" else {}
    )
    return image_layers.archive(
        scratch,
        image,
        programs,
        [f"/{path}"],
        user="0:0",
        path="/usr/local/bin:/usr/sbin:/bin",
    )


def _iptables(root: Path) -> dict[str, Path]:
    """Return iptables with its extensions and all their libraries, {path in the image: file}."""
    program = root / "usr/sbin/xtables-nft-multi"
    extensions = [
        str(path.relative_to(root)) for path in root.glob("usr/lib/*/xtables/*.so")
    ]
    files = [f"/{path}" for path in ["usr/sbin/xtables-nft-multi", *extensions]]
    listed = run_command("chroot", str(root), "ldd", *files)
    paths = [*files[1:], *sorted(set(re.findall(r"(/\S+) \(0x", listed)))]
    # Resolved inside the root: an absolute link would lead to a file of the host.
    targets = run_command("chroot", str(root), "readlink", "-f", *paths).split()
    libraries = {
        path.lstrip("/"): root / target.lstrip("/")
        for path, target in zip(paths, targets, strict=True)
    }
    return libraries | {f"usr/sbin/{name}": program for name in IPTABLES}


def _import(store: Path, archives: Sequence[Path], scratch: Path) -> None:
    """Run containerd in namespaces that end with this process, and let it unpack the archives."""
    folder = binaries.folder()
    socket = scratch / "containerd.sock"
    config = scratch / "containerd.toml"
    config.write_text(_containerd(store, scratch / "state", socket))
    ctr = [str(folder / "ctr"), f"--address={socket}", *_NAMESPACE]
    with (scratch / "containerd.log").open("wb") as log:
        process = subprocess.Popen(
            contained(str(folder / "containerd"), f"--config={config}"),
            stdout=log,
            stderr=log,
        )
    try:
        _wait(ctr, scratch / "containerd.log")
        for archive in archives:
            unpack = [
                "images",
                "import",
                "--local",
                "--discard-unpacked-layers",
                "--label=io.cri-containerd.pinned=pinned",
            ]
            run_command(*ctr, *unpack, str(archive), timeout=300)
            archive.unlink()
        # An unpacked layer does not need its compressed content; without this call containerd would delete it later.
        run_command(*ctr, "content", "prune", "references")
    finally:
        process.kill()
        process.wait()
    shutil.rmtree(scratch / "state", ignore_errors=True)


def _move_layers(store: Path, root: Path) -> None:
    """Move the unpacked layers out of the store, and leave links: all nodes then share the files of the image."""
    for layer in store.glob("io.containerd.snapshotter.v1.overlayfs/snapshots/*/fs"):
        place = Path(LAYERS) / layer.parent.name
        (root / LAYERS).mkdir(parents=True, exist_ok=True)
        layer.rename(root / place)
        layer.symlink_to(f"/{place}")


def _wait(ctr: list[str], log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT
    while subprocess.run(
        [*ctr, "version"], capture_output=True, check=False
    ).returncode:
        if time.monotonic() > deadline:
            raise TimedOut(
                f"containerd did not start within {_START_TIMEOUT} s; its log ends: {log.read_text()[-1500:]}"
            )
        time.sleep(0.1)


def _containerd(store: Path, state: Path, socket: Path) -> str:
    return f"""version = 3
root = "{store}"
state = "{state}"
disabled_plugins = [
  "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri",
  "io.containerd.nri.v1.nri", "io.containerd.internal.v1.opt",
  "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.blockfile",
]
[grpc]
  address = "{socket}"
[ttrpc]
  address = "{socket}.ttrpc"
"""
