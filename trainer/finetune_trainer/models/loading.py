"""The base model and the trained adapter, loaded from their folders; nothing in a folder is executed."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from finetune_trainer.contract import Environment, ModelSource
from finetune_trainer.runtime.artifacts import CorruptArtifact, verify
from finetune_trainer.runtime.errors import ConfigInvalid, SourceNotFound

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)
"""What transformers raises for a folder that holds no model of its own format."""


def dtype_of(name: str, model_folder: Path) -> torch.dtype:
    """Return the dtype called bf16, fp16 or fp32; auto is the one in which the model is stored."""
    if name != "auto":
        return DTYPES[name]
    stored: torch.dtype | None = AutoConfig.from_pretrained(model_folder, local_files_only=True).dtype
    return stored or torch.float32


def load_base(folder: Path, dtype: torch.dtype, uri: str = "") -> Any:
    """Load a causal language model to the CPU, from safetensors files only; `uri` names it in errors.

    Raises ConfigInvalid where the folder holds no such model, or weights that do not fit its config.json.
    """
    disable_progress_bar()  # a log is no terminal
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except UNREADABLE as error:
        raise ConfigInvalid(f"model {uri or folder} cannot be loaded from {folder}: {error}") from error
    if found["missing_keys"] or found["mismatched_keys"]:
        lacking = sorted(found["missing_keys"]) + sorted(str(key) for key in found["mismatched_keys"])
        raise ConfigInvalid(f"model {uri or folder}: its weights do not fit its config.json, first at {lacking[0]}")
    return model.eval()


def check_context_length(folder: Path, source: ModelSource, context_length: int) -> None:
    """Raise ConfigInvalid where the model has fewer positions than the packed rows have tokens."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except UNREADABLE as error:
        raise ConfigInvalid(f"model {source.uri} cannot be loaded from {folder}: {error}") from error
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and positions < context_length:
        raise ConfigInvalid(
            f"model {source.uri} knows {positions} positions, the rows have {context_length}: "
            f"set prepare.contextLength to {positions} or less"
        )


def adapter_folder(environment: Environment, train: str) -> Path:
    """Return the folder of the adapter that the train stage of this identity made, every byte verified.

    Raises SourceNotFound where it is missing or damaged.
    """
    folder = environment.stage_dir("train", train) / "output"
    try:
        verify(folder)
    except CorruptArtifact as damage:
        raise SourceNotFound(f"the adapter of train/{train}: {damage}; run train again") from damage
    return folder
