"""The base model with its adapter, beside it or merged into it."""

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from finetune_trainer.artifacts import Damaged, verify
from finetune_trainer.contract import Environment
from finetune_trainer.errors import ConfigInvalid, SourceNotFound

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def adapter_of(environment: Environment, train: str) -> Path:
    """Give the folder of the adapter that the train stage of this identity made, every byte verified.

    Raises SourceNotFound where it is missing or damaged.
    """
    folder = environment.stage_dir("train", train) / "output"
    try:
        verify(folder)
    except Damaged as damage:
        raise SourceNotFound(f"the adapter of train/{train}: {damage}; run train again") from damage
    return folder


def dtype_of(name: str, model_folder: Path) -> torch.dtype:
    """Give the type called bf16, fp16 or fp32; auto is that in which the model is stored."""
    if name != "auto":
        return DTYPES[name]
    stored: torch.dtype | None = AutoConfig.from_pretrained(model_folder, local_files_only=True).dtype
    return stored or torch.float32


def load_base(model_folder: Path, dtype: torch.dtype) -> Any:
    """Load a causal language model to the CPU, from safetensors only; raise ConfigInvalid where it is none."""
    disable_progress_bar()  # a log is no terminal
    try:
        return AutoModelForCausalLM.from_pretrained(
            model_folder, dtype=dtype, use_safetensors=True, local_files_only=True
        ).eval()
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigInvalid(f"the model in {model_folder} cannot be loaded: {error}") from error


def with_adapter(model_folder: Path, adapter: Path, dtype: torch.dtype) -> Any:
    """Load the base model with the adapter at work beside it; the adapter's own weights stay fp32."""
    base = load_base(model_folder, dtype)
    try:
        return PeftModel.from_pretrained(base, str(adapter)).eval()
    except (ValueError, KeyError, RuntimeError) as error:
        raise ConfigInvalid(f"the adapter does not fit the model in {model_folder}: {error}") from error


def merged(model_folder: Path, adapter: Path, dtype: torch.dtype) -> Any:
    """Add the adapter to the base model in fp32 and round the sum to `dtype` once; the result knows no adapter."""
    model = with_adapter(model_folder, adapter, torch.float32).merge_and_unload(safe_merge=True)
    for parameter in model.parameters():
        # Not model.to(dtype): that would round buffers too (rotary frequencies), which nobody who loads it again does.
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model
