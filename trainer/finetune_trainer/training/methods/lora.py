"""Attach a new LoRA adapter to a frozen base model."""

import difflib
import fnmatch
import json
from collections.abc import Iterable
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
from peft.utils.integrations import dequantize_module_weight
from transformers.pytorch_utils import Conv1D

from finetune_trainer.contract import Lora, ModelSource
from finetune_trainer.contract.uris import hub_id, hub_revision
from finetune_trainer.models.language_model import is_multimodal, language_names
from finetune_trainer.models.trained.merged_weights import ADAPTER_WEIGHTS
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.runtime.foreign_warnings import without_deprecations
from finetune_trainer.training.methods.trainable import Trainable, WeightsFormat

ADAPTER_CONFIG = "adapter_config.json"
ALL_LINEAR = "all-linear"
LINEAR_LAYERS = (torch.nn.Linear, Conv1D)
ADAPTABLE_LAYERS = (
    *LINEAR_LAYERS,
    torch.nn.Embedding,
    torch.nn.Conv1d,
    torch.nn.Conv2d,
    torch.nn.Conv3d,
    torch.nn.MultiheadAttention,
)
"""Kinds of layers that PEFT adapts; a layer of 4 bits is a Linear, too."""
# An adapted router would send tokens to experts that have not seen them.
ROUTER_NAMES = frozenset({"router", "gate", "shared_expert_gate"})
"""Names of the layers that choose the experts of a token, in all MoE models of transformers."""
EXPERT_NAMES = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Names of layers that PEFT redirects to the fused experts of a model that has such."""

EXPERT_DIMENSIONS = 3
"""Dimensions of a tensor with all experts of a layer: experts, outputs, inputs."""


def trainable_adapter(
    base: Any, lora: Lora, source: ModelSource, seed: int
) -> Trainable:
    """Freeze the model and add a new adapter; raise ConfigInvalid if a name in the recipe matches no layer."""
    model = attach_adapter(base, lora, source, seed)
    weights = get_peft_model_state_dict(model, save_embedding_layers=False)
    return Trainable(
        model,
        weights,
        WeightsFormat(ADAPTER_WEIGHTS, {ADAPTER_CONFIG: adapter_config(model)}),
    )


# PEFT asks transformers for it.
@without_deprecations("is_gradient_checkpointing")
def attach_adapter(base: Any, lora: Lora, source: ModelSource, seed: int) -> PeftModel:
    """Return PEFT's model: the frozen base model with a new adapter in fp32."""
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets(base, lora.target_modules),
        modules_to_save=list(lora.modules_to_save) or None,
        ensure_weight_tying=bool(lora.modules_to_save),
        use_rslora=lora.variant == "RsLoRA",
        use_dora=lora.variant == "DoRA",
    )
    _check_modules_to_save(base, lora)
    # The seed determines the adapter's initial weights.
    torch.manual_seed(seed)
    try:
        model = get_peft_model(base, config, autocast_adapter_dtype=True)
    except ValueError as error:
        raise ConfigInvalid(
            f"train.lora: {error}; {linear_layer_names(base)}"
        ) from error
    for parameter in (p for p in model.parameters() if p.requires_grad):
        # PEFT copies modulesToSave in the base model's dtype.
        parameter.data = parameter.data.float()
    if lora.variant == "DoRA":
        _compute_magnitudes_in_fp32(model)
    # PEFT filled in the local path, which would make the adapter's bytes depend on the machine. Programs that load
    # adapters look for a repository of the hub by this name. The model card names every other place.
    config.base_model_name_or_path = hub_id(source.uri)
    config.revision = hub_revision(source.uri, source.revision)
    return model


def check_saved_in_full(structure: Any, lora: Lora) -> None:
    """Raise ConfigInvalid if a name in modulesToSave matches a layer that QLoRA will quantize; reads no weights."""
    head = structure.get_output_embeddings()
    for path, module in structure.named_modules():
        name = path.rpartition(".")[2]
        if name not in lora.modules_to_save or module is head:
            continue
        if any(isinstance(layer, torch.nn.Linear) for layer in module.modules()):
            raise _in_4_bits(name)


def _in_4_bits(name: str) -> ConfigInvalid:
    return ConfigInvalid(
        f"train.lora.modulesToSave: {name} has weights in 4 bits, which cannot be trained: "
        "name it in train.lora.targetModules, or set train.method to LoRA"
    )


