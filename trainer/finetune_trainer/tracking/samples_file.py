"""The file samples.jsonl: what the model generated at each validation, one JSON object a line."""

import sys
from collections.abc import Iterable
from pathlib import Path

from finetune_trainer.contract.sample_rows import LOG_PREFIX, SampleRow, read_samples
from finetune_trainer.runtime.fence import UNFENCED, Fence
from finetune_trainer.runtime.progress import log_line
from finetune_trainer.tracking.appended_file import AppendedFile


class SamplesFile:
    """The rows of one training run. Each step and prompt is in the file once, whatever was repeated."""

    def __init__(self, path: Path, fence: Fence = UNFENCED) -> None:
        self._file = AppendedFile(path, fence)
        self._known: set[tuple[int, str]] = set()

    def open(self, step: int) -> None:
        """Read the file and cut it back to the rows up to a step, durably. Rows recorded from now on are appended."""
        rows = [row for row in read_samples(self._file.path) if row.step <= step]
        self._known = {(row.step, row.prompt) for row in rows}
        self._file.restart(_encoded(rows))

    def record(self, rows: Iterable[SampleRow]) -> None:
        """Append the rows that the file does not have yet, and log each row."""
        for row in rows:
            log_line(f"{LOG_PREFIX}{row.to_json()}")
            if (row.step, row.prompt) not in self._known:
                self._known.add((row.step, row.prompt))
                self._file.append(_encoded([row]))

    def sync(self) -> None:
        """Make all rows durable; another thread may call this before it writes the checkpoint that they belong to."""
        self._file.sync()

    def try_again(self) -> None:
        """Append again if the file could not be written earlier. The rows of meanwhile are only in the log."""
        if self._file.has_failed:
            self.open(sys.maxsize)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _encoded(rows: Iterable[SampleRow]) -> bytes:
    return "".join(f"{row.to_json()}\n" for row in rows).encode(errors="replace")
