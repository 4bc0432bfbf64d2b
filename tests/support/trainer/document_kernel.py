"""What stands in for the kernel of attention within documents, which needs a GPU; also as an operation of PyTorch."""

import itertools
from typing import Any

import torch


def attention_of_each_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    _starts: torch.Tensor,
    longest: int,
    _longest: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return [T, H, D]: each document's attention, computed alone."""
    assert longest == int(starts.diff().max())
    assert query.dtype == key.dtype == value.dtype, "the kernel refuses other types"
    outputs = []
    for start, end in itertools.pairwise(starts):
        q, k, v = (
            tensor[start:end].transpose(0, 1)[None] for tensor in (query, key, value)
        )
        distance = (
            torch.arange(end - start)[:, None] - torch.arange(end - start)[None, :]
        )
        mask = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
        attended = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs)


def _attended(  # noqa: PLR0917  an operation takes no keywords
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float,
) -> torch.Tensor:
    options = {
        "scale": scale,
        "window_size": (-1, 0),
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    return attention_of_each_document(
        query, key, value, starts, starts, longest, longest, **options
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _gradients(context: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    *saved, starts = context.saved_tensors
    inputs = [tensor.detach().requires_grad_() for tensor in saved]
    with torch.enable_grad():
        query, key, value = inputs
        attended = _attended(query, key, value, starts, *context.options)
    return (*torch.autograd.grad(attended, inputs, gradient), None, None, None)


_attend = torch.library.custom_op("finetune_tests::attend", _attended, mutates_args=())
_attend.register_fake(lambda query, *_: torch.empty_like(query))
_attend.register_autograd(_gradients, setup_context=_save)


def attend_in_one_operation(*arguments: Any, scale: float, **_: Any) -> torch.Tensor:
    """Return the same as `attention_of_each_document`, as one operation for the compiler, as the kernel is."""
    query, key, value, starts, _starts, longest, _longest = arguments
    attended: torch.Tensor = _attend(query, key, value, starts, longest, scale)
    return attended
