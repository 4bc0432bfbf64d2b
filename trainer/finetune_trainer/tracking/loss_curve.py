"""Reduces the rows of a training to the few points of a LossCurve."""

import math
from collections.abc import Iterable, Mapping

from finetune_trainer.contract import LossCurve, ValidationPoint
from finetune_trainer.contract.loss_curve import MAX_LOSS, POINTS
from finetune_trainer.contract.metric_rows import Row

DIGITS = 5
"""Significant digits of a loss: 64 points and 65 validations then fit into a termination message beside the rest."""


class LossCurveBuilder:
    """Adds row after row, in constant time each. A point is the mean of a fixed number of steps.

    The number follows from the length of the training, so a resumed process gets the same points.
    """

    def __init__(self, steps: int) -> None:
        self._every = max(1, math.ceil(steps / POINTS))
        self._step = 0
        self._sums: list[tuple[float, int]] = []
        """Sum of the losses of each point, and their number; the number is 0 where rows are missing."""
        self._validations: dict[int, ValidationPoint] = {}
        """The newest validation of each point."""
        self._best: ValidationPoint | None = None

    def restart(self, rows: Iterable[Row]) -> None:
        """Forget all rows and add these, by ascending step."""
        self._step, self._sums, self._validations, self._best = 0, [], {}, None
        for row in rows:
            self.add(row.step, row.values)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add values of a step: its loss, its validation loss, or both."""
        point = (step - 1) // self._every
        if (loss := values.get("loss")) is not None:
            self._sums += [(0.0, 0)] * (point + 1 - len(self._sums))
            total, count = self._sums[point]
            self._step, self._sums[point] = step, (total + loss, count + 1)
        if (loss := values.get("validation_loss")) is not None:
            self._validations[point] = ValidationPoint(step=step, loss=_rounded(loss))
            if self._best is None or loss < self._best.loss:
                self._best = self._validations[point]

    def curve(self) -> LossCurve | None:
        """Return the curve; None before the first row, and where the rows of a point are lost."""
        if not self._sums or not all(count for _, count in self._sums):
            return None
        newest = {point.step: point for point in self._validations.values()}
        best = {self._best.step: self._best} if self._best else {}
        return LossCurve(
            every_steps=self._every,
            step=self._step,
            losses=tuple(_rounded(total / count) for total, count in self._sums),
            validations=tuple(point for _, point in sorted((newest | best).items())),
        )


def _rounded(loss: float) -> float:
    """Return a loss as the curve holds it, within the bounds of the API's numbers."""
    return float(f"{max(-MAX_LOSS, min(MAX_LOSS, loss)):.{DIGITS}g}")
