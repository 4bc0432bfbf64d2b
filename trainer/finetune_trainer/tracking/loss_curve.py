"""Reduces the rows of a training to the few points of a LossCurve."""

import math
from collections.abc import Iterable, Mapping

from finetune_trainer.contract import LossCurve, ValidationPoint
from finetune_trainer.contract.loss_curve import MAX_LOSS, POINTS
from finetune_trainer.contract.metric_rows import Row

# A termination message has 4,096 bytes. With five digits, 64 points and 65 validations fit into it beside the rest.
DIGITS = 5
"""Significant digits of a loss."""


class LossCurveBuilder:
    """Adds row after row, in constant time each. A point is the mean of a fixed number of steps.

    The number follows from the length of the training, so a resumed process gets the same points.
    """

    def __init__(self, steps: int) -> None:
        self._every = max(1, math.ceil(steps / POINTS))
        self._step = 0
        self._sums: list[tuple[float, int]] = []
        """Sum of the losses of each point, and their number; the number is 0 if rows are missing."""
        self._validations: dict[int, ValidationPoint] = {}
        """The newest validation of each point."""
        self._best: ValidationPoint | None = None

    def restart(self, rows: Iterable[Row]) -> None:
        """Forget all rows and add these, by ascending step."""
        self._step = 0
        self._sums = []
        self._validations = {}
        self._best = None
        for row in rows:
            self.add(row.step, row.values)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add values of a step: its loss, its validation loss, or both."""
        point = (step - 1) // self._every
        loss = values.get("loss")
        if loss is not None:
            self._add_loss(point, step, loss)
        validation_loss = values.get("validation_loss")
        if validation_loss is not None:
            self._add_validation(point, step, validation_loss)

    def _add_loss(self, point: int, step: int, loss: float) -> None:
        missing = point + 1 - len(self._sums)
        self._sums += [(0.0, 0)] * missing
        total, count = self._sums[point]
        self._sums[point] = (total + loss, count + 1)
        self._step = step

    def _add_validation(self, point: int, step: int, loss: float) -> None:
        validation = ValidationPoint(step=step, loss=_rounded(loss))
        self._validations[point] = validation
        if self._best is None or loss < self._best.loss:
            self._best = validation

    def curve(self) -> LossCurve | None:
        """Return the curve; None before the first row, and if the rows of a point are lost."""
        if not self._sums:
            return None
        has_gap = any(count == 0 for _, count in self._sums)
        if has_gap:
            return None
        validations = {point.step: point for point in self._validations.values()}
        # The weights of the best validation are kept, so it stays in the curve.
        if self._best is not None:
            validations[self._best.step] = self._best
        losses = [_rounded(total / count) for total, count in self._sums]
        return LossCurve(
            every_steps=self._every,
            step=self._step,
            losses=tuple(losses),
            validations=tuple(validations[step] for step in sorted(validations)),
        )


def _rounded(loss: float) -> float:
    """Return a loss as the curve holds it, within the bounds of the API's numbers."""
    bounded = max(-MAX_LOSS, min(MAX_LOSS, loss))
    return float(f"{bounded:.{DIGITS}g}")
