"""Artifacts: folders that appear atomically, with a manifest of their files.

An artifact is written to a temporary folder, flushed to disk, sealed, and renamed. Sealing writes `manifest.json`
with the size and the SHA-256 digest of every other file in the folder.
"""

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
from finetune_trainer.runtime.exchange import exchange
from finetune_trainer.runtime.fence import UNFENCED, Fence
from finetune_trainer.runtime.locks import LockingUnsupported, locked, release, try_lock

MANIFEST = "manifest.json"

# Together 5 s for two renames: a slow NFS server needs a fraction of a second.
REPLACEMENT_POLLS = 100
REPLACEMENT_POLL_SECONDS = 0.05


T = TypeVar("T")


class CorruptArtifact(Exception):
    """An artifact differs from its manifest; the message names the file and the difference."""


def digest_file(path: Path) -> str:
    """Return the SHA-256 digest of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(value: object) -> bytes:
    """Return the canonical JSON encoding of a value: sorted keys, no spaces, UTF-8."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False
    ).encode()


def digest_of_value(value: object) -> str:
    """Return sha256:… over the canonical JSON encoding of a value."""
    return "sha256:" + hashlib.sha256(canonical_json(value)).hexdigest()


def files_in(folder: Path) -> list[Path]:
    """Return all files below a folder except its manifest, sorted by path."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path != folder / MANIFEST
    )


def seal(
    folder: Path,
    about: dict[str, object] | None = None,
    known_digests: Mapping[str, str] | None = None,
) -> str:
    """Flush all files of a folder to disk and write its manifest. Return sha256:… over the files' names and contents.

    `about` is stored in the manifest and is not part of the digest. `known_digests` has the SHA-256 of files by their
    path in the folder, computed by the caller when it wrote them; these files are not read again.
    """
    # Temporary files of a killed process would count as files of the artifact.
    remove_temporary_files(folder / MANIFEST)
    known = known_digests or {}
    entries = {}
    for path in files_in(folder):
        # The manifest is written last: if it survives a crash, so have all files that it names.
        _sync_file(path)
        name = path.relative_to(folder).as_posix()
        entries[name] = {
            "size": path.stat().st_size,
            "sha256": known.get(name) or digest_file(path),
        }
    digest = digest_of_value(entries)
    manifest = {"digest": digest, "files": entries, "about": about or {}}
    write_durably(
        folder / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode()
    )
    return digest


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def verify(folder: Path, *, sizes_only: str = "") -> dict[str, object]:
    """Check every byte of an artifact and return its manifest's `about`; raise CorruptArtifact on a difference.

    If a file's name matches the pattern `sizes_only`, only its size is checked: the caller verifies its content.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        entries = manifest["files"]
        digest = manifest["digest"]
        about = manifest["about"]
        expected = {
            (folder / name): (entry["size"], entry["sha256"])
            for name, entry in entries.items()
        }
    except FileNotFoundError:
        raise CorruptArtifact(f"{folder.name}: there is no {MANIFEST}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptArtifact(
            f"{folder.name}/{MANIFEST} cannot be read: {error!r}"
        ) from None
    if digest != digest_of_value(entries):
        raise CorruptArtifact(f"{folder.name}/{MANIFEST} does not match its own digest")
    _verify_files(folder, expected, sizes_only)
    if not isinstance(about, dict):
        raise CorruptArtifact(
            f"{folder.name}/{MANIFEST} cannot be read: about is not an object"
        )
    return about


def _verify_files(
    folder: Path, expected: dict[Path, tuple[int, str]], sizes_only: str
) -> None:
    for path, (size, sha256) in expected.items():
        name = f"{folder.name}/{path.relative_to(folder)}"
        if not path.is_file():
            raise CorruptArtifact(f"{name} is missing")
        observed = path.stat().st_size
        # The size first: it is known without reading the file.
        if observed != size:
            raise CorruptArtifact(
                f"{name} has {observed} bytes, expected {size} as in its manifest"
            )
        if fnmatch(path.name, sizes_only):
            continue
        if digest_file(path) != sha256:
            raise CorruptArtifact(f"{name} does not match the digest in its manifest")
    unexpected = set(files_in(folder)) - set(expected)
    if unexpected:
        first = min(unexpected).relative_to(folder)
        raise CorruptArtifact(f"{folder.name}/{first} is not in its manifest")


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
        raise CorruptArtifact(
            f"{folder.name}/{MANIFEST} cannot be read: {error!r}"
        ) from None


