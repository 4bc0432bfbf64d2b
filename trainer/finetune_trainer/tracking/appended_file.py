"""A file of JSON lines that grows with the training and is cut back when a step is repeated."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

from finetune_trainer.files import remove_temporary_files, write_durably
from finetune_trainer.runtime.errors import Replaced
from finetune_trainer.runtime.fence import UNFENCED, Fence
from finetune_trainer.runtime.progress import log_line


class AppendedFile:
    """Training depends on no method: after an OSError, as on a full disk, nothing is written until `restart`.

    One thread writes the file. Another may call `sync`, for which `append` does not wait.
    """

    def __init__(self, path: Path, fence: Fence = UNFENCED) -> None:
        self.path, self._fence = path, fence
        self._file: IO[bytes] | None = None
        self._open = threading.Lock()
        """Held while the file is made durable or closed."""
        self.has_failed = False
        """Whether the file could not be written, and has not been restarted since."""

    def restart(self, content: bytes) -> None:
        """Replace the content, durably; more is appended from now on."""
        try:
            remove_temporary_files(self.path)
            write_durably(self.path, content, self._fence.check)
            self._file = self.path.open("ab")
        except OSError as error:
            self._give_up(error)
            return
        if self.has_failed:
            self.has_failed = False
            log_line(f"train: {self.path} is written again")

    def append(self, content: bytes) -> None:
        """Append to the file; the content survives a kill of this process."""

        def write(file: IO[bytes]) -> None:
            file.write(content)
            file.flush()  # into the page cache, which survives a kill of this process

        self._try(write)

    def sync(self) -> None:
        """Make the content durable."""
        with self._open:
            self._try(lambda file: os.fsync(file.fileno()))

    def close(self, content: bytes | None = None) -> None:
        """Close the file and replace its content; a process that was replaced only closes it.

        A file that was never opened is left alone.
        """
        with self._open:  # so that a `sync` meanwhile returns when the new content is durable
            file, self._file = self._file, None
            if file is None and not self.has_failed:
                return
            try:
                if file is not None:
                    file.close()
                if content is not None:
                    write_durably(self.path, content, self._fence.check)
            except Replaced:
                return
            except OSError as error:
                self._give_up(error)

    def _try(self, write: Callable[[IO[bytes]], object]) -> None:
        file = self._file  # read once: the other thread gives it up when it fails
        if file is None:
            return
        try:
            write(file)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._file = None
        if not self.has_failed:  # once, however often it is tried again
            self.has_failed = True
            log_line(
                f"train: {self.path} cannot be written: {error}; it is tried again after each checkpoint"
            )
