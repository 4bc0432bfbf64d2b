"""LoRA's part of a layer's output, with fewer passes over large tensors than PEFT's.

PEFT computes `output + up(down(x)) * scaling`: it writes three tensors of the output's size, and one for the gradient.
Here the small tensor between the two matrices is scaled, and the product is added where the output is.
"""

from typing import Any

import torch
from peft.import_utils import is_bnb_4bit_available
from peft.tuners import lora


class LowRankUpdate(torch.autograd.Function):  # type: ignore[misc]  # the class has no types
    """The sum of an output [..., M] and `scaling * x @ down.T @ up.T`.

    x is [..., N], down [R, N], up [M, R].
    """

    @staticmethod
    def forward(  # noqa: D102, PLR0917  PyTorch's name and order
        ctx: Any, output: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        hidden = (x.flatten(0, -2) @ down.t()).mul_(scaling)
        ctx.scaling = scaling
        ctx.save_for_backward(x, hidden, down, up)
        # Autograd forbids to change the view that bitsandbytes returns, and `flatten` copies what is not contiguous.
        if output._is_view() or not output.is_contiguous():  # noqa: SLF001  there is no public name
            return torch.addmm(output.flatten(0, -2), hidden, up.t()).view_as(output)
        ctx.mark_dirty(output)
        output.flatten(0, -2).addmm_(hidden, up.t())
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: D102  PyTorch's name
        x, hidden, down, up = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_hidden = (rows @ up).mul_(ctx.scaling)
        grad_x = (grad_hidden @ down).view_as(x) if ctx.needs_input_grad[1] else None
        return grad, grad_x, grad_hidden.t() @ x.flatten(0, -2), rows.t() @ hidden, None


class AddsInPlace:
    """Replaces the forward pass of one of PEFT's layers, except where it does more than to add one adapter."""

    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the layer's output. A compiled layer is PEFT's: the compiler merges the passes itself."""
        names = [name for name in self.active_adapters if name in self.lora_A]
        is_plain = len(names) == 1 and not self.lora_variant and not self.merged and not args and not kwargs
        if self.disable_adapters or not is_plain or torch.compiler.is_compiling():
            whole: torch.Tensor = super().forward(x, *args, **kwargs)  # type: ignore[misc]
            return whole
        down, up, scaling = (each[names[0]] for each in (self.lora_A, self.lora_B, self.scaling))
        output = self.base_layer(x)
        dropped = self.lora_dropout[names[0]](x)
        with torch.autocast(x.device.type, enabled=False):  # all have the output's dtype, also to be added to it
            inputs, *weights = (each.to(output.dtype) for each in (dropped, down.weight, up.weight))
            updated: torch.Tensor = LowRankUpdate.apply(output, inputs, *weights, scaling)
        return updated


def speed_up_lora(model: torch.nn.Module) -> None:
    """Replace the forward pass of PEFT's linear layers."""
    layers = [lora.Linear, lora.Linear4bit] if is_bnb_4bit_available() else [lora.Linear]
    classes = {layer: type(layer.__name__, (AddsInPlace, layer), {}) for layer in layers}
    for layer in model.modules():
        if type(layer) in classes:
            layer.__class__ = classes[type(layer)]
