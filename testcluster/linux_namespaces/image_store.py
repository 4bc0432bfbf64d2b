"""Images without a registry: each set of images is unpacked once into an image store that all nodes are cloned from."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from testcluster.cluster_state import cache, locked, read_field
from testcluster.errors import TimedOut
from testcluster.linux_namespaces.machine import Machine, wait_until


def stores() -> Path:
    """Return the folder that holds all image stores."""
    return cache() / "image-stores"


def load(machine: Machine, ctr: Path, archives: Sequence[Path]) -> None:
    """Import archives into the containerd of a running machine. Raises TimedOut."""

    def is_serving() -> bool:
        try:
            machine.run(str(ctr), "version", timeout=5)
        except TimedOut:
            return False
        return True

    wait_until(
        iter(is_serving, None),
        20,
        f"containerd of {machine.name} does not answer; its log ends: {machine.log_tail('containerd')}",
    )
    for archive in archives:
        visible = machine.folder / "import.tar"
        visible.unlink(missing_ok=True)
        try:
            # A hard link costs nothing, and the machine can see its own folder.
            visible.hardlink_to(archive)
        except OSError:
            shutil.copyfile(archive, visible)
        try:
            machine.run(
                str(ctr),
                "--namespace",
                "k8s.io",
                "images",
                "import",
                "--local",
                "--discard-unpacked-layers",
                str(visible),
            )
        finally:
            visible.unlink()


def provide(store: Path, fill: Callable[[], None]) -> None:
    """Fill an image store unless it exists. Clusters that need it at the same time wait for the one that fills it."""
    with locked(store.parent):
        if not store.exists():
            fill()
            _delete_unused(store.parent, set(read_field("image_store")))
        # The modification time is the time of the last use.
        os.utime(store)


def prepare_store(
    store: Path, machine: Machine, ctr: Path, archives: Sequence[Path]
) -> None:
    """Unpack archives into an image store, by a machine that runs nothing but containerd. Raises TimedOut."""
    load(machine, ctr, archives)
    # An unpacked layer does not need its compressed content; without this call containerd would delete it later.
    machine.run(str(ctr), "--namespace", "k8s.io", "content", "prune", "references")
    machine.kill()
    try:
        (machine.var / "lib" / "containerd").rename(store)
    except OSError as error:
        raise TimedOut(f"cannot write {store}: {error}") from error


def _delete_unused(folder: Path, in_use: set[str]) -> None:
    """Delete stores that no cluster uses, except the last one used; each may hold gigabytes."""
    by_age = sorted(
        folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True
    )
    for old in by_age[1:]:
        if old.name not in in_use:
            shutil.rmtree(old, ignore_errors=True)


def store_name(archives: Sequence[Path], binaries: Path) -> str:
    """Return the name of the store that holds exactly these archives, unpacked by this version of containerd.

    Archives that an engine exported have their digest in their name. A user's own archive is identified by its size
    and modification time.
    """
    identities = (f"{archive} {_version(archive)}" for archive in sorted(archives))
    return hashlib.sha256("\n".join([binaries.name, *identities]).encode()).hexdigest()[
        :16
    ]


def _version(archive: Path) -> str:
    if archive.parent == cache() / "images":
        return ""
    status = archive.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def protect(archive: Path, folder: Path) -> Path:
    """Copy an archive into the cluster's folder and return the copy.

    Nodes created later need it, and the user may move or change the original.
    """
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


def clone_store(store: Path, disk: Path) -> None:
    """Populate a new node's disk from an image store: hard-link the layers, copy the databases.

    No process writes into a layer, but a node writes into its databases. The clone gets its final name last, because
    the databases of an interrupted clone are still hard links to databases of the store.
    """
    target = disk / "lib" / "containerd"
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    for interrupted in target.parent.glob("containerd.*"):
        shutil.rmtree(interrupted, ignore_errors=True)
    clone = target.with_name(f"containerd.{os.getpid()}")
    done = subprocess.run(
        ["cp", "-al", str(store), str(clone)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        # Hard links may fail, for example across file systems.
        shutil.rmtree(clone, ignore_errors=True)
        subprocess.run(["cp", "-a", str(store), str(clone)], check=True)
    for database in clone.glob("*/*.db"):
        content = database.read_bytes()
        database.unlink()
        database.write_bytes(content)
    clone.rename(target)
