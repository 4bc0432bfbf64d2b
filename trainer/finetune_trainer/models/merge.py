"""Load the base model with its adapter, either as a PeftModel or merged into the weights."""

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from finetune_trainer.models.loading import load_base
from finetune_trainer.runtime.errors import ConfigInvalid


def with_adapter(model_folder: Path, adapter: Path, dtype: torch.dtype) -> Any:
    """Load the base model with the adapter attached; the adapter's own weights stay fp32."""
    base = load_base(model_folder, dtype)
    try:
        return PeftModel.from_pretrained(base, str(adapter)).eval()
    except (ValueError, KeyError, RuntimeError) as error:
        raise ConfigInvalid(f"the adapter does not match the model in {model_folder}: {error}") from error


def merge_adapter(model_folder: Path, adapter: Path, dtype: torch.dtype) -> Any:
    """Merge the adapter into the base model in fp32, then round once to `dtype`; the result is a plain model."""
    model = with_adapter(model_folder, adapter, torch.float32).merge_and_unload(safe_merge=True)
    for parameter in model.parameters():
        # Not model.to(dtype): that would also round buffers (rotary frequencies), which loading a model does not do.
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model
