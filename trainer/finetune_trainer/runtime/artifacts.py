"""Artifacts: folders that appear atomically, with a manifest of their files.

An artifact is written to a temporary folder, flushed to disk, sealed, and renamed. Sealing writes `manifest.json`
with the size and the SHA-256 digest of every other file in the folder.
"""

import ctypes
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from finetune_trainer.files import sync_folder, write_durably

MANIFEST = "manifest.json"


class CorruptArtifact(Exception):
    """An artifact differs from its manifest; the message names the file and the difference."""


def digest_file(path: Path) -> str:
    """Return the SHA-256 digest of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(value: object) -> bytes:
    """Return the canonical JSON encoding of a value: sorted keys, no spaces, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def files_in(folder: Path) -> list[Path]:
    """Return all files below a folder except its manifest, sorted by path."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)


def seal(folder: Path, about: dict[str, object] | None = None, known_digests: Mapping[str, str] | None = None) -> str:
    """Flush all files of a folder to disk and write its manifest. Return sha256:… over the files' names and contents.

    `about` is stored in the manifest and is not part of the digest. Files whose SHA-256 the caller computed while it
    wrote them are in `known_digests`, by their path in the folder; they are not read again.
    """
    known = known_digests or {}
    entries = {}
    for path in files_in(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        name = path.relative_to(folder).as_posix()
        entries[name] = {"size": path.stat().st_size, "sha256": known.get(name) or digest_file(path)}
    digest = "sha256:" + hashlib.sha256(canonical_json(entries)).hexdigest()
    manifest = {"digest": digest, "files": entries, "about": about or {}}
    write_durably(folder / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())
    return digest


def verify(folder: Path, *, sizes_only: str = "") -> dict[str, object]:
    """Check every byte of an artifact and return its manifest's `about`; raise CorruptArtifact on a difference.

    Of files whose name matches the pattern `sizes_only`, only the size is checked: the caller verifies their content.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        entries, digest, about = manifest["files"], manifest["digest"], manifest["about"]
        expected = {(folder / name): (entry["size"], entry["sha256"]) for name, entry in entries.items()}
    except FileNotFoundError:
        raise CorruptArtifact(f"{folder.name}: there is no {MANIFEST}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptArtifact(f"{folder.name}/{MANIFEST} cannot be read: {error!r}") from None
    if digest != "sha256:" + hashlib.sha256(canonical_json(entries)).hexdigest():
        raise CorruptArtifact(f"{folder.name}/{MANIFEST} does not match its own digest")
    _verify_files(folder, expected, sizes_only)
    if not isinstance(about, dict):
        raise CorruptArtifact(f"{folder.name}/{MANIFEST} cannot be read: about is not an object")
    return about


def _verify_files(folder: Path, expected: dict[Path, tuple[int, str]], sizes_only: str) -> None:
    for path, (size, sha256) in expected.items():
        name = f"{folder.name}/{path.relative_to(folder)}"
        if not path.is_file():
            raise CorruptArtifact(f"{name} is missing")
        if path.stat().st_size != size:
            raise CorruptArtifact(f"{name} has {path.stat().st_size} bytes, expected {size} as in its manifest")
        if not fnmatch(path.name, sizes_only) and digest_file(path) != sha256:
            raise CorruptArtifact(f"{name} does not match the digest in its manifest")
    if unexpected := set(files_in(folder)) - set(expected):
        raise CorruptArtifact(f"{folder.name}/{min(unexpected).relative_to(folder)} is not in its manifest")


def matches_digest(folder: Path, digest: str) -> bool:
    """Return whether an artifact is intact and has this digest. Reads every byte and prints what is corrupt."""
    try:
        verify(folder)
        return digest_of(folder) == digest
    except CorruptArtifact as error:
        print(f"{error}; running the stage again", flush=True)
        return False


def digest_of(folder: Path) -> str:
    """Return the digest that `seal` returned; raise CorruptArtifact if the manifest cannot be read."""
    try:
        return str(json.loads((folder / MANIFEST).read_bytes())["digest"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptArtifact(f"{folder.name}/{MANIFEST} cannot be read: {error!r}") from None


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty temporary folder and rename it to `folder` at the end of the block.

    An existing `folder` is replaced. If the block raises, the temporary folder is deleted and `folder` stays.
    Temporary folders of killed processes are removed first.
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
        old.rename(folder)  # a process was killed between the two renames of move_into_place
    for leftover in folder.parent.glob(f".{glob.escape(folder.name)}.*"):
        if leftover == old or leftover.suffix[1:].isdigit():
            shutil.rmtree(leftover, ignore_errors=True)


def move_into_place(temporary: Path, folder: Path) -> None:
    """Rename an artifact to its final name. Where the kernel can exchange two names, readers always find the name."""
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
    """Exchange two names atomically; return False if the operating system or the file system cannot."""
    library = ctypes.CDLL(None)
    names = os.fsencode(one), os.fsencode(other)
    if hasattr(library, "renameat2"):  # Linux with glibc 2.28 or musl 1.2.5
        at_working_folder, exchange = -100, 2
        return bool(library.renameat2(at_working_folder, names[0], at_working_folder, names[1], exchange) == 0)
    if hasattr(library, "renamex_np"):  # macOS
        return bool(library.renamex_np(*names, 2) == 0)
    return False
