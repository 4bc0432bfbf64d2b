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
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatch
from pathlib import Path
from typing import TypeVar

from finetune_trainer.files import (
    SUFFIX_PATTERN,
    log_once,
    remove_temporary_files,
    sync_folder,
    temporary_name,
    write_durably,
)
from finetune_trainer.runtime.errors import ServiceUnavailable, StageError
from finetune_trainer.runtime.fence import UNFENCED, Fence
from finetune_trainer.runtime.locks import LockingUnsupported, locked, release, try_lock

MANIFEST = "manifest.json"

REPLACEMENT_POLLS, REPLACEMENT_POLL_SECONDS = 100, 0.05
"""Time that a reader allows for two renames; a slow NFS server needs a fraction of a second."""

T = TypeVar("T")


class CorruptArtifact(Exception):
    """An artifact differs from its manifest; the message names the file and the difference."""


def digest_file(path: Path) -> str:
    """Return the SHA-256 digest of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(value: object) -> bytes:
    """Return the canonical JSON encoding of a value: sorted keys, no spaces, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest_of_value(value: object) -> str:
    """Return sha256:… over the canonical JSON encoding of a value."""
    return "sha256:" + hashlib.sha256(canonical_json(value)).hexdigest()


def files_in(folder: Path) -> list[Path]:
    """Return all files below a folder except its manifest, sorted by path."""
    return sorted(
        path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST
    )


