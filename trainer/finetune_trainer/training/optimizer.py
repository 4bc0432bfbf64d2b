"""AdamW, the learning rate schedule, and the optimizer state as named tensors."""

import math
from collections.abc import Mapping

import torch

from finetune_trainer.contract import Optimizer
from finetune_trainer.training.determinism import Tensors

MOMENTS = ("exp_avg", "exp_avg_sq")


def adamw(recipe: Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> torch.optim.AdamW:
    """Return the AdamW of a recipe, without weight decay on vectors (DoRA's magnitudes), as is usual for biases."""
    matrices = [p for p in parameters.values() if p.ndim > 1]
    vectors = [p for p in parameters.values() if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=recipe.learning_rate,
        betas=(recipe.beta1, recipe.beta2),
        weight_decay=recipe.weight_decay,
        fused=True,
    )


def learning_rate(recipe: Optimizer, step: int, steps: int) -> float:
    """Return the learning rate of a step, counted from 0, in a run of `steps` steps.

    The warm-up is linear, and its first step is already above zero. A decaying schedule reaches its end only after the
    last step, so no step has a rate of zero.
    """
    warmup = math.ceil(recipe.warmup_fraction * steps)
    if step < warmup:
        return recipe.learning_rate * (step + 1) / (warmup + 1)
    least, height = recipe.min_learning_rate_fraction, _height(recipe, step - warmup, steps - warmup, steps)
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
            # The warm-up comes first: where both do not fit, the decay is shorter.
            return min(1.0, (after_warmup - done) / min(recipe.decay_fraction * steps, after_warmup))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameter groups for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> Tensors:
    """Return the optimizer state as named tensors, not copied; a parameter that never had a gradient has none."""
    return {
        f"{name}.{key}": optimizer.state[parameter][key]
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for key in ("step", *MOMENTS)
    }


def optimizer_layout(parameters: Mapping[str, torch.nn.Parameter]) -> Tensors:
    """Return meta tensors with the names and shapes of the optimizer state of all parameters."""
    layout: Tensors = {}
    for name, parameter in parameters.items():
        layout |= {f"{name}.{key}": torch.empty_like(parameter, device="meta") for key in MOMENTS}
        layout[f"{name}.step"] = torch.empty((), dtype=torch.float32, device="meta")
    return layout


def restore_optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter], saved: Tensors
) -> None:
    """Restore an optimizer state from `optimizer_tensors`."""
    for name, parameter in parameters.items():
        if f"{name}.step" in saved:
            optimizer.state[parameter] = {
                key: saved[f"{name}.{key}"].to(parameter.device, copy=True) for key in ("step", *MOMENTS)
            }
