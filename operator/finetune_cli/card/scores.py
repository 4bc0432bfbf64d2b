"""The section about scores: before and after training, with their errors and the gates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from finetune_cli.card.chart import Axis, chart, dot, label, legend, line
from finetune_cli.card.markup import (
    Markup,
    badge,
    element,
    join,
    listing,
    section,
    shortened,
    table,
)
from finetune_cli.card.record import RunRecord
from finetune_cli.comparison.best import HIGHER_IS_BETTER
from finetune_operator.api.status import GateStatus
from finetune_trainer.contract import EvaluateResult, Score

# A pipeline may have many tasks, and a card has to stay small.
DRAWN = 8
"""Scores with a chart; the table has more."""
LISTED = 100
"""Scores in the table at most."""
HEIGHT = 86
MIDDLE = 38
"""Height of the scores in a chart, in pixels."""
MARGIN = 0.15
"""Part of the axis that is free on both sides."""


@dataclass(frozen=True)
class Measured:
    """A score with what it is compared with."""

    task: str
    metric: str
    score: Score
    base_error: float | None
    gates: Sequence[GateStatus]

    @property
    def title(self) -> str:
        """Task and metric."""
        return f"{shortened(self.task, 64)}, {shortened(self.metric, 64)}"

    @property
    def before(self) -> str:
        """The base model's score with its error; empty if it was not measured."""
        if self.score.base is None:
            return ""
        return with_error(self.score.base, self.base_error)

    @property
    def after(self) -> str:
        """The score with its error."""
        return with_error(self.score.value, self.score.stderr)

    @property
    def gain(self) -> str:
        """The difference from the base model with its error; empty if that was not measured."""
        score = self.score
        if score.base is None:
            return ""
        difference = score.value - score.base
        return with_error(difference, score.difference_stderr, sign="+")

    def marks(self) -> list[float]:
        """Return all finite numbers that the chart has to show."""
        score = self.score
        error = score.stderr or 0
        values = [score.value, *self.gate_values()]
        values += [score.value - error, score.value + error]
        if score.base is not None:
            base_error = self.base_error or 0
            values += [score.base - base_error, score.base + base_error]
        # A score may be NaN or infinite: it has no place on an axis, and the table still has it.
        return [value for value in values if math.isfinite(value)]

    def gate_values(self) -> list[float]:
        """Return the score from which each gate passes."""
        values = []
        for gate in self.gates:
            if gate.against == "Value":
                values.append(gate.value)
            # Such a gate is about the difference.
            elif self.score.base is not None:
                values.append(self.score.base + gate.value)
        return values

    def axis(self) -> Axis:
        """Return an axis with room for all marks: from 0 to 1 for a share of right answers."""
        marks = self.marks()
        low = min(marks)
        high = max(marks)
        name = self.metric.partition(",")[0]
        if name in HIGHER_IS_BETTER and low >= 0 and high <= 1:
            return Axis(0.0, 1.0)
        return Axis.around(low, high, MARGIN, 1e-6)


def scores_section(record: RunRecord) -> Markup:
    """Return the section; empty before evaluate is done."""
    result = record.stage("evaluate").result
    if not isinstance(result, EvaluateResult):
        return Markup()
    scores = _measured(record, result)
    drawn = [measured for measured in _important(scores) if measured.marks()]
    figures = []
    for number, measured in enumerate(drawn[:DRAWN]):
        figures.append(_figure(number, measured))
    return section(
        "scores",
        "Scores",
        element("p", _explanation(scores)),
        *figures,
        _gates(record),
        _table(scores),
    )


def _measured(record: RunRecord, result: EvaluateResult) -> list[Measured]:
    scores = []
    for task, metrics in result.scores.items():
        for metric, score in metrics.items():
            gates = [
                gate
                for gate in record.status.gates
                # A gate may name acc,none although the score is called acc.
                if gate.task == task
                and metric in {gate.metric, gate.metric.partition(",")[0]}
            ]
            error = record.base_errors.get((task, metric))
            scores.append(Measured(task, metric, score, error, gates))
    return scores


