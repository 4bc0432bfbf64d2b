"""A linear layer with LoRA, with fewer passes over large tensors than PEFT's.

PEFT computes `layer(x) + up(down(x)) * scaling`: it writes three tensors of the output's size, and one for their
gradient. Here the small tensor between the two matrices is scaled, and the product is added to the output in place. So
is the adapter's part of the input's gradient, if the layer is a plain linear layer without dropout.
"""

from typing import Any

import torch
from peft.import_utils import is_bnb_4bit_available
from peft.tuners import lora
from torch.nn.functional import linear

Gradients = tuple[torch.Tensor | None, ...]


class AdaptedLinear(torch.autograd.Function):  # type: ignore[misc]  # the class has no types
    """`x @ weight.T + bias + scaling * dropped @ down.T @ up.T` with a frozen weight and bias.

    x and dropped are [..., N], weight [M, N], bias [M] or None, down [R, N], up [M, R]. Without dropout, x and dropped
    are the same tensor.
    """

    @staticmethod
    def forward(  # noqa: D102, PLR0917  PyTorch's name and order
        ctx: Any,
        x: torch.Tensor,
        dropped: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        down: torch.Tensor,
        up: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        hidden = _hidden(dropped, down, scaling)
        ctx.scaling = scaling
        ctx.is_dropped = dropped is not x
        # Not x: no gradient needs it, because the weight is frozen.
        ctx.save_for_backward(dropped, hidden, weight, down, up)
        output = linear(x, weight, bias)
        output.view(-1, output.shape[-1]).addmm_(hidden, up.t())
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:  # noqa: D102  PyTorch's name
        dropped, hidden, weight, down, up = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_hidden = _grad_hidden(grad, up, ctx.scaling)
        grad_x = grad_dropped = None
        # The first layer of a model needs no gradient of its input.
        if ctx.needs_input_grad[0]:
            grad_x = (rows @ weight).view_as(dropped)
            if ctx.is_dropped:
                grad_dropped = (grad_hidden @ down).view_as(dropped)
            else:
                grad_x.view(-1, grad_x.shape[-1]).addmm_(grad_hidden, down)
        grad_down = grad_hidden.t() @ dropped.flatten(0, -2)
        return grad_x, grad_dropped, None, None, grad_down, rows.t() @ hidden, None


class LowRankUpdate(torch.autograd.Function):  # type: ignore[misc]  # the class has no types
    """The sum of an output [..., M] and `scaling * x @ down.T @ up.T`, for layers of any kind.

    x is [..., N], down [R, N], up [M, R].
    """

    @staticmethod
    def forward(  # noqa: D102, PLR0917  PyTorch's name and order
        ctx: Any,
        output: torch.Tensor,
        x: torch.Tensor,
        down: torch.Tensor,
        up: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        hidden = _hidden(x, down, scaling)
        ctx.scaling = scaling
        ctx.save_for_backward(x, hidden, down, up)
        # Autograd forbids to change the view that bitsandbytes returns, and `flatten` copies what is not contiguous.
        if output._is_view() or not output.is_contiguous():  # noqa: SLF001  there is no public name
            return torch.addmm(output.flatten(0, -2), hidden, up.t()).view_as(output)
        ctx.mark_dirty(output)
        output.flatten(0, -2).addmm_(hidden, up.t())
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:  # noqa: D102  PyTorch's name
        x, hidden, down, up = ctx.saved_tensors
        grad_hidden = _grad_hidden(grad, up, ctx.scaling)
        grad_x = None
        if ctx.needs_input_grad[1]:
            grad_x = (grad_hidden @ down).view_as(x)
        return (
            grad,
            grad_x,
            grad_hidden.t() @ x.flatten(0, -2),
            grad.flatten(0, -2).t() @ hidden,
            None,
        )


def _hidden(x: torch.Tensor, down: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return the scaled product of the inputs [..., N] and the first matrix, with all but the last dimension flat."""
    return (x.flatten(0, -2) @ down.t()).mul_(scaling)


def _grad_hidden(grad: torch.Tensor, up: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return the gradient of the product before it was scaled."""
    return (grad.flatten(0, -2) @ up).mul_(scaling)


class AddsInPlace:
    """Replaces the forward pass of one of PEFT's layers, unless it does more than to add a single adapter."""

    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the layer's output. A compiled layer is PEFT's: the compiler merges the passes itself."""
        names = [name for name in self.active_adapters if name in self.lora_A]
        is_plain = (
            len(names) == 1
            and not self.lora_variant
            and not self.merged
            and not args
            and not kwargs
        )
        if self.disable_adapters or not is_plain or torch.compiler.is_compiling():
            whole: torch.Tensor = super().forward(x, *args, **kwargs)  # type: ignore[misc]
            return whole
        [name] = names
        down = self.lora_A[name]
        up = self.lora_B[name]
        scaling = self.scaling[name]
        dropped = self.lora_dropout[name](x)
        forward = _updated_output
        if is_frozen_linear(self.base_layer):
            forward = _adapted_linear
        return forward(self.base_layer, x, dropped, down.weight, up.weight, scaling)


def is_frozen_linear(layer: torch.nn.Module) -> bool:
    """Return whether a layer is PyTorch's own, and none of its parameters is trained."""
    return type(layer) is torch.nn.Linear and not any(
        parameter.requires_grad for parameter in layer.parameters()
    )


def _adapted_linear(  # noqa: PLR0917  the order of _updated_output
    layer: torch.nn.Linear,
    x: torch.Tensor,
    dropped: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    kind = x.device.type
    # A custom autograd function is not autocast, so the casts are made here.
    dtype = x.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    inputs = x.to(dtype)
    # The same tensor without dropout, also after a cast: the function asks whether it is the same.
    dropped = inputs if dropped is x else dropped.to(dtype)
    parameters = (
        None if tensor is None else tensor.to(dtype)
        for tensor in (layer.weight, layer.bias, down, up)
    )
    with torch.autocast(kind, enabled=False):
        adapted: torch.Tensor = AdaptedLinear.apply(
            inputs, dropped, *parameters, scaling
        )
    return adapted


def _updated_output(  # noqa: PLR0917  the order of _adapted_linear
    layer: torch.nn.Module,
    x: torch.Tensor,
    dropped: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    output = layer(x)
    inputs, *weights = (tensor.to(output.dtype) for tensor in (dropped, down, up))
    # All have the output's dtype already, so that the product can be added to it in place.
    with torch.autocast(x.device.type, enabled=False):
        updated: torch.Tensor = LowRankUpdate.apply(output, inputs, *weights, scaling)
    return updated


def speed_up_lora(model: torch.nn.Module) -> None:
    """Replace the forward pass of PEFT's linear layers."""
    layers = (
        [lora.Linear, lora.Linear4bit] if is_bnb_4bit_available() else [lora.Linear]
    )
    # The class is replaced and not the layer: names of parameters, and so of tensors in files, stay as PEFT has them.
    classes = {
        layer: type(layer.__name__, (AddsInPlace, layer), {}) for layer in layers
    }
    for layer in model.modules():
        if type(layer) in classes:
            layer.__class__ = classes[type(layer)]
