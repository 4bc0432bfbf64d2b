"""A comparison of runs as a table that fits the terminal, or as JSON."""

import argparse
import json
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from finetune_cli.comparison.best import Ranking, rank
from finetune_cli.comparison.compare import (
    TRAINING_LOSS,
    Measurements,
    Run,
    ScoreDifference,
    differing_fields,
    measurements,
    metric_names,
    score_difference,
)
from finetune_cli.output.encoding import can_encode
from finetune_cli.output.loss_curve import BLOCKS, curves_above_each_other
from finetune_cli.output.results import difference_text, margin_text, number_text
from finetune_operator.core.attempts.costs import amount_text
from finetune_operator.core.durations import format_duration
from finetune_trainer.contract import Score
from finetune_trainer.contract.results import LAST_STEPS

# Most paths of fields fit. A column for the longest would leave no room for values.
LABEL_CELLS = 30
"""A longer label has a line of its own."""
# With the labels and two runs, the table is 86 columns wide at most.
VALUE_CELLS = 26
"""A longer value is cut in a terminal; JSON and a pipe have all of it."""
LEAST_CELLS = 8
"""Characters of a value in a terminal that is too narrow."""
PIPE_CELLS = 100
"""Width of the curves if the output is no terminal."""
GAP = 2
ABSENT = "-"
UNPAIRED = "*"
"""Mark of a difference whose questions are not paired."""


