"""A file of JSON lines that grows with the training and is cut back when a step is repeated."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

from finetune_trainer.files import remove_temporary_files, write_durably
from finetune_trainer.runtime.errors import Replaced
from finetune_trainer.runtime.fence import UNFENCED, Fence
from finetune_trainer.runtime.progress.progress import log_line


class AppendedFile:
    """Training depends on no method: after an OSError, as on a full disk, nothing is written until `restart`.

    One thread writes the file. Another may call `sync`, for which `append` does not wait.
    """

    def __init__(self, path: Path, fence: Fence = UNFENCED) -> None:
        self.path = path
        self._fence = fence
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
            # Into the page cache, which survives a kill of this process. A flush to disk would slow down every step.
            file.flush()

        self._try(write)

    def sync(self) -> None:
        """Make the content durable."""
        with self._open:
            self._try(lambda file: os.fsync(file.fileno()))

    def close(self, content: bytes | None = None) -> None:
        """Close the file and replace its content; a process that was replaced only closes it.

        A file that was never opened is left alone.
        """
        # With the lock, a `sync` that is called meanwhile returns when the new content is durable.
        with self._open:
            file = self._file
            self._file = None
            if file is None and not self.has_failed:
                return
            try:
                if file is not None:
                    file.close()
                if content is not None:
                    write_durably(self.path, content, self._fence.check)
            # The file belongs to the process that replaced this one.
            except Replaced:
                return
            except OSError as error:
                self._give_up(error)

    def _try(self, write: Callable[[IO[bytes]], object]) -> None:
        # Read once: the other thread sets it to None when a write fails.
        file = self._file
        if file is None:
            return
        try:
            write(file)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._file = None
        # A full disk fails at every checkpoint, and one line in the log is enough.
        if self.has_failed:
            return
        self.has_failed = True
        log_line(
            f"train: {self.path} cannot be written: {error}; it is tried again after each checkpoint"
        )
