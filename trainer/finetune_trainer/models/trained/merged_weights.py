"""The weights of a base model with an adapter merged into it.

PEFT itself merges each layer, in fp32; the result is rounded once. Memory holds a single layer, whatever the model's
size.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
from safetensors.torch import load_file
from typing_extensions import override

from finetune_trainer.models.finite import is_finite
from finetune_trainer.models.loading import empty_model
from finetune_trainer.models.trained.parameter_names import stored_names_of
from finetune_trainer.models.trained.published_weights import PublishedWeights
from finetune_trainer.models.trained.tied_layers import tied_layers
from finetune_trainer.runtime.errors import ConfigInvalid

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""PEFT's prefix of the names of a model's layers."""
WHOLE_MODEL_FEATURES = (
    "target_parameters",
    "rank_pattern",
    "alpha_pattern",
    "trainable_token_indices",
    "lora_bias",
)
"""Settings of an adapter that concern more than the weight of a single layer."""


class NotSeparable(Exception):
    """The adapter cannot be merged layer by layer; the message says why."""


@dataclass(frozen=True)
class AdaptedLayer:
    """A layer and its part of the adapter."""

    name: str
    """Name of the layer in the model."""
    tensors: dict[str, torch.Tensor]
    """The adapter's tensors by PEFT's names, without the name of the layer."""


class MergedWeights(PublishedWeights):
    """The base model with an adapter merged into it.

    Embedding and output head may share a weight. If the adapter changes either of them, the merged model has two.
    Raises NotSeparable, or ConfigInvalid if the adapter does not match the model.
    """

    def __init__(self, model_folder: Path, adapter: Path, dtype: torch.dtype) -> None:
        super().__init__(model_folder, dtype)
        self._lora = _separable_config(adapter)
        self._model = empty_model(model_folder)
        self._names = stored_names_of(self._model, self._stored.meta)
        layers, whole = _read_adapter(adapter)
        embedding, head = tied_layers(self._model) or ("", "")
        self.is_untied = any(
            layer.name in {embedding, head} for layer in layers
        ) or _differ(whole.get(f"{embedding}.weight"), whole.get(f"{head}.weight"))
        if self.is_untied:
            # A model may store a head of its own although its configuration ties it; transformers then uses that head.
            source = self._stored_name(f"{embedding}.weight")
            stored_head = self._names.setdefault(f"{head}.weight", f"{head}.weight")
            self._sources.setdefault(stored_head, source)
        elif head and f"{head}.weight" not in self._names:
            # The embedding's tensor is stored for both.
            whole.pop(f"{head}.weight", None)
        self._layers = {
            self._stored_name(f"{layer.name}.weight"): layer for layer in layers
        }
        self._whole = {self._stored_name(name): name for name in whole}
        self._trained = whole
        self.changed = frozenset({*self._layers, *self._whole})

    @override
    def _read_changed(self, name: str) -> torch.Tensor:
        if name in self._whole:
            return self._trained[self._whole[name]]
        weight = self._stored.read(self._sources[name]).float()
        if not is_finite(weight):
            raise ConfigInvalid(
                f"{name} of the base model has infinite or NaN values, into which no adapter can be merged: "
                "use a base model without such values"
            )
        return self._merge(self._layers[name], weight)

    @override
    def load_into(self, model: Any) -> None:
        for stored_name, layer in self._layers.items():
            # A new parameter, not new values: a layer that shares the weight must keep the stored values.
            weight = torch.nn.Parameter(self.read(stored_name), requires_grad=False)
            model.get_submodule(layer.name).weight = weight
        for stored_name, name in self._whole.items():
            weight = torch.nn.Parameter(self.read(stored_name), requires_grad=False)
            if self.is_untied:
                layer_name, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(layer_name), attribute, weight)
            else:
                # New values: layers that share the weight get them, too.
                model.get_parameter(name).data = weight.data

    def _stored_name(self, parameter: str) -> str:
        """Return the name under which a parameter is stored."""
        if parameter not in self._names:
            layer = parameter.rpartition(".")[0]
            self._module(layer)
            raise NotSeparable(f"the weight of {layer} is not stored as one tensor")
        return self._names[parameter]

    def _module(self, layer: str) -> Any:
        try:
            return self._model.get_submodule(layer)
        except AttributeError:
            raise mismatch(self._folder, f"the model has no layer {layer}") from None

    def _merge(self, layer: AdaptedLayer, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight with the adapter of a layer; PEFT computes it in a model of this layer only."""
        model = torch.nn.Module()
        module = copy.deepcopy(self._module(layer.name))
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        # The adapter does not change the bias.
        module.bias = None
        model.layer = module
        # PEFT's own code, so that every variant of LoRA is merged as PEFT computes it.
        try:
            inject_adapter_in_model(copy.deepcopy(self._lora), model)
            tensors = {
                f"layer.{name}": tensor for name, tensor in layer.tensors.items()
            }
            loaded = set_peft_model_state_dict(model, tensors)
            if loaded.unexpected_keys:
                raise mismatch(
                    self._folder,
                    f"{layer.name} has no place for {loaded.unexpected_keys[0]}",
                )
            model.layer.merge(safe_merge=True)
        except (ValueError, KeyError, RuntimeError) as error:
            raise mismatch(self._folder, f"{layer.name}: {error}") from error
        merged: torch.Tensor = model.layer.get_base_layer().weight.data
        return merged


def mismatch(model_folder: Path, reason: object) -> ConfigInvalid:
    """Return the error for an adapter that was trained on another model."""
    return ConfigInvalid(
        f"the adapter does not match the model in {model_folder}: {reason}; run train again"
    )


def _separable_config(adapter: Path) -> LoraConfig:
    """Return the adapter's config for a model with a single layer; raise NotSeparable if it concerns more."""
    config = LoraConfig.from_pretrained(str(adapter))
    for feature in WHOLE_MODEL_FEATURES:
        if getattr(config, feature, None):
            raise NotSeparable(f"the adapter uses {feature}")
    # The model that gets the adapter has this layer only. What selects layers of the whole model would exclude it.
    config.target_modules = {"layer"}
    config.task_type = None
    config.layers_to_transform = config.layers_pattern = config.exclude_modules = None
    return config


def _read_adapter(
    adapter: Path,
) -> tuple[list[AdaptedLayer], dict[str, torch.Tensor]]:
    """Return the adapted layers, and the parameters that the adapter replaces, by their names in the model."""
    layers: dict[str, AdaptedLayer] = {}
    whole = {}
    for key, tensor in load_file(adapter / ADAPTER_WEIGHTS).items():
        name, is_low_rank, rest = key.removeprefix(PREFIX).partition(".lora_")
        if not is_low_rank:
            whole[name] = tensor
            continue
        layers.setdefault(name, AdaptedLayer(name, {})).tensors[f"lora_{rest}"] = tensor
    return list(layers.values()), whole


def _differ(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    """Return whether two tensors differ, or only one of them is there."""
    if first is None or second is None:
        return first is not second
    return not torch.equal(first, second)
