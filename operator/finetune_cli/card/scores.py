"""The section about scores: before and after training, with their errors and the gates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from finetune_cli.card.chart import Axis, chart, dot, label, line
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

DRAWN = 8
"""Scores with a chart; the table has all."""
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

    def marks(self) -> list[float]:
        """Return all finite numbers that the chart has to show."""
        score = self.score
        values = [score.value, *self.gate_values()]
        values += [score.value - (score.stderr or 0), score.value + (score.stderr or 0)]
        if score.base is not None:
            error = self.base_error or 0
            values += [score.base - error, score.base + error]
        return [value for value in values if math.isfinite(value)]

    def gate_values(self) -> list[float]:
        """Return where the score passes each gate."""
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
        room = MARGIN * max(high - low, abs(high) / 10, 1e-6)
        return Axis(low - room, high + room)


def scores_section(record: RunRecord) -> Markup:
    """Return the section; empty before evaluate is done."""
    result = record.stage("evaluate").result
    if not isinstance(result, EvaluateResult):
        return Markup()
    scores = _measured(record, result)
    drawn = [measured for measured in _important(scores) if measured.marks()]
    figures = [
        _figure(number, measured) for number, measured in enumerate(drawn[:DRAWN])
    ]
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
                if gate.task == task and _same(gate.metric, metric)
            ]
            error = record.base_errors.get((task, metric))
            scores.append(Measured(task, metric, score, error, gates))
    return scores


def _same(metric: str, measured: str) -> bool:
    # A gate may name acc,none although the score is called acc.
    return measured in {metric, metric.partition(",")[0]}


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
    if score.base is not None and math.isfinite(score.base):
        shapes += _point(axis, score.base, measured.base_error, "before", MIDDLE - 9)
    if math.isfinite(score.value):
        shapes += _point(axis, score.value, score.stderr, "after", MIDDLE + 9)
    drawn = chart(f"score-{number}", measured.title, text, HEIGHT, join(shapes))
    legend = _legend(measured)
    return element(
        "figure",
        element("h3", measured.title),
        element("p", text),
        drawn,
        element("figcaption", legend),
    )


def _point(
    axis: Axis, value: float, error: float | None, kind: str, y: float
) -> list[Markup]:
    shapes = []
    if error is not None and math.isfinite(error):
        low = axis.share(value - error)
        high = axis.share(value + error)
        shapes.append(line(low, y, high, y, f"error {kind}"))
        shapes.append(line(low, y - 5, low, y + 5, f"error {kind}"))
        shapes.append(line(high, y - 5, high, y + 5, f"error {kind}"))
    shapes.append(dot(axis.share(value), y, f"point {kind}", 6))
    return shapes


def _legend(measured: Measured) -> Markup:
    kinds = {"after": "after training"}
    if measured.score.base is not None:
        kinds = {"before": "before (base model)", **kinds}
    if measured.gates:
        kinds["gate"] = "gate"
    entries = []
    for kind, text in kinds.items():
        swatch = element("span", class_=f"swatch {kind}", aria_hidden="true")
        entries.append(join((swatch, text), " "))
    return listing(entries, "legend")


def _words(measured: Measured) -> str:
    score = measured.score
    after = with_error(score.value, score.stderr)
    if score.base is None:
        return f"{after} after training."
    before = with_error(score.base, measured.base_error)
    gain = with_error(score.value - score.base, score.difference_stderr, sign="+")
    return f"{before} before, {after} after training: {gain}."


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
        score = measured.score
        before = ""
        difference = ""
        if score.base is not None:
            before = with_error(score.base, measured.base_error)
            difference = with_error(
                score.value - score.base, score.difference_stderr, sign="+"
            )
        after = with_error(score.value, score.stderr)
        name = shortened(measured.task, 128)
        metric = shortened(measured.metric, 64)
        rows.append((name, metric, before, after, difference))
    caption = "All scores"
    if len(scores) > LISTED:
        caption = f"The first {LISTED} of {len(scores)} scores"
    return table(caption, ("Task", "Metric", "Before", "After", "Difference"), rows)
