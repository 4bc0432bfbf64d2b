"""The SHA-256 of a file that is being downloaded, so that hashing and flushing run beside the download.

Trust the digest only if the store names the same: a process that rewrites the file meanwhile makes it wrong.
"""

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from finetune_trainer.runtime.progress.activity import activity

READ_BYTES = 1 << 20
# Flushed piece by piece, so that the disk writes while the network reads. One flush at the end would wait for all.
FLUSH_BYTES = 32 << 20
POLL_SECONDS = 0.002


class FollowedFile:
    """A file that another thread appends to. Follow it with `follow`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = hashlib.sha256()
        self._is_whole = threading.Event()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """Read to the end of the file as it is now, and flush it."""
        self._is_whole.set()
        self._thread.join()

    def sha256(self) -> str:
        """Return the SHA-256 of the bytes in hexadecimal; raise OSError if the file cannot be read or flushed."""
        if self._error is not None:
            raise self._error
        return self._digest.hexdigest()

    def _run(self) -> None:
        try:
            with self._path.open("rb", buffering=0) as file:
                self._read(file)
                os.fsync(file.fileno())
        except OSError as error:
            self._error = error

    def _read(self, file: IO[bytes]) -> None:
        unflushed = 0
        while True:
            # Asked before the read: if the file is whole by now, the read finds all of it.
            is_whole = self._is_whole.is_set()
            chunk = file.read(READ_BYTES)
            if chunk:
                activity.report()
                self._digest.update(chunk)
                unflushed += len(chunk)
            elif is_whole:
                return
            else:
                self._is_whole.wait(POLL_SECONDS)
            if unflushed >= FLUSH_BYTES:
                os.fsync(file.fileno())
                unflushed = 0


@contextmanager
def follow(path: Path) -> Iterator[FollowedFile]:
    """Hash and flush a file in another thread while the block appends to it. After the block, `sha256` is complete."""
    # The thread opens the file at once, and the block may be slow to create it.
    path.touch()
    followed = FollowedFile(path)
    followed.start()
    try:
        yield followed
    finally:
        followed.stop()
