"""The file metrics.jsonl: the metrics of every logged step, one JSON object a line.

The file survives a kill at any moment. It is the truth: trackers receive copies of its rows.
"""

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from finetune_trainer.contract.metric_rows import Row, read_rows
from finetune_trainer.files import remove_temporary_files, write_durably
from finetune_trainer.runtime.errors import Replaced
from finetune_trainer.runtime.fence import UNFENCED, Fence
from finetune_trainer.runtime.progress import log_line


class MetricsFile:
    """The rows of one training run, in memory and in the file.

    Training depends on no method: an OSError, as on a full disk, is logged once and the rows stay in memory.
    """

    def __init__(self, path: Path, fence: Fence = UNFENCED) -> None:
        self._path, self._fence = path, fence
        self._rows: dict[int, Row] = {}
        self._file: IO[bytes] | None = None

    def open(self, step: int) -> None:
        """Read the file and cut it back to the rows up to a step, durably. Rows recorded from now on are appended."""
        self._rows = {row.step: row for row in read_rows(self._path) if row.step <= step}
        try:
            remove_temporary_files(self._path)
            write_durably(self._path, _encoded(self._rows.values()), self._fence.check)
            self._file = self._path.open("ab")
        except OSError as error:
            self._give_up(error)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Append values of a step that it does not have yet; repeated ones are left out."""
        row = self._rows.get(step) or Row(step, round(time.time(), 3), {})  # noqa: TID251  an edge
        new = {name: value for name, value in values.items() if name not in row.values}
        if not new:
            return
        self._rows[step] = Row(step, row.time, row.values | new)
        self._try(lambda file: file.write(_encoded([Row(step, row.time, new)])), flush=True)

    def sync(self) -> None:
        """Make all rows durable; call this before the checkpoint that they belong to."""
        self._try(lambda file: os.fsync(file.fileno()))

    def rows(self, before: float = math.inf) -> list[Row]:
        """Return the rows before a step, by ascending step."""
        return [self._rows[step] for step in sorted(self._rows) if step < before]

    def close(self) -> None:
        """Write one line for each step and close the file; a process that was replaced only closes it."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            file.close()
            write_durably(self._path, _encoded(self.rows()), self._fence.check)
        except Replaced:
            return
        except OSError as error:
            self._give_up(error)

    def _try(self, write: Any, *, flush: bool = False) -> None:
        if self._file is None:
            return
        try:
            write(self._file)
            if flush:
                self._file.flush()  # into the page cache, which survives a kill of this process
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._file = None
        log_line(f"train: {self._path} cannot be written: {error}; training continues without it")


def _encoded(rows: Iterable[Row]) -> bytes:
    lines = (json.dumps({"step": row.step, "time": row.time, **row.values}, allow_nan=False) for row in rows)
    return "".join(f"{line}\n" for line in lines).encode()
