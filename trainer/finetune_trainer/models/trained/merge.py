"""The trained model: the base model with its adapter attached or merged, or with all weights replaced."""

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from finetune_trainer.models.loading import load_base
from finetune_trainer.models.stored_weights import StoredWeights
from finetune_trainer.models.trained.full_weights import FullWeights
from finetune_trainer.models.trained.merged_weights import (
    ADAPTER_WEIGHTS,
    MergedWeights,
    NotSeparable,
)
from finetune_trainer.models.trained.published_weights import PublishedWeights
from finetune_trainer.models.trained.whole_merge import WholeMerge, with_adapter

__all__ = ["load_merged", "save_merged", "with_adapter"]
SHARD = "2GB"
"""Maximum size of a file of the merged model. Memory holds a single file and a single layer."""


def is_adapter(trained: Path) -> bool:
    """Return whether the output of training is an adapter; else it is the weights of a whole model."""
    return (trained / ADAPTER_WEIGHTS).exists()


def load_merged(model_folder: Path, trained: Path, dtype: torch.dtype) -> Any:
    """Load the model that `save_merged` writes, without writing it: every weight has the same bytes."""
    merged = _published(model_folder, trained, dtype)
    model = load_base(model_folder, dtype)
    merged.load_into(model)
    model.config.dtype = dtype
    return model


def _published(
    model_folder: Path, trained: Path, dtype: torch.dtype
) -> PublishedWeights:
    if not is_adapter(trained):
        return FullWeights(model_folder, trained, dtype)
    try:
        return MergedWeights(model_folder, trained, dtype)
    except NotSeparable as reason:
        return WholeMerge(model_folder, trained, dtype, reason)


def save_merged(
    model_folder: Path, trained: Path, dtype: torch.dtype, folder: Path
) -> None:
    """Write config.json and the weights, as safetensors files of at most SHARD, to an existing folder.

    Raises ConfigInvalid if the adapter does not match the model.
    """
    merged = _published(model_folder, trained, dtype)
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
    (folder / "config.json").write_text(json.dumps(merged.config(), indent=2) + "\n")


def merged_size(model_folder: Path, dtype: torch.dtype) -> int:
    """Return the size in bytes of a model's weights in `dtype`."""
    return sum(
        tensor.numel() * dtype.itemsize
        for tensor in StoredWeights(model_folder).meta.values()
    )
