"""Values that are not finite: the same computation, done twice, tells a recipe that diverges from broken hardware."""

import math

from finetune_trainer.runtime.errors import DeviceFailed, Diverged, StageError


def is_finite(*values: float) -> bool:
    """Return whether all values are finite."""
    return all(math.isfinite(value) for value in values)


def non_finite(
    when: str, description: str, first: tuple[float, ...], second: tuple[float, ...]
) -> StageError:
    """Return the error for values that were not finite, from the values of two identical computations.

    `description` is a format string with a place for each value. Training is deterministic. If both computations are
    not finite, a retry would fail in the same way: Diverged. Else hardware is the likely cause.
    """
    # The same bits in must give the same bits out. If they do not, the machine is to blame and not the recipe.
    if is_finite(*second):
        return DeviceFailed(
            f"{when}: {description.format(*first)}; repeated from the same state, {description.format(*second)}: "
            "hardware error likely; the next attempt resumes from the last checkpoint; "
            "if this happens again on the node, take it out of service"
        )
    return Diverged(
        f"{when}: {description.format(*first)}, and not finite again when it is repeated: "
        "lower train.optimizer.learningRate, raise warmupFraction, or use dtype FP32"
    )
