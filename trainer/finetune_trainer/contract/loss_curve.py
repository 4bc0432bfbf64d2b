"""The loss of a whole training, in few enough points for the status of a pipeline."""

import math
from typing import Annotated, Self

from pydantic import Field, WrapValidator, model_validator

from finetune_trainer.contract.models import ContractModel, none_if_invalid

# The curve is part of each write of the status: with 64 points it has at most 2.3 KB, and fits beside the result into
# a termination message (ADR 23).
POINTS = 64
"""Largest number of points of a curve."""
MAX_LOSS = 1e15
"""Limit of a loss; a larger loss is cut to it."""
LossValue = Annotated[float, Field(ge=-MAX_LOSS, le=MAX_LOSS, allow_inf_nan=False)]
Step = Annotated[int, Field(ge=1, le=10**15)]


class ValidationPoint(ContractModel):
    """The loss of a validation."""

    step: Step
    """Step after which the validation ran."""
    loss: LossValue
    """Loss on the validation data, per token; with objective DPO per pair."""


class LossCurve(ContractModel):
    """Loss of the steps that count: steps that were lost in an interruption are replaced by their repetition."""

    every_steps: Step
    """Steps of each point, the same in the whole training; the newest point may have fewer steps."""
    step: Step
    """Newest step of the curve."""
    losses: tuple[LossValue, ...] = Field(min_length=1, max_length=POINTS)
    """Training loss of each point, per token or with objective DPO per pair: the mean of its steps."""
    validations: tuple[ValidationPoint, ...] = Field(default=(), max_length=POINTS + 1)
    """The newest validation of each point and the best validation of all, by ascending step."""

    @model_validator(mode="after")
    def _check_points(self) -> Self:
        # The command line draws the points at their steps, so a curve with other points would be wrong.
        if len(self.losses) != math.ceil(self.step / self.every_steps):
            raise ValueError(
                f"{len(self.losses)} losses of {self.every_steps} steps each do not end at {self.step}"
            )
        return self

    @property
    def best(self) -> ValidationPoint | None:
        """The validation with the lowest loss; if several have it, the first of them."""
        return min(self.validations, key=lambda point: point.loss, default=None)

    def last_step(self, point: int) -> int:
        """Return the last step of a point, which has an index from 0."""
        return min(self.step, (point + 1) * self.every_steps)


# The operator never decides by the curve, so an invalid curve is no error.
MaybeLossCurve = Annotated[LossCurve | None, WrapValidator(none_if_invalid)]
"""A curve, or None if it is invalid, so that the rest of the progress remains usable."""