@contextmanager
def atomic_folder(
    folder: Path, *, shared: bool = False, fence: Fence = UNFENCED
) -> Iterator[Path]:
    """Yield an empty temporary folder and rename it to `folder` at the end of the block.

    An existing `folder` is replaced. If the block raises, the temporary folder is deleted and `folder` stays.
    Temporary folders of killed processes are removed first, and temporary folders of live processes stay. With
    `shared`, other processes may replace the same folder at the same time: they do so one after another, and the last
    process wins. Without it, the caller keeps them out by the fence of the stage's folder: raise Replaced if a newer
    attempt has this folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(folder, shared=shared):
        _finish_replacement(folder)
    remove_leftovers(folder)
    with (
        _temporary_folder(_labelled(folder, fence)) as temporary,
        fence.raising_replaced(),
    ):
        yield temporary
        with _replacing(folder, shared=shared):
            # Right before the rename: a process that is replaced after this check has lost its temporary folder.
            fence.check()
            # Again, because another process may have been killed since the first time.
            _finish_replacement(folder)
            move_into_place(temporary, folder)


def _labelled(folder: Path, fence: Fence) -> Path:
    # The label lets a later attempt recognize and remove the temporary folders of earlier attempts.
    if fence is UNFENCED:
        return folder
    return folder.with_name(f"{folder.name}.{fence.label}")


def _replacing(folder: Path, *, shared: bool) -> AbstractContextManager[object]:
    """Hold the lock that a process has while it renames; the file stays, because it is small and names the folder."""
    if not shared:
        return nullcontext()
    lock = folder.with_name(f".{folder.name}.lock")
    return locked(lock, f"another process that replaces {folder.name}")


@contextmanager
def _temporary_folder(folder: Path) -> Iterator[Path]:
    """Yield a new empty folder beside `folder`, and delete the folder that has its name at the end."""
    # The lock file exists before the folder and is deleted after it, so a folder without it belongs to no live process.
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
    """Return a new name beside `folder` and the descriptor of its lock; None if the file system has no locks."""
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
        # A process that removes leftovers took the new lock first, and will remove a folder of this name.


def _lock_of(temporary: Path) -> Path:
    return temporary.with_name(f"{temporary.name}.lock")


def remove_leftovers(folder: Path) -> None:
    """Remove temporary folders of `folder` whose process has ended: their lock can be taken.

    The lock decides and not the pid, which is 1 in every pod that shares the volume.
    """
    own = f".{glob.escape(folder.name)}"
    # Names without and with the label of an attempt.
    for pattern in (
        f"{own}.{SUFFIX_PATTERN}.lock",
        f"{own}.a*t*.{SUFFIX_PATTERN}.lock",
    ):
        for lock in folder.parent.glob(pattern):
            _remove_if_abandoned(lock)


def _remove_if_abandoned(lock: Path) -> None:
    try:
        descriptor = try_lock(lock, create=False)
    except (OSError, LockingUnsupported):
        # Another process has removed it, or it belongs to another user, or there are no locks here.
        return
    if descriptor is None:
        return
    # The folder first: without its lock file, no process would remove it any more.
    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
    lock.unlink(missing_ok=True)
    release(descriptor)


def move_into_place(temporary: Path, folder: Path) -> None:
    """Rename an artifact to its final name. `temporary` then names the folder that was there before, if any.

    If the file system can exchange two names, readers always find the folder; else it is missing for a moment.
    """
    if not folder.exists():
        temporary.rename(folder)
    elif not exchange(temporary, folder):
        _replace_by_renames(temporary, folder)
    sync_folder(folder.parent)


def _replace_by_renames(temporary: Path, folder: Path) -> None:
    # Raises FileNotFoundError while the folder is still in place, if a newer attempt has removed `temporary`.
    temporary.stat()
    log_once(
        "this file system cannot exchange two names: a folder is missing for a moment while it is replaced"
    )
    # After a kill between the renames, `_finish_replacement` finds the old folder by its name.
    old = _old_name(folder)
    folder.rename(old)
    try:
        temporary.rename(folder)
    except FileNotFoundError:
        old.rename(folder)
        raise
    old.rename(temporary)


def is_present(folder: Path) -> bool:
    """Return whether a folder exists. While another process is between two renames of it, wait for the second rename.

    Raise ServiceUnavailable if the second rename does not come: the other process may have been killed.
    """
    for _ in range(REPLACEMENT_POLLS):
        if folder.exists():
            return True
        if not _old_name(folder).exists():
            # A second look: the other process may have finished between the two checks above.
            return folder.exists()
        time.sleep(REPLACEMENT_POLL_SECONDS)
    raise ServiceUnavailable(
        f"{folder} is missing and {_old_name(folder).name} is there: the process that replaces it "
        "may have been killed; run that stage again, it completes the replacement"
    )


def read_unreplaced(folder: Path, read: Callable[[], T]) -> T:
    """Return `read()`; call it again if it raises because another process replaced the folder meanwhile.

    A read that succeeds has seen a single version, because it compares all files with one manifest.
    """
    while True:
        before = _version(folder)
        try:
            return read()
        except (CorruptArtifact, StageError, OSError):
            if _version(folder) == before:
                raise


def _version(folder: Path) -> tuple[int, int] | None:
    """Return values that differ between two folders that have the same name one after the other."""
    if not is_present(folder):
        return None
    try:
        status = folder.stat()
    except FileNotFoundError:
        return None
    # An inode number may be used again, so the time of its last change is needed, too.
    return status.st_ino, status.st_ctime_ns


def complete_replacement(folder: Path) -> None:
    """Undo or complete the renames of a process that was killed between them; wait for the renames of others."""
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
