"""Compute the output head only at the positions that predict a target of the loss, and only so many at a time.

Logits are the largest tensor of a step: 4,096 targets and a vocabulary of 128k are 2 GiB in fp32, and their gradient
is as large.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

Reduction = Literal["sum", "none"]
"""Whether the cross-entropy is summed over the targets, or returned for each."""

CHUNK_BYTES = 1 << 30
"""Largest size of the logits in fp32 that are computed at once."""


@contextmanager
def head_at_positions(
    target_positions: torch.Tensor, head: torch.nn.Module | None
) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Restrict the output head to some positions of the flattened [B * L] while the context is open.

    Yields a function that reshapes the model's logits to [N, vocabulary]. In completion-only training most logits
    would be discarded, and they are the largest tensor of a step. The model's own forward still runs, so that any
    scaling or capping of logits that it does still applies. Without a head, all logits are computed, then selected.
    """
    if head is None:
        yield lambda logits: logits.flatten(0, 1).index_select(0, target_positions)
        return

    def select(
        _module: torch.nn.Module, inputs: tuple[torch.Tensor]
    ) -> tuple[torch.Tensor]:
        return (inputs[0].flatten(0, 1).index_select(0, target_positions).unsqueeze(0),)

    hook = head.register_forward_pre_hook(select)
    try:
        yield lambda logits: logits.flatten(0, 1)
    finally:
        hook.remove()


def chunk_size(vocabulary: int) -> int:
    """Return the number of targets whose logits take CHUNK_BYTES."""
    return max(1, CHUNK_BYTES // (4 * vocabulary))


@contextmanager
def captured_head_input(head: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Yield a list that gets the input of the head [B, L, D]; the head computes the first position only."""
    captured: list[torch.Tensor] = []

    def capture(
        _module: torch.nn.Module, inputs: tuple[torch.Tensor]
    ) -> tuple[torch.Tensor]:
        captured.append(inputs[0])
        # A single position, because a forward pass needs some logits to return.
        return (inputs[0][:, :1],)

    hook = head.register_forward_pre_hook(capture)
    try:
        yield captured
    finally:
        hook.remove()


def chunked_cross_entropy(
    head: Callable[[torch.Tensor], torch.Tensor],
    inputs: torch.Tensor,
    targets: torch.Tensor,
    size: int,
    reduction: Reduction = "sum",
) -> torch.Tensor:
    """Return the cross-entropy of N targets in fp32, their sum or each [N]; `inputs` [N, D] are the head's inputs.

    Only the logits of `size` targets exist at a time: the backward pass computes them again.
    """
    losses: list[Any] = [
        checkpoint(_cross_entropy, head, chunk, wanted, reduction, use_reentrant=False)
        for chunk, wanted in zip(inputs.split(size), targets.split(size), strict=True)
    ]
    if reduction == "none":
        return torch.cat(losses)
    return sum(losses, torch.zeros((), device=inputs.device))


def _cross_entropy(
    head: Callable[[torch.Tensor], torch.Tensor],
    inputs: torch.Tensor,
    targets: torch.Tensor,
    reduction: Reduction,
) -> torch.Tensor:
    # In fp32: in bf16 the logarithm of a sum over a large vocabulary would lose most of its digits.
    return cross_entropy(head(inputs).float(), targets, reduction=reduction)
