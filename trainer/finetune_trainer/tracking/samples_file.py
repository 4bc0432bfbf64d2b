"""The file samples.jsonl: texts that the model generated before and in training, one JSON object a line."""

import sys
from collections.abc import Iterable
from pathlib import Path

from finetune_trainer.contract.sample_rows import LOG_PREFIX, SampleRow, read_samples
from finetune_trainer.runtime.fence import UNFENCED, Fence
from finetune_trainer.runtime.progress.progress import log_line
from finetune_trainer.tracking.appended_file import AppendedFile


class SamplesFile:
    """The rows of one training run. Each step and prompt is in the file once, also if training repeats the step."""

    def __init__(self, path: Path, fence: Fence = UNFENCED) -> None:
        self._file = AppendedFile(path, fence)
        self._known: set[tuple[int, str]] = set()

    def open(self, step: int) -> None:
        """Read the file and cut it back to the rows up to a step, durably. Rows recorded from now on are appended."""
        samples = read_samples(self._file.path)
        rows = [row for row in samples if row.step <= step]
        self._known = {(row.step, row.prompt) for row in rows}
        self._file.restart(_encoded(rows))

    def record(self, rows: Iterable[SampleRow]) -> None:
        """Append the rows that the file does not have yet, and log each row."""
        for row in rows:
            # On a cluster, `finetune logs --samples` reads them from the log: it has no access to the file.
            log_line(f"{LOG_PREFIX}{row.to_json()}")
            key = (row.step, row.prompt)
            if key not in self._known:
                self._known.add(key)
                self._file.append(_encoded([row]))

    def sync(self) -> None:
        """Make all rows durable; another thread may call this before it writes the checkpoint that they belong to."""
        self._file.sync()

    def try_again(self) -> None:
        """Append again if the file could not be written earlier. Rows recorded meanwhile are only in the log."""
        # Unlike metrics, rows are not kept in memory: texts are long.
        if self._file.has_failed:
            self.open(sys.maxsize)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _encoded(rows: Iterable[SampleRow]) -> bytes:
    # A text may have a lone surrogate, which UTF-8 cannot encode.
    return "".join(f"{row.to_json()}\n" for row in rows).encode(errors="replace")