def seal(
    folder: Path,
    about: dict[str, object] | None = None,
    known_digests: Mapping[str, str] | None = None,
) -> str:
    """Flush all files of a folder to disk and write its manifest. Return sha256:… over the files' names and contents.

    `about` is stored in the manifest and is not part of the digest. Files whose SHA-256 the caller computed while it
    wrote them are in `known_digests`, by their path in the folder; they are not read again.
    """
    remove_temporary_files(
        folder / MANIFEST
    )  # of a killed process: they would count as files of the artifact
    known = known_digests or {}
    entries = {}
    for path in files_in(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        name = path.relative_to(folder).as_posix()
        entries[name] = {
            "size": path.stat().st_size,
            "sha256": known.get(name) or digest_file(path),
        }
    digest = digest_of_value(entries)
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
        expected = {
            (folder / name): (entry["size"], entry["sha256"]) for name, entry in entries.items()
        }
    except FileNotFoundError:
        raise CorruptArtifact(f"{folder.name}: there is no {MANIFEST}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptArtifact(f"{folder.name}/{MANIFEST} cannot be read: {error!r}") from None
    if digest != digest_of_value(entries):
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
            raise CorruptArtifact(
                f"{name} has {path.stat().st_size} bytes, expected {size} as in its manifest"
            )
        if not fnmatch(path.name, sizes_only) and digest_file(path) != sha256:
            raise CorruptArtifact(f"{name} does not match the digest in its manifest")
    if unexpected := set(files_in(folder)) - set(expected):
        raise CorruptArtifact(
            f"{folder.name}/{min(unexpected).relative_to(folder)} is not in its manifest"
        )


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
def atomic_folder(folder: Path, *, shared: bool = False, fence: Fence = UNFENCED) -> Iterator[Path]:
    """Yield an empty temporary folder and rename it to `folder` at the end of the block.

    An existing `folder` is replaced. If the block raises, the temporary folder is deleted and `folder` stays.
    Temporary folders of killed processes are removed first, those of live ones are not. With `shared`, other
    processes may replace the same folder at the same time: one at a time does, the last one wins. Without it the
    caller keeps them out, by the fence of the stage's folder: raise Replaced if a newer attempt has that.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(folder, shared=shared):
        _finish_replacement(folder)
    remove_leftovers(folder)
    with _temporary_folder(_labelled(folder, fence)) as temporary, fence.telling_why():
        yield temporary
        with _replacing(folder, shared=shared):
            fence.check()
            _finish_replacement(folder)  # again: another process may have been killed since
            move_into_place(temporary, folder)


def _labelled(folder: Path, fence: Fence) -> Path:
    return folder if fence is UNFENCED else folder.with_name(f"{folder.name}.{fence.label}")


def _replacing(folder: Path, *, shared: bool) -> AbstractContextManager[object]:
    """Hold the lock that a process has while it renames; the file stays, because it is small and names the folder."""
    lock = folder.with_name(f".{folder.name}.lock")
    return locked(lock, f"another process that replaces {folder.name}") if shared else nullcontext()


@contextmanager
def _temporary_folder(folder: Path) -> Iterator[Path]:
    """Yield a new empty folder beside `folder`, and delete at the end what then has its name.

    Its lock file exists before it and is deleted after it, so a folder without one belongs to no live process.
    """
    temporary, descriptor = _locked_name(folder)
    lock = _lock_of(temporary)
    try:
        temporary.mkdir()
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if descriptor is not None:
            lock.unlink(missing_ok=True)
            release(descriptor)


def _locked_name(folder: Path) -> tuple[Path, int | None]:
    """Return a new name beside `folder` and the descriptor of its lock, or no descriptor where there are no locks."""
    while True:
        temporary = temporary_name(folder)
        try:
            descriptor = try_lock(_lock_of(temporary))
        except LockingUnsupported as error:
            log_once(
                f"this file system has no locks ({error}): unfinished folders of killed processes stay"
            )
            _lock_of(temporary).unlink(missing_ok=True)
            return temporary, None
        if descriptor is not None:
            return temporary, descriptor
        # A process that removes leftovers took the new lock first, and will remove what has this name.


def _lock_of(temporary: Path) -> Path:
    return temporary.with_name(f"{temporary.name}.lock")


def remove_leftovers(folder: Path) -> None:
    """Remove temporary folders of `folder` whose process is gone: their lock can be taken.

    The lock decides and not the pid: that is 1 in every pod that shares the volume.
    """
    own = f".{glob.escape(folder.name)}"
    patterns = (f"{own}.{SUFFIX_PATTERN}.lock", f"{own}.a*t*.{SUFFIX_PATTERN}.lock")
    for lock in (path for pattern in patterns for path in folder.parent.glob(pattern)):
        try:
            descriptor = try_lock(lock, create=False)
        except (
            OSError,
            LockingUnsupported,
        ):  # removed by another process, or not ours, or no locks here
            continue
        if descriptor is None:
            continue
        shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
        lock.unlink(missing_ok=True)
        release(descriptor)


def move_into_place(temporary: Path, folder: Path) -> None:
    """Rename an artifact to its final name. `temporary` then names what was there before, if anything was.

    Where the file system can exchange two names, readers always find the folder; elsewhere it is missing for a moment.
    """
    if not folder.exists():
        temporary.rename(folder)
    elif not _exchange(temporary, folder):
        temporary.stat()  # raises FileNotFoundError, while the folder is still in place
        log_once(
            "this file system cannot exchange two names: a folder is missing for a moment while it is replaced"
        )
        old = _old_name(folder)
        folder.rename(old)
        try:
            temporary.rename(folder)
        except FileNotFoundError:
            old.rename(folder)
            raise
        old.rename(temporary)
    sync_folder(folder.parent)


def is_present(folder: Path) -> bool:
    """Return whether a folder exists. While another process is between two renames of it, wait for the second one.

    Raise ServiceUnavailable if the second one does not come: that process may have been killed.
    """
    for _ in range(REPLACEMENT_POLLS):
        if folder.exists():
            return True
        if not _old_name(folder).exists():
            return (
                folder.exists()
            )  # a second look: the other process may have finished between the first two
        time.sleep(REPLACEMENT_POLL_SECONDS)
    raise ServiceUnavailable(
        f"{folder} is missing and {_old_name(folder).name} is there: the process that replaces it "
        "may have been killed; run that stage again, it completes the replacement"
    )


def read_unreplaced(folder: Path, read: Callable[[], T]) -> T:
    """Return `read()`; call it again if it raises because another process replaced the folder meanwhile.

    A read that succeeds has seen one version: it compares what it finds with one manifest.
    """
    while True:
        before = _version(folder)
        try:
            return read()
        except (CorruptArtifact, StageError, OSError):
            if _version(folder) == before:
                raise


def _version(folder: Path) -> tuple[int, int] | None:
    """Return what differs between two folders that have the same name one after the other."""
    if not is_present(folder):
        return None
    try:
        found = folder.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_ctime_ns


def complete_replacement(folder: Path) -> None:
    """Undo or complete the renames of a process that was killed between two of them; wait for those of a live one."""
    if _old_name(folder).exists():
        with _replacing(folder, shared=True):
            _finish_replacement(folder)


def _finish_replacement(folder: Path) -> None:
    old = _old_name(folder)
    if old.exists() and not folder.exists():
        old.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _old_name(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names atomically; return False if the operating system or the file system cannot."""
    library = ctypes.CDLL(None)
    names = os.fsencode(one), os.fsencode(other)
    if hasattr(library, "renameat2"):  # Linux with glibc 2.28 or musl 1.2.5
        at_working_folder, exchange = -100, 2
        return bool(
            library.renameat2(at_working_folder, names[0], at_working_folder, names[1], exchange)
            == 0
        )
    if hasattr(library, "renamex_np"):  # macOS
        return bool(library.renamex_np(*names, 2) == 0)
    return False
