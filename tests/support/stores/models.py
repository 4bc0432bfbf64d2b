"""Sealed folders to publish, and sources that a test controls."""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from finetune_trainer.files import write_durably
from finetune_trainer.runtime.artifacts import files_in, seal
from finetune_trainer.runtime.errors import DataInvalid
from finetune_trainer.stores.port import Listing, RemoteFile

MIB = 1024**2


def make_model(folder: Path, sizes: dict[str, int] | None = None) -> str:
    """Write random files and seal them; return the digest. Without sizes they are a small and a large file."""
    for name, size in (
        sizes or {"config.json": 100, "model-1.safetensors": 3 * MIB}
    ).items():
        write_durably(folder / name, os.urandom(size))
    return seal(folder, {"stage": "push"})


def names_in(folder: Path) -> list[str]:
    """Return the names of all files of a sealed folder, without its manifest."""
    return [path.relative_to(folder).as_posix() for path in files_in(folder)]


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


class MemorySource:
    """A source in memory; it counts its requests and the bytes that it sends."""

    uri = "memory://source"

    def __init__(self, files: dict[str, bytes], *, has_digests: bool = False) -> None:
        self.files = files
        self.has_digests = has_digests
        self.listings = 0
        self.sent = 0
        self._lock = threading.Lock()
        self.before_write: Callable[[str, Path], None] = lambda _name, _path: None

    def list_files(self, pin: str | None) -> Listing:
        self.listings += 1
        current = "sha256:" + _digest(repr(sorted(self.files.items())).encode())
        if pin not in {None, current}:
            raise DataInvalid(f"{self.uri}: changed from {pin} to {current}")
        return Listing(current, tuple(self._described()))

    def _described(self) -> Iterator[RemoteFile]:
        for name, data in sorted(self.files.items()):
            yield RemoteFile(
                name,
                len(data),
                _digest(data),
                _digest(data) if self.has_digests else None,
            )

    def download(self, file: RemoteFile, path: Path) -> None:
        self.before_write(file.name, path)
        with path.open("ab") as part:
            sent = part.write(self.files[file.name][part.tell() :])
        with self._lock:  # several files are downloaded at a time
            self.sent += sent


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
