"""The losses of a training as points to draw: of every step from its file, or of the status' curve."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from finetune_cli.card.chart import Axis
from finetune_cli.card.record import current_attempts
from finetune_operator.api.status import Outcome, StageStatus
from finetune_trainer.contract.loss_curve import MAX_LOSS, LossCurve
from finetune_trainer.contract.metric_rows import Row

# More could not be told apart on a screen, and would make the page larger.
DRAWN = 300
"""Points of a curve at most."""
# A training that goes well loses most in its first steps. On an even axis the rest would be a flat line.
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

    @property
    def has_range(self) -> bool:
        """Whether any point is of several losses, and has a lowest and a highest loss."""
        return any(point.lowest < point.highest for point in self.points)

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
        return Axis.around(low, high, MARGIN, 1e-3)


def losses_of(
    stage: StageStatus, curve: LossCurve | None, rows: Sequence[Row]
) -> Losses | None:
    """Return the losses of the rows, else of the curve in the status; None if there are neither."""
    points = _binned(_values(rows, "loss"))
    validations = [
        (step, _bounded(loss)) for step, loss in _values(rows, "validation_loss")
    ]
    if not points and curve:
        for number, loss in enumerate(curve.losses):
            # The status has the mean alone.
            point = LossPoint(
                step=curve.last_step(number),
                mean=loss,
                lowest=loss,
                highest=loss,
            )
            points.append(point)
        validations = [(point.step, point.loss) for point in curve.validations]
    if not points:
        return None
    steps = math.ceil(points[-1].step)
    # If the total is not known, the curve ends at its newest step.
    if stage.progress and stage.progress.total:
        steps = max(steps, stage.progress.total)
    return Losses(
        points=points,
        validations=validations,
        interruptions=interruptions_of(stage),
        steps=max(1, steps),
    )


def interruptions_of(stage: StageStatus) -> list[InterruptionMark]:
    """Return the interrupted attempts of this training whose step is known."""
    interruptions = []
    for attempt in current_attempts(stage):
        step = attempt.last_step
        # An attempt that ended before its first step has no place on the axis of steps.
        if attempt.outcome is not Outcome.INTERRUPTED or step is None:
            continue
        mark = InterruptionMark(
            attempt=attempt.number,
            step=step,
            lost_steps=attempt.lost_steps or 0,
            message=attempt.message,
        )
        interruptions.append(mark)
    return interruptions


def _values(rows: Iterable[Row], name: str) -> list[tuple[int, float]]:
    return [(row.step, row.values[name]) for row in rows if name in row.values]


def _binned(values: Sequence[tuple[int, float]]) -> list[LossPoint]:
    """Return at most DRAWN points, each of an equal number of steps."""
    # Not zero without values: a range has no step of zero.
    size = math.ceil(len(values) / DRAWN) or 1
    points = []
    for start in range(0, len(values), size):
        part = values[start : start + size]
        losses = [_bounded(loss) for _, loss in part]
        last_step, _ = part[-1]
        point = LossPoint(
            step=last_step,
            mean=sum(losses) / len(losses),
            lowest=min(losses),
            highest=max(losses),
        )
        points.append(point)
    return points


def _bounded(loss: float) -> float:
    # As in the curve of the status: a file may have any number.
    return max(-MAX_LOSS, min(MAX_LOSS, loss))
