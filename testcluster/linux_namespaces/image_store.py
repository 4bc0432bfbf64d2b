"""Images without a registry: unpacked once, shared by all nodes."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from testcluster.errors import TimedOut
from testcluster.linux_namespaces.machine import Machine, wait_until
from testcluster.state import cache, locked, read_field


def load(machine: Machine, ctr: Path, archives: Sequence[Path]) -> None:
    """Import archives into the containerd of a running machine."""

    def answers() -> bool:
        try:
            machine.run(str(ctr), "version", timeout=5)
        except TimedOut:
            return False
        return True

    wait_until(iter(answers, None), 20, f"containerd of {machine.name} is silent: {machine.log_tail('containerd')}")
    for archive in archives:
        shown = machine.folder / "import.tar"
        shown.unlink(missing_ok=True)
        try:
            # A hard link costs nothing and lies where the machine can see it.
            shown.hardlink_to(archive)
        except OSError:
            shutil.copyfile(archive, shown)
        try:
            machine.run(
                str(ctr),
                "--namespace",
                "k8s.io",
                "images",
                "import",
                "--local",
                "--discard-unpacked-layers",
                str(shown),
            )
        finally:
            shown.unlink()


def provide(pantry: Path, fill: Callable[[], None]) -> None:
    """Have a pantry, filled by whoever wants it first: others who come meanwhile wait, and find it."""
    with locked(pantry.parent):
        if not pantry.exists():
            fill()
            _clear_out(pantry.parent, set(read_field("image_store")))
        os.utime(pantry)


def prepare_store(pantry: Path, machine: Machine, ctr: Path, archives: Sequence[Path]) -> None:
    """Unpack archives into a folder that nodes' disks are then copied from; machine runs nothing but containerd."""
    load(machine, ctr, archives)
    # Unpacked layers need no archive of themselves; without this they would go when nobody waits any more.
    machine.run(str(ctr), "--namespace", "k8s.io", "content", "prune", "references")
    machine.kill()
    try:
        (machine.var / "lib" / "containerd").rename(pantry)
    except OSError as refused:
        raise TimedOut(f"{pantry} cannot be written: {refused}") from refused


def _clear_out(pantries: Path, in_use: set[str]) -> None:
    """Remove pantries that no cluster was made from, but for the last one used; each may hold gigabytes."""
    by_age = sorted(pantries.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in by_age[1:]:
        if old.name not in in_use:
            shutil.rmtree(old, ignore_errors=True)


def store_name(archives: Sequence[Path], binaries: Path) -> str:
    """Name the pantry that holds just these archives, unpacked by this containerd.

    An engine's archive is named by its content; somebody's own is known by its size and the time of its last change.
    """
    known = (f"{archive} {_version(archive)}" for archive in sorted(archives))
    return hashlib.sha256("\n".join([binaries.name, *known]).encode()).hexdigest()[:16]


def _version(archive: Path) -> str:
    if archive.parent == cache() / "images":
        return ""
    status = archive.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def protect(archive: Path, folder: Path) -> Path:
    """Have an archive in a folder of the cluster's own: fresh nodes need it, and its owner may move or change it."""
    if archive.parent == folder:
        return archive
    with archive.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    kept = folder / f"{archive.stem}-{content}.tar"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = kept.with_suffix(".new")
        shutil.copyfile(archive, fresh)
        fresh.replace(kept)
    return kept


def clone_store(pantry: Path, disk: Path) -> None:
    """Give a new node the pantry's images: layers by hard link (nobody writes into a layer), its books as copies.

    It gets its name last: a copy that was broken off still has the pantry's books, which a node would write into.
    """
    target = disk / "lib" / "containerd"
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    for broken_off in target.parent.glob("containerd.*"):
        shutil.rmtree(broken_off, ignore_errors=True)
    copy = target.with_name(f"containerd.{os.getpid()}")
    done = subprocess.run(["cp", "-al", str(pantry), str(copy)], capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(copy, ignore_errors=True)
        subprocess.run(["cp", "-a", str(pantry), str(copy)], check=True)
    for book in copy.glob("*/*.db"):
        content = book.read_bytes()
        book.unlink()
        book.write_bytes(content)
    copy.rename(target)
