"""The output head, only where a token counts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def head_at_positions(
    places: torch.Tensor, head: torch.nn.Module | None
) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Have the output head see only some places of the flattened [B * L]; give what makes [N, vocabulary] of logits.

    In completion-only training most logits would be computed to be thrown away, and they are the largest
    tensor there is. The model's own forward still runs, so whatever it does to its logits is done.
    """
    if head is None:
        yield lambda logits: logits.flatten(0, 1).index_select(0, places)
        return

    def choose(_module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (inputs[0].flatten(0, 1).index_select(0, places).unsqueeze(0),)

    hook = head.register_forward_pre_hook(choose)
    try:
        yield lambda logits: logits.flatten(0, 1)
    finally:
        hook.remove()
