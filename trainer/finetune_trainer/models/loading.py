"""Load the base model and locate the trained adapter. No code from a model's folder is executed."""

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
"""Exceptions that transformers raises for a folder without a model in its format."""


def dtype_of(name: str, model_folder: Path) -> torch.dtype:
    """Return the dtype for bf16, fp16 or fp32; for auto, the dtype in which the model is stored, else fp32."""
    if name != "auto":
        return DTYPES[name]
    stored: torch.dtype | None = AutoConfig.from_pretrained(model_folder, local_files_only=True).dtype
    return stored or torch.float32


def load_base(folder: Path, dtype: torch.dtype, uri: str = "") -> Any:
    """Load a causal language model to the CPU, from safetensors files only; `uri` names it in errors.

    Raises ConfigInvalid if the folder holds no such model, or if the weights do not match config.json.
    """
    disable_progress_bar()  # its carriage returns are useless in a log
    try:
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except UNREADABLE as error:
        raise ConfigInvalid(f"model {uri or folder} cannot be loaded from {folder}: {error}") from error
    # transformers would only warn, and initialize these weights with random values.
    if loading_info["missing_keys"] or loading_info["mismatched_keys"]:
        wrong = sorted(loading_info["missing_keys"]) + sorted(str(key) for key in loading_info["mismatched_keys"])
        raise ConfigInvalid(
            f"model {uri or folder}: its weights do not match its config.json "
            f"(missing or of another shape: {wrong[0]}): use weights and config.json of the same model"
        )
    return model.eval()


def check_context_length(folder: Path, source: ModelSource, context_length: int) -> None:
    """Raise ConfigInvalid if the model supports fewer positions than the packed rows have tokens."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except UNREADABLE as error:
        raise ConfigInvalid(f"model {source.uri} cannot be loaded from {folder}: {error}") from error
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and positions < context_length:
        raise ConfigInvalid(
            f"model {source.uri} supports {positions} positions, the packed rows have {context_length}: "
            f"set prepare.contextLength to {positions} or less"
        )


def adapter_folder(environment: Environment, train: str) -> Path:
    """Return the output folder of the train stage with this identity, every byte of it verified.

    Raises SourceNotFound if the adapter is missing or corrupt.
    """
    folder = environment.stage_dir("train", train) / "output"
    try:
        verify(folder)
    except CorruptArtifact as error:
        raise SourceNotFound(f"the adapter of train/{train}: {error}; run train again") from error
    return folder
