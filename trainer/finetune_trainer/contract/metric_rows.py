"""The rows of metrics.jsonl in the folder of train: the trainer writes them, the command line reads them, too."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Row:
    """The metrics of a step."""

    step: int
    """Finished optimizer steps."""
    time: float
    """Time at which the step was first recorded, in seconds since 1970."""
    values: dict[str, float]
    """Values by name; all are finite."""


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file by ascending step; none if there is no file.

    Lines of the same step are merged, and the first value of a name stays. Lines that are no row are left out: a kill
    may tear the last line.
    """
    rows: dict[int, Row] = {}
    for step, recorded, values in _parsed(path):
        # A step that is repeated after an interruption has a second line, with a later time.
        first = rows.get(step, Row(step, recorded, {}))
        rows[step] = Row(step, first.time, values | first.values)
    return [rows[step] for step in sorted(rows)]


def _parsed(path: Path) -> Iterator[tuple[int, float, dict[str, float]]]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            values: dict[str, Any] = json.loads(line)
            step = int(values.pop("step"))
            recorded = float(values.pop("time"))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        finite = {
            name: float(value) for name, value in values.items() if _is_finite(value)
        }
        yield step, recorded, finite


def _is_finite(value: Any) -> bool:
    # JSON of Python may have NaN and Infinity, which no plot can show.
    return isinstance(value, int | float) and math.isfinite(value)
