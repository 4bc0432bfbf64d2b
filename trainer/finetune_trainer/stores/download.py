"""Downloads of sources to a cache folder, which stages, attempts and pods share.

`CACHE/NAME/files/` has the files, and `CACHE/NAME/parts/` unfinished files. `CACHE/NAME/manifest.json` comes last and
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
from finetune_trainer.runtime.artifacts import (
    MANIFEST,
    canonical_json,
    digest_file,
    seal,
)
from finetune_trainer.runtime.errors import (
    DataInvalid,
    MachineUnable,
    Offline,
    ServiceUnavailable,
    SourceNotFound,
)
from finetune_trainer.runtime.locks import locked
from finetune_trainer.runtime.progress.activity import activity
from finetune_trainer.runtime.progress.progress import log_line
from finetune_trainer.sizes import format_size
from finetune_trainer.stores.concurrent import for_each, in_thread
from finetune_trainer.stores.port import Listing, RemoteFile, StoreSource
from finetune_trainer.stores.streaming_digest import follow

FILES = "files"
PARTS = "parts"
ALL_FILES = ("**",)
PARALLEL_DOWNLOADS = 4
# File systems limit a name to 255 bytes, and a URI may be longer.
SHOWN_CHARACTERS = 40
NAME_DIGITS = 16


def fetch(
    source: StoreSource, pin: str | None, cache: Path, wanted: Sequence[str] = ALL_FILES
) -> tuple[Path, Listing]:
    """Return a folder with the files of a source that match a pattern, and their listing.

    A pattern matches names with as many / as it has itself; ** matches all. Without a pin the source is listed, and
    the listing has the pin. With a pin, a complete copy in the cache needs no request.

    Raise the errors of the source. Raise SourceNotFound if no file matches, DataInvalid if a file differs from its
    description in the store, and MachineUnable if the disk is full. Raise Interrupted as `concurrent.for_each`
    does.
    """
    listing = None
    if not pin:
        try:
            listing = in_thread(lambda: source.list_files(None))
        except Offline:
            kept = _newest(cache, source.uri, wanted)
            if kept is None:
                raise
            return kept
    current_pin = listing.pin if listing else str(pin)
    folder = cache / _name(source.uri, current_pin, wanted)
    cached = _read_complete(folder)
    if cached is not None:
        return folder / FILES, cached
    with _exclusive(folder):
        # Another process may have completed the folder while this process waited for the lock.
        cached = _read_complete(folder)
        if cached is None:
            listing = listing or in_thread(lambda: source.list_files(pin))
            cached = _complete(source, _select(source.uri, listing, wanted), folder)
    return folder / FILES, cached


def _newest(
    cache: Path, uri: str, wanted: Sequence[str]
) -> tuple[Path, Listing] | None:
    """Return the newest complete copy of a source, for a machine that may not ask its store; None without."""
    copies = []
    for manifest in cache.glob(f"*/{MANIFEST}"):
        folder = manifest.parent
        listing = _read_complete(folder)
        if listing is not None and folder.name == _name(uri, listing.pin, wanted):
            copies.append((manifest.stat().st_mtime, folder / FILES, listing))
    if not copies:
        return None
    _, files, listing = max(copies, key=lambda copy: copy[0])
    return files, listing


def _name(uri: str, pin: str, wanted: Sequence[str]) -> str:
    """Return the name of a folder: a readable part of the URI, then a digest over all that chooses its files."""
    _, _, last = uri.rstrip("/").rpartition("/")
    characters = [char if char.isalnum() else "-" for char in last]
    shown = "".join(characters)
    key = canonical_json([uri, pin, sorted(wanted)])
    digest = hashlib.sha256(key).hexdigest()
    return f"{shown[:SHOWN_CHARACTERS]}-{digest[:NAME_DIGITS]}"


def _select(uri: str, listing: Listing, wanted: Sequence[str]) -> Listing:
    """Return the listing of the files that match a pattern; raise SourceNotFound if there are none."""
    files = [file for file in listing.files if _matches(file.name, wanted)]
    if not files:
        raise SourceNotFound(
            f"{uri}: none of its {len(listing.files)} files matches {', '.join(wanted)}"
        )
    _check_names(uri, files)
    return Listing(listing.pin, tuple(files), partial=listing.partial)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    for pattern in patterns:
        if pattern == "**":
            return True
        # The * of fnmatch matches a /, too.
        is_as_deep = name.count("/") == pattern.count("/")
        if is_as_deep and fnmatchcase(name, pattern):
            return True
    return False


def _check_names(uri: str, files: Sequence[RemoteFile]) -> None:
    """Raise DataInvalid if a name is no path below a folder, or is also the folder of another file."""
    # A store is not trusted: with a name such as ../x it could write anywhere on this machine.
    names = {file.name for file in files}
    for name in names:
        path = PurePosixPath(name)
        if not _is_below_folder(path, name):
            raise DataInvalid(
                f"{uri}: it has a file named {name!r}, which is no path below a folder; rename it"
            )
        parents = names & {parent.as_posix() for parent in path.parents}
        if parents:
            raise DataInvalid(
                f"{uri}: it has both {min(parents)} and {name}; no folder can have both, rename one"
            )


def _is_below_folder(path: PurePosixPath, name: str) -> bool:
    if path.is_absolute() or ".." in path.parts:
        return False
    if "\0" in name or name == ".":
        return False
    # A path drops empty segments and single dots.
    return path.as_posix() == name


def _read_complete(folder: Path) -> Listing | None:
    """Return the listing of a complete folder; None if a file is missing, has another size, or was not listed."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        entries = manifest["files"]
        about = manifest["about"]
        if about.get("partial"):
            return None
        files = [RemoteFile(**file) for file in about["files"]]
        listing = Listing(about["pin"], tuple(files))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # Sizes only: to read a model again for its digests would delay the start of every stage.
    for name, entry in entries.items():
        size = _size(folder / name)
        if size != entry["size"]:
            log_line(
                f"{folder / name} has {size} bytes instead of {entry['size']}: downloading it again"
            )
            return None
    return listing


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. Wait while its holder downloads; raise ServiceUnavailable if it makes no progress."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(f".{folder.name}.lock")
    with ExitStack() as stack:
        while True:
            before = _content(folder)
            try:
                stack.enter_context(locked(lock, "the process that downloads it"))
                break
            except ServiceUnavailable:
                # A download may take longer than `locked` waits. Files that grow show that the process is alive.
                if _content(folder) == before:
                    raise
                activity.report()
        yield