def _important(scores: Sequence[Measured]) -> list[Measured]:
    """Return the scores with a gate first, then the first score of each other task."""
    gated = [measured for measured in scores if measured.gates]
    tasks = {measured.task for measured in gated}
    others = []
    for measured in scores:
        if measured.task not in tasks:
            tasks.add(measured.task)
            others.append(measured)
    return gated + others


def _explanation(scores: Sequence[Measured]) -> str:
    if any(measured.score.base is not None for measured in scores):
        return (
            "Before is the base model, after is the trained model, on the same questions. Bars are one standard "
            "error. The error of the difference is paired: often it is smaller than the two bars suggest."
        )
    return (
        "After is the trained model; bars are one standard error. The base model was not measured: "
        "evaluate.compareWithBase does so."
    )


def _figure(number: int, measured: Measured) -> Markup:
    text = _words(measured)
    axis = measured.axis()
    score = measured.score
    shapes = [line(0, MIDDLE, 1, MIDDLE, "grid")]
    shapes += [
        label(axis.share(tick), HEIGHT - 6, f"{tick:.4g}") for tick in axis.ticks()
    ]
    for value in measured.gate_values():
        x = axis.share(value)
        shapes.append(line(x, 16, x, HEIGHT - 22, "gate"))
        shapes.append(label(x, 12, "gate", "mark"))
    # Nine pixels above and below the middle, so that equal scores do not hide each other.
    if score.base is not None and math.isfinite(score.base):
        shapes += _point(
            axis,
            score.base,
            measured.base_error,
            "before",
            MIDDLE - 9,
        )
    if math.isfinite(score.value):
        shapes += _point(
            axis,
            score.value,
            score.stderr,
            "after",
            MIDDLE + 9,
        )
    drawn = chart(f"score-{number}", measured.title, text, HEIGHT, *shapes)
    return element(
        "figure",
        element("h3", measured.title),
        element("p", text),
        drawn,
        element("figcaption", _legend(measured)),
    )


def _point(
    axis: Axis, value: float, error: float | None, kind: str, y: float
) -> list[Markup]:
    shapes = []
    if error is not None and math.isfinite(error):
        low = axis.share(value - error)
        high = axis.share(value + error)
        shapes.append(line(low, y, high, y, f"error {kind}"))
        for end in (low, high):
            cap = line(end, y - 5, end, y + 5, f"error {kind}")
            shapes.append(cap)
    shapes.append(dot(axis.share(value), y, f"point {kind}", 6))
    return shapes


def _legend(measured: Measured) -> Markup:
    kinds = {"after": "after training"}
    if measured.score.base is not None:
        kinds = {"before": "before (base model)", **kinds}
    if measured.gates:
        kinds["gate"] = "gate"
    return legend(kinds)


def _words(measured: Measured) -> str:
    if measured.score.base is None:
        return f"{measured.after} after training."
    return (
        f"{measured.before} before, {measured.after} after training: {measured.gain}."
    )


def with_error(value: float, error: float | None, sign: str = "") -> str:
    """Return a number of about four digits with its standard error, if that is known."""
    text = f"{value:{sign}.4g}"
    if error is None or not math.isfinite(error):
        return text
    return f"{text} ± {error:.2g}"


def _gates(record: RunRecord) -> Markup:
    items = []
    for gate in record.status.gates:
        verdict = "not passed"
        if gate.passed:
            verdict = "passed"
        items.append(join((badge(verdict), shortened(gate.message)), " "))
    if not items:
        return Markup()
    return join((element("h3", "Gates"), listing(items, "plain")))


def _table(scores: Sequence[Measured]) -> Markup:
    rows = []
    for measured in scores[:LISTED]:
        row = (
            shortened(measured.task, 128),
            shortened(measured.metric, 64),
            measured.before,
            measured.after,
            measured.gain,
        )
        rows.append(row)
    caption = "All scores"
    if len(scores) > LISTED:
        caption = f"The first {LISTED} of {len(scores)} scores"
    return table(caption, ("Task", "Metric", "Before", "After", "Difference"), rows)
