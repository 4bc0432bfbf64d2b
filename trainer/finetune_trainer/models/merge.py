"""The trained model: the base model with its adapter attached or merged, or with all weights replaced."""

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from peft import PeftModel
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from finetune_trainer.models.full_weights import FullWeights
from finetune_trainer.models.loading import load_base
from finetune_trainer.models.merged_weights import (
    ADAPTER_WEIGHTS,
    MergedWeights,
    NotSeparable,
    mismatch,
    tied_layers,
)
from finetune_trainer.models.published_weights import PublishedWeights
from finetune_trainer.models.stored_weights import StoredWeights
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.runtime.foreign_warnings import without_deprecations

SHARD = "2GB"
"""Maximum size of a file of the merged model. Memory holds a single file and a single layer."""


# PEFT asks transformers for it.
@without_deprecations("is_gradient_checkpointing")
def with_adapter(model_folder: Path, adapter: Path, dtype: torch.dtype) -> Any:
    """Load the base model with the adapter attached; the adapter's own weights stay fp32."""
    base = load_base(model_folder, dtype)
    try:
        return PeftModel.from_pretrained(base, str(adapter)).eval()
    except (ValueError, KeyError, RuntimeError) as error:
        raise mismatch(model_folder, error) from error


def is_adapter(trained: Path) -> bool:
    """Return whether the output of training is an adapter; else it is the weights of a whole model."""
    return (trained / ADAPTER_WEIGHTS).exists()


def load_merged(model_folder: Path, trained: Path, dtype: torch.dtype) -> Any:
    """Load the model that `save_merged` writes, without writing it: every weight has the same bytes."""
    try:
        merged = _published(model_folder, trained, dtype)
    except NotSeparable as reason:
        return _merge_whole(model_folder, trained, dtype, reason)
    model = load_base(model_folder, dtype)
    merged.load_into(model)
    model.config.dtype = dtype
    return model


def _published(
    model_folder: Path, trained: Path, dtype: torch.dtype
) -> PublishedWeights:
    if is_adapter(trained):
        return MergedWeights(model_folder, trained, dtype)
    return FullWeights(model_folder, trained, dtype)


def save_merged(
    model_folder: Path, trained: Path, dtype: torch.dtype, folder: Path
) -> None:
    """Write config.json and the weights, as safetensors files of at most SHARD, to an existing folder.

    Raises ConfigInvalid if the adapter does not match the model.
    """
    try:
        merged = _published(model_folder, trained, dtype)
    except NotSeparable as reason:
        _merge_whole(model_folder, trained, dtype, reason).save_pretrained(
            folder, max_shard_size=SHARD
        )
        return
    # From shapes alone: no weight is read before its file is written.
    shards = split_torch_state_dict_into_shards(merged.meta, max_shard_size=SHARD)
    for file, names in shards.filename_to_tensors.items():
        save_file(
            {name: merged.read(name) for name in names},
            folder / file,
            metadata={"format": "pt"},
        )
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(
            json.dumps(index, indent=2, sort_keys=True) + "\n"
        )
    (folder / "config.json").write_text(
        json.dumps(merged.config(), indent=2, sort_keys=True) + "\n"
    )


def merged_size(model_folder: Path, dtype: torch.dtype) -> int:
    """Return the size in bytes of a model's weights in `dtype`."""
    return sum(
        tensor.numel() * dtype.itemsize
        for tensor in StoredWeights(model_folder).meta.values()
    )


def _merge_whole(
    model_folder: Path, adapter: Path, dtype: torch.dtype, reason: NotSeparable
) -> Any:
    """Merge the adapter into the whole model in fp32, then round once to `dtype`: takes memory for the model in fp32.

    Raises ConfigInvalid if the merge would also change a layer that shares its weight with an adapted layer.
    """
    model = with_adapter(model_folder, adapter, torch.float32)
    tied = tied_layers(model.get_base_model()) or ()
    # PEFT would merge a shared weight twice, or for both layers, and so publish another model than the trained model.
    shared = [
        name
        for name in tied
        if hasattr(model.get_base_model().get_submodule(name), "lora_A")
    ]
    if shared:
        raise ConfigInvalid(
            f"{shared[0]} shares its weight with another layer and cannot be merged alone, because {reason}: "
            "remove it from train.lora.targetModules"
        )
    print(f"merging in memory, because {reason}", flush=True)
    model = model.merge_and_unload(safe_merge=True)
    for parameter in model.parameters():
        # Not model.to(dtype): that would also round buffers (rotary frequencies), which loading a model does not do.
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model
