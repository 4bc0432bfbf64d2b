"""Load the base model and find the trained adapter. No code from a model's folder is executed."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from finetune_trainer.contract import Environment
from finetune_trainer.models.base_model import BaseModel
from finetune_trainer.models.finite import check_cast, is_finite, is_narrower
from finetune_trainer.models.positions import positions_of
from finetune_trainer.models.stored_weights import StoredWeights
from finetune_trainer.runtime.artifacts import CorruptArtifact, verify
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    SourceNotFound,
    short_reason,
)

DTYPES = {"BF16": torch.bfloat16, "FP16": torch.float16, "FP32": torch.float32}
UNREADABLE = (
    *(OSError, ValueError, LookupError, RuntimeError, SafetensorError),
    *(TypeError, AttributeError, AssertionError, ArithmeticError),
)
"""Exceptions that transformers raises for a folder without a model in its format, or for wrong values in its config."""
BUFFERS = re.compile(r"(rotary_emb\.inv_freq|attn\.(masked_)?bias)$")
"""Tensors of older files that transformers computes itself."""


def dtype_of(name: str, model_folder: Path) -> torch.dtype:
    """Return the dtype for BF16, FP16 or FP32; for Auto, the dtype in which the model is stored, else FP32."""
    if name in DTYPES:
        return DTYPES[name]
    return load_config(model_folder).dtype or torch.float32


def load_config(folder: Path, uri: str = "") -> Any:
    """Load a model's configuration; `uri` names it in errors. Raises ConfigInvalid if it is invalid."""
    try:
        return AutoConfig.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        # A wrong value ends as an error of any kind, such as the TypeError of a text in place of a number.
        raise ConfigInvalid(
            f"model {uri or folder}: config.json cannot be loaded ({short_reason(error)}): "
            "use config.json and weights of the same model"
        ) from error


def empty_model(folder: Path) -> Any:
    """Return a causal language model without memory for its weights: only names and shapes of its layers."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(load_config(folder))


def load_base(folder: Path, dtype: torch.dtype, uri: str = "", **options: Any) -> Any:
    """Load a causal language model to the CPU, from safetensors files only; `uri` names it in errors.

    `options` are more arguments of `from_pretrained`.

    Raises ConfigInvalid if the folder holds no such model, if the weights do not match config.json, or if a weight is
    too large for the dtype.
    """
    # The carriage returns of the progress bar are useless in a log.
    disable_progress_bar()
    with _load_errors(folder, uri):
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            # A model's folder is data. Its code would run in this process, and so would a pickle's.
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            # They are refused below, with their names.
            ignore_mismatched_sizes=True,
            **options,
        )
    check_loading_info(loading_info, uri or str(folder))
    _check_cast(model, folder, dtype)
    # Training sets its own mode. Everything else needs the model without dropout.
    return model.eval()


def check_loading_info(loading_info: dict[str, Any], uri: str) -> None:
    """Raise ConfigInvalid if weights are missing or left over.

    transformers only warns: it makes missing weights random, and drops a weight for which the model has no place.
    """
    missing = sorted(loading_info["missing_keys"])
    mismatched = sorted(loading_info["mismatched_keys"])
    differences = [f"{name} is missing" for name in missing]
    differences += [
        f"{name} has the shape {_shape(stored)}, by config.json {_shape(wanted)}"
        for name, stored, wanted in mismatched
    ]
    if differences:
        raise ConfigInvalid(
            f"model {uri}: its weights do not match its config.json ({differences[0]}): "
            "use weights and config.json of the same model"
        )
    unexpected = sorted(
        name for name in loading_info["unexpected_keys"] if not BUFFERS.search(name)
    )
    if unexpected:
        raise ConfigInvalid(
            f"model {uri}: config.json has no place for {len(unexpected)} of its weights, such as {unexpected[0]}: "
            "use weights and config.json of the same model"
        )


def _shape(size: Sequence[int]) -> str:
    return " x ".join(map(str, size))


def _check_cast(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Raise ConfigInvalid if a weight is finite in the files, and infinite in the dtype of the loaded model."""
    stored = StoredWeights(folder)
    narrowed = [
        name
        for name, tensor in stored.meta.items()
        if is_narrower(dtype, than=tensor.dtype)
    ]
    # Reading the weights costs time, so only after a cast that can make them infinite.
    if not narrowed or all(map(is_finite, model.parameters())):
        return
    for name in narrowed:
        tensor = stored.read(name)
        check_cast(tensor, tensor.to(dtype), name)


@contextmanager
def _load_errors(folder: Path, uri: str) -> Iterator[None]:
    try:
        yield
    except UNREADABLE as error:
        # The short reason: the rest is advice about options of transformers, which no pipeline has.
        raise ConfigInvalid(
            f"model {uri or folder} cannot be loaded from {folder}: {short_reason(error)}: "
            "use config.json and weights of the same model"
        ) from error


def check_context_length(base: BaseModel, context_length: int) -> None:
    """Raise ConfigInvalid if the model supports fewer positions than the packed rows have tokens."""
    positions = positions_of(load_config(base.folder, base.uri).to_dict())
    if positions is not None and positions < context_length:
        raise ConfigInvalid(
            f"model {base.uri} supports {positions} positions, the packed rows have {context_length}: "
            f"set prepare.contextLength to {positions} or less"
        )


def open_trained_adapter(environment: Environment, train: str, base: BaseModel) -> Path:
    """Return the output folder of the train stage with this identity, every byte of it verified.

    Raises SourceNotFound if the adapter is missing or corrupt, and ConfigInvalid if it is of another base model.
    """
    folder = environment.stage_dir("train", train) / "output"
    try:
        about = verify(folder)
    except CorruptArtifact as error:
        raise SourceNotFound(
            f"the adapter of train/{train}: {error}; run train again"
        ) from error
    base.require(about.get("model"), f"the adapter of train/{train}")
    return folder
