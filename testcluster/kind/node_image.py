"""The node image of kind for machines that reach no image registry: built from Debian, kind's module and our programs.

`python -m testcluster.kind.node_image` builds it and loads it into the Docker engine.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from testcluster import binaries, go_modules
from testcluster.cluster_state import check_disk, locked
from testcluster.commands import run_command
from testcluster.errors import TimedOut, UsageError
from testcluster.images.image_builders import ENGINES
from testcluster.kind import control_plane_images, node_root

LOCAL = "local"
"""The value of --node-image for the image of this module."""
REPOSITORY = "localhost/finetune-kind-node"
REQUIRED_BYTES = 5 << 30
"""Free bytes for a build: the root file system, the programs, their images, and the archives of them."""
KEEP_SECONDS = 24 * 3600
"""Age at which the archive of another version is deleted."""
UNPACK_TIMEOUT = 300
"""Seconds that unpacking the root file system may take."""
NEEDED = [
    "kubeadm",
    "kubelet",
    "kubectl",
    "containerd",
    "containerd-shim-runc-v2",
    "ctr",
    "runc",
    "pause",
    "etcd",
    "coredns",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "kind",
]
_SOURCES = ("node_image.py", "control_plane_images.py", "pod_network.sh")
_DOCKERFILE = """FROM {base}
ENV container=docker
STOPSIGNAL SIGRTMIN+3
ENTRYPOINT ["/usr/local/bin/entrypoint", "/sbin/init"]
"""
"""The metadata of kind's base image; `docker import` cannot set a stop signal. systemd shuts down by this one."""
_UNITS = ("containerd", "kubelet", "pod-network", "undo-mount-hacks")
_POD_NETWORK = """[Unit]
Description=network of the pods
After=containerd.service

[Service]
ExecStart=/usr/local/bin/pod-network
Restart=always
RestartSec=1
"""
_MANIFEST = """apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: pod-network
rules:
- {apiGroups: [""], resources: [nodes], verbs: [get, list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: pod-network
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: pod-network}
subjects:
- {apiGroup: rbac.authorization.k8s.io, kind: Group, name: "system:nodes"}
"""
"""kind applies it as the manifest of the network: every node reads where the others are."""


def main() -> int:
    """Build the image, load it into the Docker engine, print its name. Return 0, 1 when it failed, 2 when refused."""
    try:
        print(load(build(binaries.report_progress), binaries.report_progress))
    except UsageError as problem:
        print(f"node image: {problem}", file=sys.stderr)
        return 2
    except TimedOut as problem:
        print(f"node image: {problem}", file=sys.stderr)
        return 1
    return 0


def build(report: Callable[[str], None]) -> Path:
    """Build the image's files unless they exist, and return the archive of them. Needs no Docker engine.

    Raises UsageError and TimedOut.
    """
    binaries.build_missing(NEEDED, report)
    target = files()
    if not target.exists():
        check_disk(
            node_root.folder(),
            REQUIRED_BYTES,
            "a node image",
            "FINETUNE_CACHE to a folder on a larger disk",
        )
        root = node_root.provide(report)
        with locked(node_root.folder()):
            if not target.exists():
                report("building the programs and images of kind's nodes …")
                _build(root, target)
            _delete_unused({root, target})
    # The modification time is the time of the last use.
    for used in filter(Path.exists, (node_root.archive(), target)):
        os.utime(used)
    return target


def files() -> Path:
    """Return the path of the image's files, which need not exist yet; its name has a hash of all that is in it."""
    parts = [
        node_root.archive().name,
        binaries.folder().name,
        binaries.folder("kubeadm").name,
    ]
    parts += [Path(__file__).with_name(name).read_text() for name in _SOURCES]
    return (
        node_root.folder()
        / f"node-{hashlib.sha256(''.join(parts).encode()).hexdigest()[:16]}.tar"
    )


def load(archive: Path, report: Callable[[str], None]) -> str:
    """Load the image into the Docker engine unless it has it, and return its name. Raises TimedOut."""
    name = f"{REPOSITORY}:{archive.stem.removeprefix('node-')}"
    if not ENGINES["docker"].digest(name):
        report(f"loading {name} into the Docker engine …")
        imported = f"{name}-files"
        # Not `docker load`, which writes the files twice.
        with archive.open("rb") as content:
            _docker("import", "-", imported, stdin=content)
        with tempfile.TemporaryFile() as dockerfile:
            dockerfile.write(_DOCKERFILE.format(base=imported).encode())
            dockerfile.seek(0)
            _docker("build", f"--tag={name}", "-", stdin=dockerfile)
        _docker("image", "rm", imported)
    return name