def _check_modules_to_save(base: Any, lora: Lora) -> None:
    """Raise ConfigInvalid if a name in modulesToSave matches a quantized layer, or no layer, which PEFT ignores."""
    layers = {
        name.rpartition(".")[2]: module for name, module in base.named_modules() if name
    }
    for name in lora.modules_to_save:
        if name not in layers:
            known = ", ".join(sorted(layer for layer in layers if not layer.isdigit()))
            hint = _did_you_mean(name, layers)
            raise ConfigInvalid(
                f"train.lora.modulesToSave: {name} is no layer of the model{hint}; its layers are {known}"
            )
        if not all(
            parameter.is_floating_point() for parameter in layers[name].parameters()
        ):
            raise _in_4_bits(name)


def targets(base: torch.nn.Module, names: tuple[str, ...]) -> str | list[str]:
    """Return PEFT's `target_modules` for these names and patterns; raise ConfigInvalid if a name matches no layer."""
    if names == (ALL_LINEAR,):
        return _all_linear(base)
    modules = language_names(base)
    has_towers = is_multimodal(base)
    # PEFT redirects the names of single experts' layers to the tensor that holds them all.
    selected: set[str] = set()
    if has_fused_experts(base):
        selected.update(EXPERT_NAMES.intersection(names))
    for name in (name for name in names if name not in selected):
        matching = [module for module in modules if _matches(module, name)]
        if not matching:
            hint = _did_you_mean(name, _adaptable_names(base))
            raise ConfigInvalid(
                f"train.lora.targetModules: {name} {_no_match(base, name)}{hint}; {linear_layer_names(base)}"
            )
        _check_adaptable(base, name, matching)
        # In a list PEFT matches names and the ends of names, but no patterns. A tower may have layers of this name.
        selected.update(matching if has_towers or "*" in name else [name])
    # Sorted: the order of a set of strings differs between processes, and the adapter's file holds the names.
    return sorted(selected)


def check_names(structure: torch.nn.Module, lora: Lora) -> None:
    """Raise ConfigInvalid if a name in the recipe matches no layer that can be trained; reads no weights."""
    targets(structure, lora.target_modules)
    _check_modules_to_save(structure, lora)


def _check_adaptable(base: torch.nn.Module, name: str, matching: list[str]) -> None:
    """Raise ConfigInvalid if a name matches a layer of a kind that PEFT cannot adapt."""
    for match in matching:
        layer = base.get_submodule(match)
        if not isinstance(layer, ADAPTABLE_LAYERS):
            raise ConfigInvalid(
                f"train.lora.targetModules: {name} matches {match}, a {type(layer).__name__}, which LoRA cannot adapt; "
                + linear_layer_names(base)
            )
        if not _is_adapted_by_peft(base, match):
            raise ConfigInvalid(
                f"train.lora.targetModules: {name} matches {match}, which PEFT does not adapt in "
                f"{base.config.model_type}: remove it, or set targetModules to [{ALL_LINEAR}], which leaves it out"
            )


def _is_adapted_by_peft(base: Any, name: str) -> bool:
    """Return whether PEFT adapts a layer of this model; it refuses some of recurrent layers, by their names."""
    try:
        _check_lora_target_modules_mamba(LoraConfig(), base, name.rpartition(".")[2])
    except ValueError:
        return False
    return True


def _adaptable_names(base: torch.nn.Module) -> list[str]:
    return [
        name
        for name, layer in base.named_modules()
        if isinstance(layer, ADAPTABLE_LAYERS)
    ]


def _did_you_mean(name: str, modules: Iterable[str]) -> str:
    """Return the layer with the most similar name, as a part of a sentence; empty if none is similar."""
    last_names = {module.rpartition(".")[2] for module in modules}
    # Sorted: among equally similar names the first one counts, in every process.
    nearest = difflib.get_close_matches(name.rpartition(".")[2], sorted(last_names), 1)
    if not nearest:
        return ""
    return f"; did you mean {nearest[0]}?"


def _matches(module: str, name: str) -> bool:
    """Return whether a name or pattern of the recipe is a layer's whole name, or its end."""
    return fnmatch.fnmatchcase(module, name) or fnmatch.fnmatchcase(module, f"*.{name}")


