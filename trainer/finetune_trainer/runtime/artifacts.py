"""Folders that are whole or not there: written beside their place, made durable, sealed, renamed.

A sealed folder holds `manifest.json` with the size and SHA-256 of every other file in it.
"""

import ctypes
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune_trainer.files import sync_folder, write_durably

MANIFEST = "manifest.json"


class CorruptArtifact(Exception):
    """A sealed folder is not what it was when it was sealed; says which file and how."""


def digest_file(path: Path) -> str:
    """Give the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(value: object) -> bytes:
    """Give the one JSON text of a value: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def files_in(folder: Path) -> list[Path]:
    """List every file below a folder but its manifest, in the order of their names."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)


def seal(folder: Path, about: dict[str, object] | None = None) -> str:
    """Make everything in a folder durable and write its manifest; give sha256:… over the files' names and contents.

    `about` goes into the manifest beside the files and is not part of the digest.
    """
    entries = {}
    for path in files_in(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        entries[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": digest_file(path)}
    digest = "sha256:" + hashlib.sha256(canonical_json(entries)).hexdigest()
    manifest = {"digest": digest, "files": entries, "about": about or {}}
    write_durably(folder / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())
    return digest


def verify(folder: Path) -> dict[str, object]:
    """Read every byte of a sealed folder and give what its manifest is about; raise Damaged where one differs."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        entries, digest, about = manifest["files"], manifest["digest"], manifest["about"]
        named = {(folder / name): (entry["size"], entry["sha256"]) for name, entry in entries.items()}
    except FileNotFoundError:
        raise CorruptArtifact(f"{folder.name}: there is no {MANIFEST}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptArtifact(f"{folder.name}/{MANIFEST} cannot be read: {error!r}") from None
    if digest != "sha256:" + hashlib.sha256(canonical_json(entries)).hexdigest():
        raise CorruptArtifact(f"{folder.name}/{MANIFEST} does not match its own digest")
    _verify_files(folder, named)
    if not isinstance(about, dict):
        raise CorruptArtifact(f"{folder.name}/{MANIFEST} cannot be read: about is no object")
    return about


def _verify_files(folder: Path, named: dict[Path, tuple[int, str]]) -> None:
    for path, (size, sha256) in named.items():
        where = f"{folder.name}/{path.relative_to(folder)}"
        if not path.is_file():
            raise CorruptArtifact(f"{where} is missing")
        if path.stat().st_size != size:
            raise CorruptArtifact(f"{where} has {path.stat().st_size} bytes, its manifest says {size}")
        if digest_file(path) != sha256:
            raise CorruptArtifact(f"{where} has other contents than its manifest says")
    if strangers := set(files_in(folder)) - set(named):
        raise CorruptArtifact(f"{folder.name}/{min(strangers).relative_to(folder)} is not in its manifest")


def matches_digest(folder: Path, digest: str) -> bool:
    """Whether a sealed folder is whole and has this digest; reads every byte of it and says what is wrong."""
    try:
        verify(folder)
        return digest_of(folder) == digest
    except CorruptArtifact as damaged:
        print(f"{damaged}; doing it again", flush=True)
        return False


def digest_of(folder: Path) -> str:
    """Give the digest that `seal` gave; raise Damaged where there is no readable manifest."""
    try:
        return str(json.loads((folder / MANIFEST).read_bytes())["digest"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptArtifact(f"{folder.name}/{MANIFEST} cannot be read: {error!r}") from None


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Give an empty folder beside `folder` that takes its place, whole, when the block ends well.

    What was at `folder` before is replaced. Leftovers of processes that were killed here are removed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(folder)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    temporary.mkdir()
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    move_into_place(temporary, folder)


def _clear_leftovers(folder: Path) -> None:
    old = folder.with_name(f".{folder.name}.old")
    if old.exists() and not folder.exists():
        old.rename(folder)  # killed between the two renames of move_into_place
    for leftover in folder.parent.glob(f".{glob.escape(folder.name)}.*"):
        if leftover == old or leftover.suffix[1:].isdigit():
            shutil.rmtree(leftover, ignore_errors=True)


def move_into_place(temporary: Path, folder: Path) -> None:
    """Rename a sealed folder to its final name; where the kernel can exchange two names, a reader never misses one."""
    if folder.exists() and not _exchange(temporary, folder):
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        temporary.rename(folder)
        temporary = old
    elif not folder.exists():
        temporary.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(temporary, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where the system or the file system cannot."""
    library = ctypes.CDLL(None)
    names = os.fsencode(one), os.fsencode(other)
    if hasattr(library, "renameat2"):  # Linux with glibc 2.28 or musl 1.2.5
        at_working_folder, exchange = -100, 2
        return bool(library.renameat2(at_working_folder, names[0], at_working_folder, names[1], exchange) == 0)
    if hasattr(library, "renamex_np"):  # macOS
        return bool(library.renamex_np(*names, 2) == 0)
    return False
