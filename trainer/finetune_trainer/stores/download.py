"""Downloads of sources to a cache folder, which stages, attempts and pods share.

`CACHE/NAME/files/` has the files and `CACHE/NAME/parts/` what is unfinished. `CACHE/NAME/manifest.json` comes last and
makes the folder complete. NAME stands for the URI, the pin and the patterns of the files.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from finetune_trainer.files import sync_folder
from finetune_trainer.runtime.artifacts import MANIFEST, canonical_json, digest_file, seal
from finetune_trainer.runtime.errors import DataInvalid, ServiceUnavailable, SourceNotFound
from finetune_trainer.runtime.locks import locked
from finetune_trainer.runtime.progress import log_line
from finetune_trainer.stores.concurrent import for_each, in_thread
from finetune_trainer.stores.following import follow
from finetune_trainer.stores.port import Listing, RemoteFile, StoreSource

FILES, PARTS = "files", "parts"
ALL_FILES = ("**",)
PARALLEL_DOWNLOADS = 4
NAME_DIGITS = 16


def fetch(
    source: StoreSource, pin: str | None, cache: Path, wanted: Sequence[str] = ALL_FILES
) -> tuple[Path, Listing]:
    """Return a folder with the files of a source that match one of the patterns, and their listing.

    A pattern matches names with as many / as it has itself; ** matches all. Without a pin the source is listed, and
    the listing has the pin. With one, a complete copy in the cache needs no request.

    Raise what the source raises. Raise SourceNotFound if no file matches, DataInvalid if a file differs from what the
    store says of it, and ServiceUnavailable if the disk is full. Raise Interrupted as `concurrent.for_each` does.
    """
    listing = None if pin else in_thread(lambda: source.list_files(None))
    folder = cache / _name(source.uri, listing.pin if listing else str(pin), wanted)
    if (cached := _read_complete(folder)) is not None:
        return folder / FILES, cached
    with _exclusive(folder):
        if (
            cached := _read_complete(folder)
        ) is None:  # else another process has completed it meanwhile
            listing = listing or in_thread(lambda: source.list_files(pin))
            cached = _complete(source, _select(source.uri, listing, wanted), folder)
    return folder / FILES, cached


def _name(uri: str, pin: str, wanted: Sequence[str]) -> str:
    last = "".join(char if char.isalnum() else "-" for char in uri.rstrip("/").rpartition("/")[2])[
        :40
    ]
    return f"{last}-{hashlib.sha256(canonical_json([uri, pin, sorted(wanted)])).hexdigest()[:NAME_DIGITS]}"


def _select(uri: str, listing: Listing, wanted: Sequence[str]) -> Listing:
    """Return the listing of the files that match a pattern; raise SourceNotFound if there are none."""
    files = tuple(file for file in listing.files if _matches(file.name, wanted))
    if not files:
        raise SourceNotFound(
            f"{uri}: none of its {len(listing.files)} files matches {', '.join(wanted)}"
        )
    _check_names(uri, files)
    return Listing(listing.pin, files)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(
        pattern == "**" or (name.count("/") == pattern.count("/") and fnmatchcase(name, pattern))
        for pattern in patterns
    )


def _check_names(uri: str, files: Sequence[RemoteFile]) -> None:
    """Raise DataInvalid if a name is no path below a folder, or is also the folder of another file."""
    names = {file.name for file in files}
    for name in names:
        path = PurePosixPath(name)
        if (
            path.as_posix() != name
            or path.is_absolute()
            or ".." in path.parts
            or "\0" in name
            or name == "."
        ):
            raise DataInvalid(
                f"{uri}: it has a file named {name!r}, which is no path below a folder; rename it"
            )
        if parents := names & {parent.as_posix() for parent in path.parents}:
            raise DataInvalid(
                f"{uri}: it has both {min(parents)} and {name}; no folder can have both, rename one"
            )


def _read_complete(folder: Path) -> Listing | None:
    """Return the listing of a complete folder; None if a file is missing or has another size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        entries, about = manifest["files"], manifest["about"]
        listing = Listing(about["pin"], tuple(RemoteFile(**file) for file in about["files"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    for name, entry in entries.items():
        if (size := _size(folder / name)) != entry["size"]:
            log_line(
                f"{folder / name} has {size} bytes instead of {entry['size']}: downloading it again"
            )
            return None
    return listing


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. Wait as long as the process that has it downloads; raise ServiceUnavailable then."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        while True:
            before = _content(folder)
            try:
                stack.enter_context(
                    locked(
                        folder.with_name(f".{folder.name}.lock"), "the process that downloads it"
                    )
                )
                break
            except ServiceUnavailable:
                if _content(folder) == before:
                    raise
        yield


def _content(folder: Path) -> list[tuple[str, int | None]]:
    return sorted((str(path), _size(path)) for path in folder.rglob("*"))


def _complete(source: StoreSource, listing: Listing, folder: Path) -> Listing:
    """Download what is missing and seal the folder."""
    for path in (folder / FILES).rglob("*"):  # not of this listing, so it would be sealed
        if path.is_file() and path.relative_to(folder / FILES).as_posix() not in {
            file.name for file in listing.files
        }:
            path.unlink()
    missing = [file for file in listing.files if not _is_present(folder / FILES / file.name, file)]
    with _check_disk_space(source.uri, missing, folder):
        for_each(lambda file: _download(source, file, folder), missing, PARALLEL_DOWNLOADS)
        shutil.rmtree(folder / PARTS, ignore_errors=True)
        known = {f"{FILES}/{file.name}": file.sha256 for file in listing.files if file.sha256}
        seal(
            folder,
            {
                "uri": source.uri,
                "pin": listing.pin,
                "files": [vars(file) for file in listing.files],
            },
            known,
        )
    return listing


def _is_present(path: Path, file: RemoteFile) -> bool:
    """Return whether a file is in place; its content was verified before it got its name."""
    size = _size(path)
    return size is not None and file.size in {None, size}


def _download(source: StoreSource, file: RemoteFile, folder: Path) -> None:
    """Download one file, verify it, flush it and rename it."""
    part, path = folder / PARTS / f"{file.name}.part", folder / FILES / file.name
    for parent in {part.parent, path.parent}:
        parent.mkdir(parents=True, exist_ok=True)
    is_continued = bool(_size(part))
    difference = _complete_part(source, file, part)
    if is_continued and difference:  # the crash of a machine may have spoilt what was there
        part.unlink()
        difference = _complete_part(source, file, part)
    if difference:
        part.unlink()
        raise DataInvalid(
            f"{source.uri}: {file.name} {difference}; upload it again, or correct the digest"
        )
    part.replace(path)
    sync_folder(path.parent)


def _complete_part(source: StoreSource, file: RemoteFile, part: Path) -> str:
    """Download what is missing of a part and flush it; return in words how it differs from what the store says."""
    with follow(part) as followed:
        source.download(file, part)
    if file.size is not None and (size := _size(part)) != file.size:
        return f"has {size} bytes, expected {file.size}"
    # A part that was rewritten meanwhile, such as a spoilt one, was read too early.
    if file.sha256 in {None, followed.sha256()} or (digest := digest_file(part)) == file.sha256:
        return ""
    return f"has the digest sha256:{digest}, expected sha256:{file.sha256}"


@contextmanager
def _check_disk_space(uri: str, files: Sequence[RemoteFile], folder: Path) -> Iterator[None]:
    """Raise ServiceUnavailable if the disk has too little free space, or if a write in the block fails."""
    needed = sum(
        (file.size or 0) - (_size(folder / PARTS / f"{file.name}.part") or 0) for file in files
    )
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ServiceUnavailable(
            f"{uri}: its files need {needed:,} more bytes in {folder} and {free:,} are free; free some space and retry"
        )
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(folder).free
        raise ServiceUnavailable(
            f"{uri}: cannot write to {folder}: {error}; its files needed {needed:,} bytes and {free:,} are free now; "
            "free some space and retry"
        ) from error


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
