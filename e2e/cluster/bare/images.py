"""Images without a registry: packed by ourselves, unpacked once, shared by all nodes."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

from e2e.cluster.bare.machine import Machine, wait_until
from e2e.cluster.problems import NotReady, Refused

_LARGE = 100 << 20
"""Bytes."""
_OLD = 3
"""Pantries kept: the one in use and what was in use before it."""


def pack(folder: Path, name: str, programs: dict[str, Path], entrypoint: list[str]) -> Path:
    """Write an image of static programs, {path inside: file here}, into an archive that is named by its content."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as files:
        for name_inside, mode in (("bin", 0o755), ("etc", 0o755), ("tmp", 0o1777)):
            files.addfile(_folder(name_inside, mode))
        for inside, program in programs.items():
            member = tarfile.TarInfo(inside)
            member.size, member.mode = program.stat().st_size, 0o755
            with program.open("rb") as content:
                files.addfile(member, content)
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    config = {
        "architecture": architecture(),
        "os": "linux",
        "config": {"Entrypoint": entrypoint, "User": "65532:65532", "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    parts = {"config.json": json.dumps(config), "manifest.json": json.dumps(manifest)}
    known = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    archive = folder / f"{name.split('/')[-1].replace(':', '-')}-{known}.tar"
    if not archive.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = archive.with_suffix(f".{os.getpid()}")
        with tarfile.open(fresh, "w") as files:
            for part, content in {**{key: text.encode() for key, text in parts.items()}, "layer.tar": layer.getvalue()}.items():
                member = tarfile.TarInfo(part)
                member.size = len(content)
                files.addfile(member, io.BytesIO(content))
        fresh.replace(archive)
    return archive


def _folder(name: str, mode: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.mode = tarfile.DIRTYPE, mode
    return member


def architecture() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def keep_small(archives: Sequence[Path], folder: Path) -> None:
    """Remove large archives of ours; what is in a pantry is not read again, and an engine still has it."""
    for archive in archives:
        if archive.parent == folder and archive.stat().st_size > _LARGE:
            archive.unlink()


def load(machine: Machine, ctr: Path, archives: Sequence[Path]) -> None:
    """Import archives into the containerd of a running machine."""

    def answers() -> bool:
        try:
            machine.run(str(ctr), "version", timeout=5)
        except (NotReady, subprocess.TimeoutExpired):
            return False
        return True

    wait_until(iter(answers, None), 20, f"containerd of {machine.name} is silent: {machine.last_words('containerd')}")
    for archive in archives:
        shown = machine.folder / "import.tar"
        shown.unlink(missing_ok=True)
        try:
            # A hard link costs nothing and lies where the machine can see it.
            shown.hardlink_to(archive)
        except OSError:
            shutil.copyfile(archive, shown)
        try:
            machine.run(str(ctr), "--namespace", "k8s.io", "images", "import", "--local", "--discard-unpacked-layers", str(shown))
        finally:
            shown.unlink()


def stock(pantry: Path, machine: Machine, ctr: Path, archives: Sequence[Path]) -> None:
    """Unpack archives into a folder that nodes' disks are then copied from; machine runs nothing but containerd."""
    load(machine, ctr, archives)
    machine.kill()
    pantry.parent.mkdir(parents=True, exist_ok=True)
    ready = machine.var / "lib" / "containerd"
    try:
        ready.rename(pantry)
    except OSError as taken:
        if not pantry.exists():
            raise NotReady(f"{pantry} cannot be written: {taken}") from taken
    for old in sorted(pantry.parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)[_OLD:]:
        shutil.rmtree(old, ignore_errors=True)


def pantry_name(archives: Sequence[Path], binaries: Path) -> str:
    """Name the pantry that holds just these archives (named by their content), unpacked by this containerd."""
    return hashlib.sha256("\n".join([binaries.name, *sorted(map(str, archives))]).encode()).hexdigest()[:16]


def furnish(pantry: Path, disk: Path) -> None:
    """Give a new node the pantry's images: layers by hard link (nobody writes into a layer), its books as copies."""
    target = disk / "lib" / "containerd"
    target.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["cp", "-al", str(pantry), str(target)], capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run(["cp", "-a", str(pantry), str(target)], check=True)
    for book in target.glob("*/*.db"):
        content = book.read_bytes()
        book.unlink()
        book.write_bytes(content)


def busybox() -> Path:
    """Find the static busybox that test images are made of. Raises Refused when there is none."""
    for place in ("/bin/busybox", "/usr/bin/busybox"):
        if Path(place).exists():
            return Path(place)
    raise Refused("busybox is missing; `make cluster-deps` installs it (Debian: apt install busybox-static)")