def _no_match(base: torch.nn.Module, name: str) -> str:
    """Return the reason for which no layer of the language model has this name."""
    if name == ALL_LINEAR:
        return f"cannot be combined with other names, and {ALL_LINEAR} matches no layer of the model"
    if any(_matches(module, name) for module, _ in base.named_modules() if module):
        return "matches only layers that read images or sound, which do not learn from text"
    return "matches no layer of the model"


def has_fused_experts(base: torch.nn.Module) -> bool:
    """Return whether the model holds the weights of all experts of a layer in a single tensor, which is no layer."""
    return any(name.endswith(".gate_up_proj") for name, _ in base.named_parameters())


def expert_bytes(base: torch.nn.Module) -> int:
    """Return the bytes of fused experts in 16 bits; 0 if the model has none. QLoRA quantizes linear layers only."""
    if not has_fused_experts(base):
        return 0
    sizes: list[int] = [
        parameter.numel()
        for parameter in base.parameters()
        if parameter.dim() == EXPERT_DIMENSIONS
    ]
    return 2 * sum(sizes)


def _all_linear(base: torch.nn.Module) -> str | list[str]:
    """Return PEFT's all-linear for a dense model; else the names of the layers that it should select.

    Of a multimodal model, these are layers of the language model: no gradient reaches its towers. In a MoE model, an
    adapted router would send tokens to experts that the base model did not learn to use for them. PEFT refuses some
    layers of recurrent models.
    """
    linear = [
        name
        for name, module in base.named_modules()
        if isinstance(module, LINEAR_LAYERS)
    ]
    language = language_names(base)
    is_fused = has_fused_experts(base)
    excluded = ROUTER_NAMES
    if is_fused:
        # PEFT refuses DoRA and dropout on a tensor with all experts. Users who want to adapt the experts name them.
        excluded |= EXPERT_NAMES
    head = base.get_output_embeddings()
    selected = [
        name
        for name in linear
        if name in language
        and excluded.isdisjoint(name.split("."))
        and base.get_submodule(name) is not head
        and _is_adapted_by_peft(base, name)
    ]
    is_dense = not is_fused and len(selected) == len(linear) - isinstance(
        head, LINEAR_LAYERS
    )
    if is_dense:
        return ALL_LINEAR
    return sorted(selected)


def _compute_magnitudes_in_fp32(model: PeftModel) -> None:
    """Replace DoRA's initial magnitudes, which PEFT computes in the base model's dtype.

    Rounded to bf16 they would differ by up to 0.3 % from the norms of the weights, and the untrained adapter would
    change the model's output. Raises ConfigInvalid if a norm is 0: DoRA divides by it.
    """
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and module.lora_magnitude_vector:
            weight = dequantize_module_weight(module.get_base_layer()).detach().float()
            # Conv1D stores its weight [inputs, outputs], and Linear [outputs, inputs].
            inputs = 1 if isinstance(module.get_base_layer(), torch.nn.Linear) else 0
            magnitude = torch.linalg.norm(weight, dim=inputs)
            if not magnitude.all():
                raise ConfigInvalid(
                    f"train.lora: {int((magnitude == 0).sum())} rows of {name} are zero, and DoRA divides by their "
                    "norm: remove this layer from targetModules or set variant to LoRA"
                )
            module.lora_magnitude_vector["default"].weight.data = magnitude


def linear_layer_names(base: torch.nn.Module) -> str:
    """Return a sentence with the names of the model's linear layers, without their parents' names."""
    linear = {
        name.rpartition(".")[2]
        for name, module in base.named_modules()
        if isinstance(module, LINEAR_LAYERS)
    }
    return f"the model's linear layers are {', '.join(sorted(linear))}"


def adapter_config(model: PeftModel) -> bytes:
    """Return the bytes of adapter_config.json, which are the same for the same adapter in any process."""
    values: dict[str, Any] = model.peft_config["default"].to_dict() | {
        "inference_mode": True
    }
    # The order of a set of strings differs between processes.
    sorted_values = {
        name: sorted(value) if isinstance(value, set) else value
        for name, value in values.items()
    }
    return (json.dumps(sorted_values, indent=2, sort_keys=True) + "\n").encode()
