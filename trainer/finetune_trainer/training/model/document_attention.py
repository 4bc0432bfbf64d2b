"""Attention within documents that follow each other without padding, by a kernel that needs no mask.

With a mask, a row of L tokens takes L² scores, whatever the documents in it, and no flash kernel can run. The kernel
here takes the boundaries of the documents instead (`torch.nn.attention.varlen`), and there is no padding.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from finetune_trainer.runtime.progress.progress import log_line
from finetune_trainer.training.model.model import TrainedModel, probe

NAME = "documents"
"""Name of this attention in the registry of transformers."""
TOLERANCE = 0.1
"""Largest root mean square of the logits' differences, as a share of their standard deviation.

Another kernel rounds otherwise. In bf16 that adds up over the layers, to 1-3 % after 32 of them, while single logits
differ by 12 %. A document that attends to another, or a missing scale, changes the mean by much more.
"""
GROUPED = (
    {"enable_gqa": True}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters
    else {}
)
"""Options for fewer heads of keys than heads of queries.

PyTorch before 2.12 has no option for it: its kernel takes them as they are.
"""


class Unsupported(Exception):
    """The model's attention is more than this kernel can do; the message says what."""


def attend_within_documents(
    module: torch.nn.Module,  # noqa: ARG001  the signature of the registry
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return [1, T, H, D] for queries [1, H, T, D], and keys and values that may have fewer heads.

    `cu_seq_lens_q` [N + 1] holds the start of every document, and the end. Raises Unsupported.
    """
    more = {
        name
        for name in ("softcap", "s_aux", "position_bias")
        if options.get(name) is not None
    }
    if dropout or attention_mask is not None or more:
        raise Unsupported(
            f"attention with {', '.join(sorted(more)) or 'dropout or a mask'}"
        )
    # Rotary embeddings of a model in fp32 return fp32. Autocast casts that for SDPA, but not for this kernel.
    query, key, value = (
        tensor.squeeze(0).transpose(0, 1).to(value.dtype)
        for tensor in (query, key, value)
    )
    grouped = {}
    if query.shape[1] != key.shape[1]:
        grouped = GROUPED
    # A window of -1 is unlimited. The token itself counts in `sliding_window`, but not in `window_size`. The 0 is the
    # number of later tokens that a token sees: attention is causal.
    window = -1 if sliding_window is None else sliding_window - 1
    # PyTorch types the result as a tuple, which it is only if more than the output is asked for.
    attended: Any = varlen_attn(
        query,
        key,
        value,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(window, 0),
        **grouped,
    )
    return attended.unsqueeze(0), None


def runs_on(device: torch.device, dtype: str) -> bool:
    """Return whether the kernel exists for a device, and for the data type of the forward pass."""
    return device.type == "cuda" and dtype == "BF16"


def enable(model: TrainedModel, dtype: str) -> bool:
    """Set this attention for a model on a GPU, if that gives the logits that it has with a mask.

    Return whether it does. A model of which the attention is different keeps its mask, and the log says why.
    """
    if not runs_on(model.device, dtype):
        return False
    # transformers finds an attention by its name only. To register it again changes nothing.
    AttentionInterface.register(NAME, attend_within_documents)
    problem = _problem_with(model)
    if problem:
        model.use_masked_attention()
        log_line(
            f"train: {model.architecture} keeps attention with a mask: {problem.splitlines()[0]}"
        )
    return model.is_flat


def _problem_with(model: TrainedModel) -> str:
    """Set this attention; return why the model cannot have it, or an empty text."""
    if not model.base._supports_flash_attn:  # noqa: SLF001  there is no public name
        return "only its mask describes its attention"
    with_mask = probe(model)
    try:
        model.use_flat_attention(NAME)
        # Raises Unsupported if attention has dropout, which is off otherwise.
        probe(model, training=True)
        if differ_by_rounding(with_mask, probe(model)):
            return ""
    except (
        Unsupported,
        RuntimeError,
        ValueError,
        TypeError,
        KeyError,
        NotImplementedError,
    ) as error:
        return str(error) or type(error).__name__
    return "its logits differ from those with a mask"


def differ_by_rounding(logits: torch.Tensor, others: torch.Tensor) -> bool:
    """Return whether other logits differ by rounding only. A broken model passes: training reports it."""
    if not logits.isfinite().all():
        return True
    return bool((logits - others).square().mean().sqrt() <= TOLERANCE * logits.std())


@contextmanager
def attention_with_mask(model: TrainedModel) -> Iterator[None]:
    """Set the model's attention with a mask while the context is open, which generation needs for its cache."""
    if model.is_flat:
        model.base.set_attn_implementation(model.masked_attention)
    try:
        yield
    finally:
        if model.is_flat:
            model.base.set_attn_implementation(NAME)
