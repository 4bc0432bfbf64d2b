"""The losses of a training as points to draw: of every step from its file, or of the status' curve."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from finetune_cli.card.chart import Axis
from finetune_cli.card.record import current_attempts
from finetune_operator.api.status import Outcome, StageStatus
from finetune_trainer.contract.loss_curve import MAX_LOSS, LossCurve
from finetune_trainer.contract.metric_rows import Row

DRAWN = 300
"""Points of a curve at most: more could not be told apart on a screen."""
WIDE_RANGE = 5
"""If the highest loss is so many times the lowest, the axis is logarithmic."""
LEAST_LOSS = 1e-9
"""A loss below it has no place on a logarithmic axis."""
MARGIN = 0.06
"""Part of the axis that is free above and below."""


@dataclass(frozen=True)
class LossPoint:
    """The losses of one step or of several."""

    step: float
    """The last of the steps."""
    mean: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class InterruptionMark:
    """An interruption of the training."""

    attempt: int
    step: int
    lost_steps: int
    """Steps before it that the next attempt repeated."""
    message: str


@dataclass(frozen=True)
class Losses:
    """All that is drawn of a training's loss."""

    points: Sequence[LossPoint]
    validations: Sequence[tuple[int, float]]
    """Step and validation loss, by ascending step."""
    interruptions: Sequence[InterruptionMark]
    steps: int
    """Steps of the whole training as far as known, or the newest step."""

    @property
    def best(self) -> tuple[int, float] | None:
        """The validation with the lowest loss, or None."""
        return min(self.validations, key=lambda point: point[1], default=None)

    def axis(self) -> Axis:
        """Return an axis with room for all points."""
        values = [loss for _, loss in self.validations]
        for point in self.points:
            values += [point.lowest, point.highest]
        low = min(values)
        high = max(values)
        if low > LEAST_LOSS and high > WIDE_RANGE * low:
            factor = (high / low) ** MARGIN
            return Axis(low / factor, high * factor, is_logarithmic=True)
        # A flat curve has no range of its own.
        room = MARGIN * max(high - low, abs(high) / 10, 1e-3)
        return Axis(low - room, high + room)


def losses_of(
    stage: StageStatus, curve: LossCurve | None, rows: Sequence[Row]
) -> Losses | None:
    """Return the losses of the rows, else of the curve in the status; None if there are neither."""
    points = _binned(_values(rows, "loss"))
    validations = [
        (step, _bounded(loss)) for step, loss in _values(rows, "validation_loss")
    ]
    if not points and curve:
        points = [
            LossPoint(curve.last_step(number), loss, loss, loss)
            for number, loss in enumerate(curve.losses)
        ]
        validations = [(point.step, point.loss) for point in curve.validations]
    if not points:
        return None
    return Losses(points, validations, interruptions_of(stage), _steps(stage, points))


def interruptions_of(stage: StageStatus) -> list[InterruptionMark]:
    """Return the interrupted attempts of this training whose step is known."""
    interruptions = []
    for attempt in current_attempts(stage):
        if attempt.outcome is Outcome.INTERRUPTED and attempt.last_step is not None:
            interrupted = InterruptionMark(
                attempt.number,
                attempt.last_step,
                attempt.lost_steps or 0,
                attempt.message,
            )
            interruptions.append(interrupted)
    return interruptions


def _values(rows: Iterable[Row], name: str) -> list[tuple[int, float]]:
    return [(row.step, row.values[name]) for row in rows if name in row.values]


def _binned(values: Sequence[tuple[int, float]]) -> list[LossPoint]:
    """Return at most DRAWN points, each of an equal number of steps."""
    size = math.ceil(len(values) / DRAWN)
    points = []
    for start in range(0, len(values), size or 1):
        part = values[start : start + size]
        losses = [_bounded(loss) for _, loss in part]
        mean = sum(losses) / len(losses)
        points.append(LossPoint(part[-1][0], mean, min(losses), max(losses)))
    return points


def _bounded(loss: float) -> float:
    # As in the curve of the status: a file may have any number.
    return max(-MAX_LOSS, min(MAX_LOSS, loss))


def _steps(stage: StageStatus, points: Sequence[LossPoint]) -> int:
    newest = math.ceil(points[-1].step)
    total = 0
    if stage.progress and stage.progress.total:
        total = stage.progress.total
    return max(1, newest, total)
