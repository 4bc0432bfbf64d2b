"""A data set's file that is read once: its SHA-256 is computed from the bytes that are read for its records."""

import hashlib
import io
from pathlib import Path
from typing import Any

from pyarrow import CompressedInputStream
from typing_extensions import override

from finetune_trainer.runtime.errors import DataInvalid

# Fixed, so that a record is always read with the same number of bytes consumed: a resume compares their digest.
BUFFER_BYTES = 128 * 1024
"""Bytes read at a time."""
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Compression by file name extension."""


class SourceFile:
    """A file of a data set, with the number and the digest of the bytes that have been read."""

    def __init__(self, path: Path, name: str = "") -> None:
        self.path = path
        self.name = name or path.name
        """Name of the file in messages."""
        self.bytes_read = 0
        self._sha256 = hashlib.sha256()

    def open(self) -> io.BufferedReader:
        """Open the file from its beginning, decompressed; `bytes_read` and `digest` cover what is read from the disk.

        Reading raises DataInvalid if the file cannot be decompressed.
        """
        self.bytes_read = 0
        self._sha256 = hashlib.sha256()
        stored: io.BufferedReader = io.BufferedReader(_CountedFile(self), BUFFER_BYTES)
        compression = COMPRESSIONS.get(self.path.suffix.lower())
        if compression is None:
            return stored
        return io.BufferedReader(
            _Decompressed(stored, compression, self.name), BUFFER_BYTES
        )

    def add(self, data: memoryview) -> None:
        """Add bytes that were read to the count and to the digest."""
        self.bytes_read += len(data)
        self._sha256.update(data)

    def digest(self) -> str:
        """Return the SHA-256 of the bytes read so far, in hexadecimal."""
        return self._sha256.hexdigest()


class _CountedFile(io.FileIO):
    """A file that adds the bytes that are read from it to its source."""

    def __init__(self, source: SourceFile) -> None:
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


class _Decompressed(io.RawIOBase):
    """The content of a compressed file, also of a file with several gzip members or zstd frames."""

    def __init__(self, stored: io.BufferedReader, compression: str, name: str) -> None:
        self._stored = stored
        self._compression = compression
        self._name = name
        self._content = CompressedInputStream(stored, compression)

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Any) -> int:
        try:
            return int(self._content.readinto(buffer))
        except OSError as error:
            if error.errno is not None:
                # An error of the disk. Errors of the content have no number.
                raise
            raise DataInvalid(
                f"{self._name}: not {self._compression}, or damaged: {error}"
            ) from None

    @override
    def close(self) -> None:
        self._stored.close()
        super().close()
