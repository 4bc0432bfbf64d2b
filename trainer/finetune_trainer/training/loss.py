"""Compute the output head only at the positions that predict a target of the loss."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


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

    def select(_module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (inputs[0].flatten(0, 1).index_select(0, target_positions).unsqueeze(0),)

    hook = head.register_forward_pre_hook(select)
    try:
        yield lambda logits: logits.flatten(0, 1)
    finally:
        hook.remove()
