"""The learning rate schedule."""

import math

from finetune_trainer.contract import Optimizer


def learning_rate(recipe: Optimizer, step: int, steps: int) -> float:
    """Return the learning rate of a step, counted from 0, in a run of `steps` steps.

    The warm-up is linear, and its first step is already above zero. A decaying schedule reaches its end only after the
    last step, so no step has a rate of zero.
    """
    # Rounded up, so that a fraction above 0 has a warm-up in a short run, too.
    warmup = math.ceil(recipe.warmup_fraction * steps)
    if step < warmup:
        return recipe.learning_rate * (step + 1) / (warmup + 1)
    least = recipe.min_learning_rate_fraction
    height = _height(recipe, step - warmup, steps - warmup, steps)
    return recipe.learning_rate * (least + (1 - least) * height)


def _height(recipe: Optimizer, done: int, after_warmup: int, steps: int) -> float:
    """Return a point of the decay, from 1 to 0, after `done` of the steps that follow the warm-up."""
    progress = done / after_warmup
    match recipe.scheduler:
        case "Cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        case "Linear":
            return 1 - progress
        case "Constant":
            return 1.0
        case "WarmupStableDecay":
            # The warm-up comes first: if both do not fit, the decay is shorter.
            return min(
                1.0,
                (after_warmup - done)
                / min(recipe.decay_fraction * steps, after_warmup),
            )