@dataclass(frozen=True)
class TableRow:
    """A line of the table, with a cell for each run."""

    label: str
    cells: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether no run has a value."""
        return not any(self.cells)

    def cut(self, limit: int) -> "TableRow":
        """Return the row with cells of at most so many characters."""
        cells = tuple(cut(cell, limit) for cell in self.cells)
        return TableRow(self.label, cells)


def comparison_lines(
    runs: Sequence[Run], ranking: Ranking | None, width: int | None, *, plain: bool
) -> Iterator[str]:
    """Yield the lines of a comparison. Without a width, nothing is cut. Differences are from the first named run.

    With a ranking, the runs are in its order.
    """
    first = runs[0]
    shown = ranking.runs if ranking else tuple(runs)
    names = TableRow("", tuple(run.name for run in shown))
    rows = [names, *_rows(shown, first)]
    if width is not None:
        # A name is cut only if it alone exceeds the terminal.
        free = max(LEAST_CELLS, width - LABEL_CELLS - GAP)
        limit = min(VALUE_CELLS, free)
        others = [row.cut(limit) for row in rows[1:]]
        rows = [names.cut(free), *others]
    for columns in _parts(rows, len(shown), width):
        yield from _table(rows, columns)
        yield ""
    curves = {}
    for run in shown:
        curve = measurements(run).curve
        if curve:
            curves[run.name] = curve
    if curves:
        yield f"{TRAINING_LOSS}, on one scale:"
        yield from curves_above_each_other(curves, width or PIPE_CELLS, plain=plain)
        yield ""
    notes = list(_footnotes(shown, first))
    if ranking:
        notes.append(_best_line(ranking))
    for note in notes:
        yield from textwrap.wrap(note, width) if width else [note]


def _parts(
    rows: Sequence[TableRow], count: int, width: int | None
) -> Iterator[list[int]]:
    """Yield the indexes of the runs in parts whose columns fit the width."""
    if width is None:
        yield list(range(count))
        return
    part: list[int] = []
    for column in range(count):
        wider = [*part, column]
        longest = max(map(len, _table(rows, wider)))
        if part and longest > width:
            yield part
            wider = [column]
        part = wider
    yield part


def _table(rows: Sequence[TableRow], columns: Sequence[int]) -> Iterator[str]:
    """Yield the lines of the table with these columns."""
    labels = [len(row.label) for row in rows]
    label_width = max(length for length in labels if length <= LABEL_CELLS)
    widths = {}
    for column in columns:
        widths[column] = max(len(row.cells[column]) for row in rows)
    for row in rows:
        label = row.label
        if len(label) > LABEL_CELLS:
            yield label
            label = ""
        line = label.ljust(label_width)
        for column, cells in widths.items():
            line += " " * GAP + row.cells[column].ljust(cells)
        yield line.rstrip()


def _rows(runs: Sequence[Run], first: Run) -> Iterator[TableRow]:
    """Yield the rows: what differs, losses, scores, time and cost; rows that no run has are left out."""
    phases = tuple(run.status.phase for run in runs)
    if set(phases) != {"Succeeded"}:
        yield TableRow("phase", phases)
    for field in differing_fields(runs):
        cells = tuple(map(value_text, field.values))
        yield TableRow(field.path, cells)
    results = [measurements(run) for run in runs]

    def row(label: str, text: Callable[[Measurements], str]) -> TableRow:
        return TableRow(label, tuple(map(text, results)))

    rows = [
        row(TRAINING_LOSS, lambda result: loss_text(result.training_loss)),
        row("validation loss", lambda result: loss_text(result.validation_loss)),
        *_score_rows(runs, first, results),
        row("training time", lambda result: _duration(result.training_seconds)),
        row("time of all stages", lambda result: _duration(result.seconds)),
        row("cost", _cost),
    ]
    yield from (row for row in rows if not row.is_empty)


def _score_rows(
    runs: Sequence[Run], first: Run, results: Sequence[Measurements]
) -> Iterator[TableRow]:
    """Yield for each score its value, the gain over the base model, and the difference from the first run."""
    for task, metric in metric_names(runs):
        scores = [result.scores.get(task, {}).get(metric) for result in results]
        yield TableRow(f"{task} {metric}", tuple(map(_score, scores)))
        yield TableRow("  base model", tuple(map(_base, scores)))
        yield TableRow("  minus the base model", tuple(map(_gain, scores)))
        differences = [_difference(run, first, task, metric) for run in runs]
        yield TableRow(f"  minus {first.name}", tuple(differences))


def _footnotes(runs: Sequence[Run], first: Run) -> Iterator[str]:
    """Yield what the training losses are, and the reasons of differences that are not paired."""
    losses = [measurements(run).training_loss for run in runs]
    if any(loss is not None for loss in losses):
        yield f"{TRAINING_LOSS}: {LAST_STEPS}; a curve ends with its last point"
    # Not a set: the reasons stay in the order of the table's rows.
    reasons: dict[str, None] = {}
    for *_, difference in _differences(runs, first):
        if difference.unpaired:
            reasons[difference.unpaired] = None
    for reason in reasons:
        yield f"{UNPAIRED} not paired question by question: {reason}"


def _differences(
    runs: Sequence[Run], first: Run
) -> Iterator[tuple[str, str, Run, ScoreDifference]]:
    """Yield task, metric, run and difference of each score that is known of a run and of the first run."""
    for task, metric in metric_names(runs):
        for run in runs:
            difference = score_difference(run, first, task, metric)
            # From itself, the first run has no difference.
            if difference and run is not first:
                yield task, metric, run, difference


def _best_line(ranking: Ranking) -> str:
    value = ranking.value
    name = ranking.metric.name
    text = f"best {name}: {ranking.best.name}"
    if value is not None:
        shown = format_duration(value) if name == "time" else f"{value:.4g}"
        text += f" ({shown})"
    if ranking.equals:
        text += f"; the difference from {ranking.equals} is within two standard errors"
    return text


def value_text(value: Any) -> str:
    """Return a value of the manifest in one line."""
    if value is None:
        return ABSENT
    if isinstance(value, float) and value.is_integer():
        # As in the manifest: epochs: 2.
        return str(int(value))
    if isinstance(value, str):
        # A line break would break the table.
        return value if value.isprintable() else json.dumps(value)
    return json.dumps(value, ensure_ascii=False)


def loss_text(loss: float | None) -> str:
    """Return a loss with four digits; empty if it is not known."""
    return "" if loss is None else f"{loss:.4g}"


def _score(score: Score | None) -> str:
    if score is None:
        return ""
    return f"{number_text(score.value)}{margin_text(score.stderr)}"


def _base(score: Score | None) -> str:
    if score is None or score.base is None:
        return ""
    return number_text(score.base)


def _gain(score: Score | None) -> str:
    if score is None or score.base is None:
        return ""
    return difference_text(score.value - score.base, score.difference_stderr)


def _difference(run: Run, first: Run, task: str, metric: str) -> str:
    difference = score_difference(run, first, task, metric)
    if difference is None or run is first:
        return ""
    text = difference_text(difference.value, difference.stderr)
    return f"{text} {UNPAIRED}" if difference.unpaired else text


def _duration(seconds: float) -> str:
    return format_duration(seconds) if seconds else ""


def _cost(measured: Measurements) -> str:
    if measured.cost is None:
        return ""
    return amount_text(measured.cost, measured.currency).strip()


def cut(text: str, limit: int) -> str:
    """Return a text of at most `limit` characters; a longer text ends with an ellipsis."""
    if len(text) <= limit:
        return text
    return f"{text[: limit - 1]}…"


def comparison_json(runs: Sequence[Run], ranking: Ranking | None) -> dict[str, Any]:
    """Return a comparison as JSON, with all values in full. Differences are from the first run."""
    first = runs[0]
    listed: dict[str, Any] = {
        "runs": [_run_json(run) for run in runs],
        "fields": [
            {"path": field.path, "values": list(field.values)}
            for field in differing_fields(runs)
        ],
        "differences": list(_differences_json(runs, first)),
    }
    if ranking:
        listed["best"] = {
            "metric": ranking.metric.name,
            "name": ranking.best.name,
            "value": ranking.value,
        }
    return listed


def _run_json(run: Run) -> dict[str, Any]:
    measured = measurements(run)
    scores: dict[str, dict[str, Any]] = {}
    for task, metrics in measured.scores.items():
        scores[task] = {}
        for metric, score in metrics.items():
            scores[task][metric] = score.model_dump(
                mode="json", by_alias=True, exclude_none=True
            )
    # Text, as in the status: a float would add digits that no price has.
    cost = None if measured.cost is None else str(measured.cost)
    curve = None
    if measured.curve:
        curve = measured.curve.model_dump(mode="json", by_alias=True)
    values = {
        "name": run.name,
        "phase": run.status.phase,
        "trainingLoss": _finite(measured.training_loss),
        "validationLoss": _finite(measured.validation_loss),
        "scores": scores,
        "seconds": measured.seconds,
        "trainingSeconds": measured.training_seconds,
        "cost": cost,
        "currency": measured.currency or None,
        "lossCurve": curve,
    }
    return {name: value for name, value in values.items() if value is not None}


def _differences_json(runs: Sequence[Run], first: Run) -> Iterator[dict[str, Any]]:
    for task, metric, run, difference in _differences(runs, first):
        listed = {
            "task": task,
            "metric": metric,
            "name": run.name,
            "from": first.name,
            "difference": difference.value,
            "stderr": difference.stderr,
            "paired": not difference.unpaired,
        }
        if difference.unpaired:
            listed["reason"] = difference.unpaired
        yield listed


def _finite(value: float | None) -> float | None:
    # JSON has no NaN.
    return value if value is not None and math.isfinite(value) else None


def print_comparison(runs: Sequence[Run], arguments: argparse.Namespace) -> None:
    """Print a comparison in the form of --output, with the best by --best."""
    ranking = rank(runs, arguments.best) if arguments.best else None
    if arguments.output == "json":
        print(json.dumps(comparison_json(runs, ranking), indent=1))
        return
    console = Console(highlight=False, soft_wrap=True)
    width = console.width if console.is_terminal else None
    plain = not can_encode(BLOCKS, console.encoding)
    style = ""
    for line in comparison_lines(runs, ranking, width, plain=plain):
        if line.startswith("best "):
            # The last note, which may have several lines.
            style = "bold green"
        console.print(line, style=style, markup=False)
