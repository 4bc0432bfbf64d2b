"""AdamW, its rate as a function of the step, and its moments as named tensors."""

import math
from collections.abc import Mapping

import torch

from finetune_trainer.contract import Optimizer
from finetune_trainer.training.determinism import Tensors

MOMENTS = ("exp_avg", "exp_avg_sq")


def adamw(recipe: Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> torch.optim.AdamW:
    """Build AdamW; vectors (DoRA's magnitudes) are not decayed, as biases never are."""
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
    """Give the rate of the step that follows `step` finished ones, of `steps` in all.

    Rises linearly over the warm-up, its first step already above zero; then falls to zero behind the last.
    """
    warmup = math.ceil(recipe.warmup_fraction * steps)
    if step < warmup:
        return recipe.learning_rate * (step + 1) / (warmup + 1)
    done = (step - warmup) / (steps - warmup)
    match recipe.schedule:
        case "cosine":
            return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
        case "linear":
            return recipe.learning_rate * (1 - done)
        case "constant":
            return recipe.learning_rate


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use this rate in the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> Tensors:
    """Name the optimizer's tensors, without copying; a parameter that never had a gradient has none."""
    return {
        f"{name}.{key}": optimizer.state[parameter][key]
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for key in ("step", *MOMENTS)
    }


def optimizer_layout(parameters: Mapping[str, torch.nn.Parameter]) -> Tensors:
    """Give tensors shaped like the moments of all parameters, with no memory behind them."""
    like: Tensors = {}
    for name, parameter in parameters.items():
        like |= {f"{name}.{key}": torch.empty_like(parameter, device="meta") for key in MOMENTS}
        like[f"{name}.step"] = torch.empty((), dtype=torch.float32, device="meta")
    return like


def restore_optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter], saved: Tensors
) -> None:
    """Put back what `moments` named."""
    for name, parameter in parameters.items():
        if f"{name}.step" in saved:
            optimizer.state[parameter] = {
                key: saved[f"{name}.{key}"].to(parameter.device, copy=True) for key in ("step", *MOMENTS)
            }
