"""Metrics and samples of a training: from its files, or from the status and the logs of a cluster."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from finetune_cli.diagnostics import quoted
from finetune_cli.output.table import aligned
from finetune_trainer.contract import LossCurve
from finetune_trainer.contract.metric_rows import read_rows
from finetune_trainer.contract.sample_rows import SampleRow

TRAIN = "train"
"""The stage that has metrics."""
Cells = dict[str, float | int]
COLUMNS = (
    "step",
    "loss",
    "validation_loss",
    "learning_rate",
    "gradient_norm",
    "tokens_per_second",
)
"""Order of the columns of a table; others follow, and the time is in JSON only."""


def rows_of_file(path: Path) -> list[Cells]:
    """Return a row for each step in metrics.jsonl; none if there is no file."""
    return [
        {"step": row.step, "time": row.time, **row.values} for row in read_rows(path)
    ]


def rows_of_curve(curve: LossCurve) -> list[Cells]:
    """Return a row for each point, at its last step, and for each validation; rows of the same step are one."""
    rows: dict[int, Cells] = {}
    for point, loss in enumerate(curve.losses):
        step = curve.last_step(point)
        rows[step] = {"step": step, "loss": loss}
    for validation in curve.validations:
        row = rows.setdefault(validation.step, {"step": validation.step})
        row["validation_loss"] = validation.loss
    return [rows[step] for step in sorted(rows)]


def print_rows(rows: Sequence[Cells], output: str | None) -> None:
    """Print the rows as `json`, one object a line, or as a `table`; without a choice, as a table on a terminal."""
    if _is_json(output):
        for row in rows:
            print(json.dumps(row))
        return
    columns = _columns(rows)
    heading = [name.upper() for name in columns]
    # Rows differ in their columns: only some steps have a validation.
    cells = [[_cell(row.get(name)) for name in columns] for row in rows]
    for line in aligned([heading, *cells]):
        print(line)


def _columns(rows: Sequence[Cells]) -> list[str]:
    """Return the columns that any row has: first the known columns in their order, then the others."""
    names: set[str] = set()
    for row in rows:
        names.update(row)
    names.discard("time")
    first = [name for name in COLUMNS if name in names]
    others = names.difference(COLUMNS)
    return [*first, *sorted(others)]


def print_samples(rows: Sequence[SampleRow], output: str | None) -> None:
    """Print the rows as `json` or as a `table`, in which texts are in quotes."""
    if _is_json(output):
        for row in rows:
            print(row.to_json())
        return
    heading = ["STEP", "PROMPT", "TEXT"]
    # In quotes: a text may hold line breaks, which would break the table.
    cells = [[str(row.step), quoted(row.prompt), quoted(row.text)] for row in rows]
    for line in aligned([heading, *cells]):
        print(line)


def _is_json(output: str | None) -> bool:
    if output is None:
        return not sys.stdout.isatty()
    return output == "json"


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    # Steps and counts are whole and shown with all their digits.
    if isinstance(value, int):
        return str(value)
    return f"{value:.5g}"