def _docker(*arguments: str, stdin: IO[bytes] | None = None) -> None:
    command = ["docker", *arguments]
    done = subprocess.run(
        command,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode:
        raise TimedOut(
            f"docker {arguments[0]}: {done.stdout.decode(errors='replace').strip()[-1000:]}"
        )


def _delete_unused(kept: set[Path]) -> None:
    """Delete archives of other versions, unless another checkout of this host has used them within a day."""
    for archive in node_root.folder().glob("*.tar"):
        if archive not in kept and archive.stat().st_mtime < time.time() - KEEP_SECONDS:
            archive.unlink()


def _build(root: Path, target: Path) -> None:
    for leftover in target.parent.glob(".node-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        dir=target.parent, prefix=".node-", ignore_cleanup_errors=True
    ) as folder:
        scratch = Path(folder)
        tree = scratch / "tree"
        tree.mkdir()
        run_command("tar", "-C", str(tree), "-xf", str(root), timeout=UNPACK_TIMEOUT)
        _copy_base_files(tree)
        _install_programs(tree)
        _configure(tree)
        store = tree / "var/lib/containerd"
        store.mkdir()
        control_plane_images.fill_store(store, tree, _sandbox_image(tree), scratch)
        node_root.pack(tree, target)


def _copy_base_files(tree: Path) -> None:
    """Copy the files of kind's base image; modules have no file modes, so programs are known by their folder."""
    source = binaries.source("kind") / "images/base/files"
    for file in source.rglob("*"):
        if file.is_file():
            target = tree / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
            target.chmod(0o755 if file.parent.name == "bin" else 0o644)


def _install_programs(tree: Path) -> None:
    places = {"usr/bin": ("kubeadm", "kubelet", "kubectl"), "usr/local/sbin": ("runc",)}
    places["usr/local/bin"] = ("containerd", "containerd-shim-runc-v2", "ctr")
    for place, names in places.items():
        (tree / place).mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copy(binaries.program(name), tree / place / name)
    shutil.copy(
        Path(__file__).with_name("pod_network.sh"), tree / "usr/local/bin/pod-network"
    )
    (tree / "usr/local/bin/pod-network").chmod(0o755)
    (tree / "opt/cni").mkdir()
    (tree / "opt/cni/bin").symlink_to("/usr/lib/cni")


def _configure(tree: Path) -> None:
    """Write what kind's own build would write, and the settings that older kernels and limited roots need."""
    units = tree / "etc/systemd/system"
    (units / "pod-network.service").write_text(_POD_NETWORK)
    (units / "multi-user.target.wants").mkdir(exist_ok=True)
    for unit in _UNITS:
        (units / "multi-user.target.wants" / f"{unit}.service").symlink_to(
            f"/etc/systemd/system/{unit}.service"
        )
    (tree / "etc/containerd/cri-base.json").write_text(json.dumps(_base_spec()))
    (tree / "etc/kubernetes/manifests").mkdir(parents=True)
    (tree / "kind/version").write_text(
        f"v{go_modules.version(go_modules.BINARIES['kubelet'])}"
    )
    (tree / "kind/manifests").mkdir()
    (tree / "kind/manifests/default-cni.yaml").write_text(_MANIFEST)
    # Without CAP_SYS_RESOURCE a process may not set an oom_score_adj below its own.
    _replace(
        tree / "etc/containerd/config.toml",
        "restrict_oom_score_adj = false",
        "restrict_oom_score_adj = true",
    )
    # The kubelet refuses control groups of version 1 by default.
    _replace(
        tree / "etc/default/kubelet",
        "KUBELET_EXTRA_ARGS=",
        "KUBELET_EXTRA_ARGS=--fail-cgroupv1=false ",
    )


def _replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    if old not in text:
        raise UsageError(
            f"kind's {file.name} has no line {old!r} any more; adapt testcluster/kind/node_image.py"
        )
    file.write_text(text.replace(old, new))


def _base_spec() -> dict[str, Any]:
    """Return the OCI configuration of every container: containerd's, kind's hook, and the kubelet's own limits."""
    spec: dict[str, Any] = json.loads(
        run_command(str(binaries.program("ctr")), "oci", "spec")
    )
    spec["hooks"] = {"createContainer": [{"path": "/kind/bin/mount-product-files.sh"}]}
    del spec["process"]["rlimits"]
    return spec


def _sandbox_image(tree: Path) -> str:
    match = re.search(
        r'sandbox_image = "(.*)"', (tree / "etc/containerd/config.toml").read_text()
    )
    if not match:
        raise UsageError(
            "kind's configuration of containerd names no sandbox_image; adapt testcluster/kind"
        )
    return match[1]


if __name__ == "__main__":
    sys.exit(main())