def _content(folder: Path) -> list[tuple[str, int | None]]:
    paths = sorted(folder.rglob("*"))
    return [(str(path), _size(path)) for path in paths]


def _complete(source: StoreSource, listing: Listing, folder: Path) -> Listing:
    """Download the missing files and seal the folder."""
    files = folder / FILES
    if not listing.partial:
        _remove_others(files, {file.name for file in listing.files})
    missing = [
        file for file in listing.files if not _is_present(files / file.name, file)
    ]
    with _check_disk_space(source.uri, missing, folder):
        for_each(
            lambda file: _download(source, file, folder), missing, PARALLEL_DOWNLOADS
        )
        # Before the seal, which takes all files of the folder.
        shutil.rmtree(folder / PARTS, ignore_errors=True)
        about: dict[str, object] = {
            "uri": source.uri,
            "pin": listing.pin,
            "files": [vars(file) for file in listing.files],
            "partial": listing.partial,
        }
        # These were verified during the download, so the seal does not read their files again.
        known = {}
        for file in listing.files:
            if file.sha256:
                known[f"{FILES}/{file.name}"] = file.sha256
        seal(folder, about, known)
    return listing


def _remove_others(folder: Path, names: set[str]) -> None:
    """Remove files that are not of this listing: they would be sealed, too."""
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in names:
            path.unlink()


def _is_present(path: Path, file: RemoteFile) -> bool:
    """Return whether a file is in place; its content was verified before it got its name."""
    size = _size(path)
    return size is not None and file.size in {None, size}


def _download(source: StoreSource, file: RemoteFile, folder: Path) -> None:
    """Download one file, verify it, flush it and rename it."""
    part = _part_of(folder, file)
    path = folder / FILES / file.name
    for parent in {part.parent, path.parent}:
        parent.mkdir(parents=True, exist_ok=True)
    is_continued = bool(_size(part))
    difference = _complete_part(source, file, part)
    # A crash of the machine may have spoilt the bytes that were there. A second try starts from nothing.
    if is_continued and difference:
        part.unlink()
        difference = _complete_part(source, file, part)
    if difference:
        part.unlink()
        raise DataInvalid(
            f"{source.uri}: {file.name} {difference}; upload it again, or correct the digest"
        )
    # Only a file that is verified and flushed gets its name: readers check nothing but its size.
    part.replace(path)
    sync_folder(path.parent)


def _part_of(folder: Path, file: RemoteFile) -> Path:
    return folder / PARTS / f"{file.name}.part"


def _complete_part(source: StoreSource, file: RemoteFile, part: Path) -> str:
    """Download the missing bytes of a part and flush it; return in words how it differs from its listing, or ""."""
    with follow(part) as followed:
        source.download(file, part)
    size = _size(part)
    if file.size is not None and size != file.size:
        return f"has {size} bytes, expected {file.size}"
    if file.sha256 in {None, followed.sha256()}:
        return ""
    # A part that was rewritten meanwhile, such as a spoilt part, was read too early.
    digest = digest_file(part)
    if digest == file.sha256:
        return ""
    return f"has the digest sha256:{digest}, expected sha256:{file.sha256}"


@contextmanager
def _check_disk_space(
    uri: str, files: Sequence[RemoteFile], folder: Path
) -> Iterator[None]:
    """Raise MachineUnable if the disk has too little free space, or if a write in the block fails."""
    needed = 0
    for file in files:
        downloaded = _size(_part_of(folder, file)) or 0
        needed += (file.size or 0) - downloaded
    # Asked before the first byte: hours of a download would be lost to a disk that fills up.
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise MachineUnable(
            f"{uri}: its files need {format_size(needed)} more in {folder} and {format_size(free)} are free; "
            "free some space and retry"
        )
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(folder).free
        raise MachineUnable(
            f"{uri}: cannot write to {folder}: {error}; its files needed {format_size(needed)} and "
            f"{format_size(free)} are free now; "
            "free some space and retry"
        ) from error


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
