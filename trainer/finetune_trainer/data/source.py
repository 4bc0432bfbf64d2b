"""A data set's file that is read once: its SHA-256 is computed from the bytes that its reader consumes."""

import hashlib
import io
from pathlib import Path
from typing import Any

from typing_extensions import override

BUFFER_BYTES = 128 * 1024
"""Bytes read at a time. Fixed, so that a record is always read with the same number of bytes consumed."""


class Source:
    """The file of a data set, and what has been read of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.bytes_read = 0
        self._sha256 = hashlib.sha256()

    def open(self) -> io.BufferedReader:
        """Open the file from its beginning; `bytes_read` and `digest` cover what is then read from the disk."""
        self.bytes_read, self._sha256 = 0, hashlib.sha256()
        return io.BufferedReader(_CountedFile(self), BUFFER_BYTES)

    def add(self, data: memoryview) -> None:
        """Add bytes that were read to the count and to the digest."""
        self.bytes_read += len(data)
        self._sha256.update(data)

    def digest(self) -> str:
        """Return the SHA-256 of the bytes read so far, in hexadecimal; at the end, that of the file."""
        return self._sha256.hexdigest()

    def estimated_total(self, records: int) -> int | None:
        """Return how many records the file may have, or None if that cannot be estimated yet.

        The estimate extrapolates from the bytes that the records so far took. A file in one buffer shows nothing.
        """
        size = self.path.stat().st_size
        return round(records * size / self.bytes_read) if BUFFER_BYTES <= self.bytes_read < size else None


class _CountedFile(io.FileIO):
    """A file that adds what is read from it to its source."""

    def __init__(self, source: Source) -> None:
        super().__init__(source.path, "rb")
        self._source = source

    @override
    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        self._source.add(memoryview(buffer)[:count])
        return count

    @override
    def readall(self) -> bytes:
        data = super().readall()
        self._source.add(memoryview(data))
        return data
