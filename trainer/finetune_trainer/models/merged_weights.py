"""The weights of the merged model, each computed from the stored tensors of base model and adapter when it is read.

PEFT itself merges each layer, in fp32; the result is rounded once. Tensors that the adapter does not change keep their
stored values. So memory holds one layer, whatever the size of the model.
"""

import copy
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from finetune_trainer.models.stored_weights import StoredWeights
from finetune_trainer.runtime.errors import ConfigInvalid

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""PEFT's prefix of the names of a model's layers."""
WHOLE_MODEL_FEATURES = (
    *("target_parameters", "rank_pattern", "alpha_pattern", "modules_to_save", "trainable_token_indices"),
    "lora_bias",
)
"""Settings of an adapter that concern more than the weight of one layer."""


class NotSeparable(Exception):
    """The adapter cannot be merged layer by layer; the message says why."""


@dataclass(frozen=True)
class AdaptedLayer:
    """One layer and its part of the adapter."""

    name: str
    """Name of the layer in the model."""
    tensors: dict[str, torch.Tensor]
    """The adapter's tensors by PEFT's names, without the name of the layer."""


class MergedWeights:
    """The tensors of the merged model by their stored names.

    Embedding and output head may share one weight. If the adapter changes one of them, the merged model has two.
    Raises NotSeparable, or ConfigInvalid if the adapter does not match the model.
    """

    def __init__(self, model_folder: Path, adapter: Path, dtype: torch.dtype) -> None:
        self._folder, self._dtype = model_folder, dtype
        self._lora = _separable_config(adapter)
        self._stored = StoredWeights(model_folder)
        self._main_dtype = _main_dtype(self._stored.meta.values())
        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder))
        layers = _adapted_layers(adapter)
        self._sources = {name: name for name in self._stored.meta}
        """Name in the merged model -> name in the base model."""
        embedding, head = tied_layers(self._model) or ("", "")
        self.is_untied = any(layer.name in {embedding, head} for layer in layers)
        """Whether embedding and output head have different weights in the merged model only."""
        if self.is_untied:
            # A model may store a head of its own although its configuration ties it; transformers then uses that one.
            self._sources.setdefault(f"{head}.weight", self._stored_name(embedding))
        self.layers = {self._stored_name(layer.name): layer for layer in layers}
        """The layers that the adapter changes, by the names of their weights."""

    @property
    def meta(self) -> dict[str, torch.Tensor]:
        """Shape and dtype of every tensor, as tensors without storage."""
        return {
            name: torch.empty_like(self._stored.meta[source], dtype=self._dtype_of(name))
            for name, source in sorted(self._sources.items())
        }

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor of the merged model."""
        source = self._sources[name]
        weight = self._stored.read(source)
        if layer := self.layers.get(name):
            weight = self._merge(layer, weight.float())
        return weight.to(self._dtype_of(name)).contiguous()

    def config(self) -> dict[str, Any]:
        """Return the content of config.json: that of the base model with the new dtype, without code to execute."""
        config: dict[str, Any] = json.loads((self._folder / "config.json").read_bytes())
        config.pop("auto_map", None)
        config["dtype"] = self._dtype_name
        for part in (config, *(value for value in config.values() if isinstance(value, dict))):
            part |= {key: self._dtype_name for key in ("dtype", "torch_dtype") if key in part}
            if self.is_untied and (part is config or "tie_word_embeddings" in part):
                part["tie_word_embeddings"] = False
        return config

    @property
    def _dtype_name(self) -> str:
        return str(self._dtype).removeprefix("torch.")

    def _dtype_of(self, name: str) -> torch.dtype:
        """Return the published dtype of a tensor: `dtype`, unless the base model makes an exception of it."""
        stored = self._stored.meta[self._sources[name]].dtype
        return self._dtype if name in self.layers or stored == self._main_dtype else stored

    def _stored_name(self, layer: str) -> str:
        """Return the name under which the weight of a layer is stored, with or without the model's prefix."""
        shape = self._module(layer).weight.shape
        for name in (layer, layer.removeprefix(f"{self._model.base_model_prefix}.")):
            source = self._sources.get(f"{name}.weight")
            if source and self._stored.meta[source].shape == shape:
                return f"{name}.weight"
        raise NotSeparable(f"the weight of {layer} is not stored as one tensor")

    def _module(self, layer: str) -> Any:
        try:
            return self._model.get_submodule(layer)
        except AttributeError:
            raise mismatch(self._folder, f"the model has no layer {layer}") from None

    def _merge(self, layer: AdaptedLayer, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight with the adapter of one layer; PEFT computes it in a model of this layer only."""
        model, module = torch.nn.Module(), copy.deepcopy(self._module(layer.name))
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        module.bias = None  # the adapter does not change it
        model.layer = module
        try:
            inject_adapter_in_model(copy.deepcopy(self._lora), model)
            loaded = set_peft_model_state_dict(model, {f"layer.{name}": each for name, each in layer.tensors.items()})
            if loaded.unexpected_keys:
                raise mismatch(self._folder, f"{layer.name} has no place for {loaded.unexpected_keys[0]}")
            model.layer.merge(safe_merge=True)
        except (ValueError, KeyError, RuntimeError) as error:
            raise mismatch(self._folder, f"{layer.name}: {error}") from error
        merged: torch.Tensor = model.layer.get_base_layer().weight.data
        return merged


def mismatch(model_folder: Path, reason: object) -> ConfigInvalid:
    """Return the error for an adapter that was trained on another model."""
    return ConfigInvalid(f"the adapter does not match the model in {model_folder}: {reason}; run train again")


def tied_layers(model: Any) -> tuple[str, str] | None:
    """Return the names of embedding and output head if they share one weight."""
    head = model.get_output_embeddings()
    if head is None or not model.config.get_text_config().tie_word_embeddings:
        return None
    names = {module: name for name, module in model.named_modules()}
    return names[model.get_input_embeddings()], names[head]


def _separable_config(adapter: Path) -> LoraConfig:
    """Return the adapter's config for a model with a single layer; raise NotSeparable if it concerns more."""
    config = LoraConfig.from_pretrained(str(adapter))
    for feature in WHOLE_MODEL_FEATURES:
        if getattr(config, feature, None):
            raise NotSeparable(f"the adapter uses {feature}")
    config.target_modules, config.task_type = {"layer"}, None
    config.layers_to_transform = config.layers_pattern = config.exclude_modules = None
    return config


def _adapted_layers(adapter: Path) -> list[AdaptedLayer]:
    layers: dict[str, AdaptedLayer] = {}
    for key, tensor in load_file(adapter / ADAPTER_WEIGHTS).items():
        name, _, rest = key.removeprefix(PREFIX).partition(".lora_")
        layers.setdefault(name, AdaptedLayer(name, {})).tensors[f"lora_{rest}"] = tensor
    return list(layers.values())


def _main_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """Return the floating-point dtype of most weights. A base model may store a few tensors in fp32 on purpose."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.is_floating_point():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
