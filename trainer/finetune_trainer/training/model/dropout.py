"""Dropout of LoRA's inputs on a CPU.

PyTorch draws a number of 32 bits for each element, in a single thread: a seventh of a step's time on two cores. A
number of 16 bits of a faster generator is enough to decide whether an element stays.
"""

import numpy as np
import torch
from numpy.random import SFC64
from peft.tuners.lora import LoraLayer
from typing_extensions import override

LEVELS = 1 << 16
"""Number of probabilities that a number of 16 bits can tell apart."""
NUMBERS_PER_DRAW = 4
"""The generator draws 64 bits at a time."""


class Dropout(torch.nn.Dropout):  # type: ignore[misc]  # the class has no types
    """PyTorch's dropout, with a faster generator on a CPU. It is seeded by PyTorch's own generator.

    A compiled layer cannot call the faster generator, so it uses PyTorch's.
    """

    @override
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the input with some elements zeroed and the others scaled, so that the mean stays."""
        if (
            not self.training
            or input.device.type != "cpu"
            or torch.compiler.is_compiling()
        ):
            return super().forward(input)
        return input * _factors(input, self.p)


def _factors(like: torch.Tensor, probability: float) -> torch.Tensor:
    """Return 0 with the probability, rounded to 1/LEVELS, else the factor that keeps the mean."""
    dropped = min(round(probability * LEVELS), LEVELS - 1)
    # Seeded anew for each draw, from PyTorch's generator on the CPU: seeding that at a step determines all masks of it.
    generator = SFC64(int(torch.randint(1 << 62, ())))
    drawn = generator.random_raw(-(-like.numel() // NUMBERS_PER_DRAW)).view(np.uint16)[
        : like.numel()
    ]
    kept = torch.from_numpy(drawn >= dropped).view(torch.uint8).view(like.shape)
    return kept.to(like.dtype).mul_(LEVELS / (LEVELS - dropped))


def speed_up_dropout(model: torch.nn.Module) -> None:
    """Replace the dropout of PEFT's LoRA layers."""
    # Only LoRA's own dropout: the base model's stays PyTorch's, as its architecture has it.
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        for name, dropout in layer.lora_dropout.items():
            if isinstance(dropout, torch.nn.Dropout):
                layer.lora_dropout[name] = Dropout(dropout.p)
