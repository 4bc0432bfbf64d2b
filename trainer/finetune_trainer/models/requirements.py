"""What a base model needs so that it can be trained, checked by its small files before its weights are read."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from finetune_trainer.models.model_types import (
    architecture_problem,
    model_type_problem,
)
from finetune_trainer.models.rope import rope_problem
from finetune_trainer.models.stored_weights import POINTER, StoredWeights
from finetune_trainer.models.token_ids import token_id_problem
from finetune_trainer.runtime.errors import ConfigInvalid

CONFIG = "config.json"
OTHER_CONFIGS = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
)
NOT_QUANTIZED = "use a base model that is not quantized"
QUANTIZED_NAME = re.compile(
    r"[-_.](?:unsloth[-_])?(?:bnb[-_])?(?:quantized|GPTQ|AWQ|EXL[23]|GGUF|FP8|FP4|NVFP4|MXFP4|INT[48]|W[48]A\d+|[48][-_]?bit)\b.*$",
    re.IGNORECASE,
)
"""The end of a name that says that the weights are quantized."""
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
"""Endings of files with pickled weights, which may run code when they are read."""
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model, of which only the small files need to be in the folder."""

    uri: str
    """URI in the manifest, for errors."""
    folder: Path
    names: Collection[str]
    """Names of all files of the model."""

    @classmethod
    def in_folder(cls, uri: str, folder: Path) -> "ModelFiles":
        """Return the files of a model on this machine."""
        names = {path.name for path in folder.iterdir() if path.is_file()}
        return cls(uri, folder, names)


def check_model(files: ModelFiles) -> dict[str, Any]:
    """Return config.json of the model; raise ConfigInvalid if the model cannot be trained."""
    config = read_json(files, CONFIG)
    for name in OTHER_CONFIGS:
        # Later stages read and publish them, after all the training.
        if (files.folder / name).is_file():
            settings = read_json(files, name)
            _check_token_ids(files.uri, name, settings)
    check_config(files.uri, config)
    _check_weights(files)
    return config


def check_headers(files: ModelFiles) -> None:
    """Raise ConfigInvalid if a file of the weights is damaged, or has weights of a quantized type.

    Only the headers are read.
    """
    for name, tensor in StoredWeights(files.folder).meta.items():
        is_matrix = tensor.dim() > 1 and name.endswith("weight")
        if is_matrix and not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ConfigInvalid(
                f"{files.uri}: {name} has the type {kind} of quantized weights: {NOT_QUANTIZED}"
            )


def check_config(uri: str, config: Mapping[str, Any]) -> None:
    """Raise ConfigInvalid if a model with this config.json cannot be trained."""
    method = quantization_of(config)
    if method:
        raise ConfigInvalid(
            f"{uri}: is already quantized ({method}): {NOT_QUANTIZED}{_likely_base(uri)}"
        )
    _check_token_ids(uri, CONFIG, config)
    problem = (
        model_type_problem(config)
        or architecture_problem(config)
        or rope_problem(config)
    )
    if problem:
        raise ConfigInvalid(f"{uri}: {problem}")


def _check_token_ids(uri: str, name: str, settings: Mapping[str, Any]) -> None:
    problem = token_id_problem(settings)
    if problem:
        raise ConfigInvalid(f"{uri}: {name}: {problem}")


def quantization_of(config: Mapping[str, Any]) -> str | None:
    """Return the method by which a model is quantized; None if it is not."""
    # `quantization` is MLX's.
    for name in ("quantization_config", "compression_config", "quantization"):
        settings = config.get(name)
        if not settings:
            continue
        if isinstance(settings, dict):
            return str(settings.get("quant_method") or name)
        return name
    for name, part in config.items():
        if name.endswith("_config") and isinstance(part, dict):
            method = quantization_of(part)
            if method:
                return method
    return None


def _likely_base(uri: str) -> str:
    """Return a guess at the model before its quantization, as the end of a sentence; empty without a guess."""
    base = QUANTIZED_NAME.sub("", uri)
    if base == uri:
        return ""
    return f"; it may be {base}"


def read_json(files: ModelFiles, name: str) -> dict[str, Any]:
    """Return a JSON object of a model; raise ConfigInvalid if the file holds none."""
    content = (files.folder / name).read_bytes()
    if content.startswith(POINTER):
        raise ConfigInvalid(
            f"{files.uri}: {name} is a pointer of Git LFS, not the file: run git lfs pull in the model's folder"
        )
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigInvalid(
            f"{files.uri}: {name} is not JSON ({error}): copy the file of the model again"
        ) from None
    if not isinstance(value, dict):
        raise ConfigInvalid(
            f"{files.uri}: {name} is no JSON object: copy the file of the model again"
        )
    return value


def _check_weights(files: ModelFiles) -> None:
    """Raise ConfigInvalid unless the model has all files of its weights, in safetensors format."""
    if SAFE_WEIGHTS_INDEX_NAME in files.names:
        missing = sorted(_shards(files) - set(files.names))
        if missing:
            count = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ConfigInvalid(
                f"{files.uri}: {SAFE_WEIGHTS_INDEX_NAME} names {missing[0]}{count}, which does not exist: "
                "copy the whole model"
            )
        return
    if SAFE_WEIGHTS_NAME not in files.names:
        raise ConfigInvalid(f"{files.uri}: {_no_weights_problem(files.names)}")


def _shards(files: ModelFiles) -> set[str]:
    index = read_json(files, SAFE_WEIGHTS_INDEX_NAME)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigInvalid(
            f"{files.uri}: {SAFE_WEIGHTS_INDEX_NAME} has no weight_map: use the index file of the model"
        )
    return {str(name) for name in weight_map.values()}


def _no_weights_problem(names: Collection[str]) -> str:
    """Return what a model without weights in safetensors format has instead, and the fix."""
    shards = sorted(name for name in names if SHARD.fullmatch(name))
    if shards:
        return f"has {shards[0]} and no {SAFE_WEIGHTS_INDEX_NAME}: copy the index file, too"
    pickled = sorted(name for name in names if name.endswith(PICKLED))
    if pickled:
        return (
            f"has pickled weights only ({pickled[0]}), which may run code and are not read: "
            "use a revision with model.safetensors, or save them with save_pretrained of transformers"
        )
    packed = sorted(name for name in names if name.lower().endswith(".gguf"))
    if packed:
        return (
            f"has weights in GGUF format only ({packed[0]}), from which no model is trained: "
            "use the model from which they were made"
        )
    others = sorted(name for name in names if name.endswith(".safetensors"))
    if others:
        return f"has weights as {others[0]} only, not as {SAFE_WEIGHTS_NAME}: use the model in Hugging Face format"
    return f"has no weights: copy {SAFE_WEIGHTS_NAME}, or all shards with {SAFE_WEIGHTS_INDEX_NAME}"
