"""The model to evaluate as an lm-eval model, and the name of its cache of responses."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lm_eval
import torch
import transformers
from lm_eval.models.huggingface import HFLM

from finetune_trainer.data.chat_templates import use_chat_templates
from finetune_trainer.evaluation.batch_size import MAX_ON_GPU
from finetune_trainer.evaluation.prompts import (
    needs_no_bos,
    set_chat_template,
    set_end_tokens,
)
from finetune_trainer.models.base_model import BaseModel
from finetune_trainer.models.loading import load_base
from finetune_trainer.models.trained.merge import load_merged, with_adapter
from finetune_trainer.runtime.artifacts import canonical_json, digest_of
from finetune_trainer.runtime.foreign_warnings import without_messages
from finetune_trainer.runtime.progress.activity import activity

LOADED_BEFORE = (
    "`pretrained` model kwarg is not of type",
    "Passed an already-initialized model",
)
"""Warnings of lm-eval about a model that is passed to it and not loaded by it."""


@dataclass(frozen=True)
class EvaluatedModel:
    """A base model alone, with its adapter attached, or merged with it."""

    base: BaseModel
    adapter: Path | None
    dtype: torch.dtype
    is_merged: bool = False
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """The templates of training by name; without any, the tokenizer's own."""

    def load(self) -> Any:
        """Load the model to the CPU."""
        if self.adapter is None:
            return load_base(self.base.folder, self.dtype)
        if self.is_merged:
            return load_merged(self.base.folder, self.adapter, self.dtype)
        return with_adapter(self.base.folder, self.adapter, self.dtype)

    def load_tokenizer(self, *, apply_chat_template: bool) -> Any:
        """Load the tokenizer with the templates of training; with `apply_chat_template`, also with its fixed date."""
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            self.base.folder, local_files_only=True
        )
        use_chat_templates(tokenizer, self.chat_templates)
        if apply_chat_template:
            set_chat_template(tokenizer)
        return tokenizer

    def cache_key(
        self, tokenizer: Any, ends: Sequence[int], *, apply_chat_template: bool
    ) -> str:
        """Return 16 hex digits of a hash over everything that affects the model's responses besides the requests.

        That includes the versions of the libraries. The system instruction and the examples are in the requests.
        """
        adapter = digest_of(self.adapter) if self.adapter else None
        template = tokenizer.chat_template if apply_chat_template else None
        inputs = {
            "base": self.base.digest,
            "adapter": adapter,
            # Merging rounds the weights, so its responses may differ.
            "merged": self.is_merged,
            "dtype": str(self.dtype),
            "chat_template": template,
            "end_tokens": list(ends),
            "libraries": [lm_eval.__version__, transformers.__version__],
        }
        return hashlib.sha256(canonical_json(inputs)).hexdigest()[:16]


def load_lm(
    model: EvaluatedModel,
    tokenizer: Any,
    ends: Sequence[int],
    device: torch.device,
    *,
    batch_size: int,
    apply_chat_template: bool,
) -> Any:
    """Load a model to the device as an lm-eval model whose answers end at the tokens `ends`."""
    weights = model.load()
    # A batch of long answers takes many passes until the first answer is known.
    weights.register_forward_hook(lambda *_: activity.report())
    set_end_tokens(weights, ends)
    # None leaves the decision to lm-eval.
    add_bos_token = None
    if apply_chat_template and needs_no_bos(tokenizer):
        add_bos_token = False
    with without_messages("lm_eval.models.huggingface", *LOADED_BEFORE):
        return HFLM(
            pretrained=weights.to(device),
            tokenizer=tokenizer,
            batch_size=batch_size,
            max_batch_size=MAX_ON_GPU,
            backend="causal",
            add_bos_token=add_bos_token,
        )
