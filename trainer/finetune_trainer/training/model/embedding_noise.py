"""NEFTune: uniform noise on the embeddings of training (Jain et al. 2023, arXiv:2310.05914)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def embedding_noise(
    embedding: torch.nn.Module, lengths: torch.Tensor, alpha: float
) -> Iterator[None]:
    """Add uniform noise to the output of the embedding while the context is open.

    `lengths` is [B, L]. With n tokens in a document and d dimensions the noise lies within alpha / sqrt(n * d), in the
    embedding's dtype. So it does not depend on the documents and on the padding that share a document's row.
    """

    def add(
        _module: torch.nn.Module, _inputs: Any, output: torch.Tensor
    ) -> torch.Tensor:
        limits = alpha / torch.sqrt(lengths * output.shape[-1]).unsqueeze(-1)
        return output + torch.empty_like(output).uniform_(-1, 1) * limits.to(
            output.dtype
        )

    hook = embedding.register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()


def document_lengths(positions: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
    """Return [B, L] fp32: for every token the number of tokens of its document, without padding; 1 if it has none.

    `positions` is [B, L], 0 at the first token of every document.
    """
    documents = (positions == 0).flatten().cumsum(0)
    # A row of padding only has no token to count, and a length of 0 would divide by zero.
    tokens = documents[~is_padding.flatten()].bincount(minlength=int(documents[-1]) + 1)
    return tokens.clamp(min=1)[documents].view(positions.shape).float()
