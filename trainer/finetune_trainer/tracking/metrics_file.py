"""The file metrics.jsonl: the metrics of every logged step, one JSON object a line.

The file survives a kill at any moment. Trackers receive copies of its rows.
"""

import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from finetune_trainer.contract.metric_rows import Row, read_rows
from finetune_trainer.runtime.fence import UNFENCED, Fence
from finetune_trainer.tracking.appended_file import AppendedFile


class MetricsFile:
    """The rows of one training run, in memory and in the file; while the disk is full in memory only."""

    def __init__(self, path: Path, fence: Fence = UNFENCED) -> None:
        self._file = AppendedFile(path, fence)
        self._rows: dict[int, Row] = {}

    def open(self, step: int) -> None:
        """Read the file and cut it back to the rows up to a step, durably. Rows recorded from now on are appended."""
        # Training repeats the later steps, and their rows would be there twice.
        self._rows = {}
        for row in read_rows(self._file.path):
            if row.step <= step:
                self._rows[row.step] = row
        self._file.restart(_encoded(self._rows.values()))

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Append values of a step that it does not have yet; repeated values are left out."""
        row = self._rows.get(step)
        if row is None:
            now = round(time.time(), 3)  # noqa: TID251  an edge
            row = Row(step, now, {})
        new = {name: value for name, value in values.items() if name not in row.values}
        if not new:
            return
        known = row.values | new
        self._rows[step] = Row(step, row.time, known)
        # A step may have several lines until `close`: to append is cheap, and to rewrite the file is not.
        added = Row(step, row.time, new)
        self._file.append(_encoded([added]))

    def sync(self) -> None:
        """Make all rows durable; another thread may call this before it writes the checkpoint that they belong to."""
        self._file.sync()

    def try_again(self) -> None:
        """Write all rows if the file could not be written earlier; the thread that records calls this."""
        if self._file.has_failed:
            self._file.restart(_encoded(self.rows()))

    def rows(self, before: float = math.inf) -> list[Row]:
        """Return the rows before a step, by ascending step."""
        steps = sorted(step for step in self._rows if step < before)
        return [self._rows[step] for step in steps]

    def close(self) -> None:
        """Write one line for each step and close the file; a process that was replaced only closes it."""
        self._file.close(_encoded(self.rows()))


def _encoded(rows: Iterable[Row]) -> bytes:
    lines = []
    for row in rows:
        fields = {"step": row.step, "time": row.time, **row.values}
        # NaN is no JSON: a reader in another language would refuse the line.
        lines.append(json.dumps(fields, allow_nan=False) + "\n")
    return "".join(lines).encode()
