"""The frozen base model with its trainable LoRA adapter."""

import fnmatch
import json
import os
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers.pytorch_utils import Conv1D

from finetune_trainer.contract import Lora, ModelSource, TrainRecipe
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.training.batches import Batch
from finetune_trainer.training.determinism import Tensors
from finetune_trainer.training.loss import head_at_positions

ADAPTER_CONFIG = "adapter_config.json"
ALL_LINEAR = "all-linear"
LINEAR_LAYERS = (torch.nn.Linear, Conv1D)
ROUTER_NAMES = frozenset({"router", "gate", "shared_expert_gate"})
"""Names of the layers that choose the experts of a token, in all MoE models of transformers."""
EXPERT_NAMES = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Names of layers that PEFT redirects to the fused experts of a model that has such."""

ISOLATION_TOLERANCE = 0.05
"""Maximum difference as a share of the logits' standard deviation.

It is larger than the rounding of bf16 and much smaller than the effect of one document on another.
"""

FILE_MODE = 0o644
"""safetensors creates files readable by their owner only, but the serving container may run as another user."""


class AdaptedModel:
    """A frozen base model with a trainable adapter."""

    def __init__(self, model: PeftModel, device: torch.device, recipe: TrainRecipe) -> None:
        self.model = model.to(device)
        self.device = device
        self.adapter: Tensors = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        """The adapter's tensors by their names in PEFT's format; they share memory with the parameters."""
        self.trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._autocast = recipe.dtype == "BF16"
        if recipe.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if recipe.compile:
            self.model.compile()

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """Return the cross-entropy summed over the targets of a micro-batch, a scalar in fp32.

        Documents packed into one row cannot attend to each other. Their positions restart at 0, and there is neither
        an attention mask nor a cache. For such inputs transformers builds a block-diagonal causal mask.
        """
        batch = batch.to(self.device)
        with head_at_positions(batch.target_positions, self.model.get_output_embeddings()) as select:
            # The base is stored in bf16 and the adapter in fp32; autocast computes the adapter in bf16, too.
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
                output = self.model(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False)
            logits = select(output.logits)
        return torch.nn.functional.cross_entropy(logits.float(), batch.targets, reduction="sum")

    def load(self, adapter: Tensors) -> None:
        """Copy an adapter with the same names and shapes into the parameters."""
        for name, tensor in self.adapter.items():
            tensor.copy_(adapter[name])


def check_isolation(model: AdaptedModel, uri: str) -> None:
    """Raise ConfigInvalid if a packed document changes the logits of the document after it.

    Some architectures ignore restarting positions. The check runs two rows that differ only in their first
    document; the logits of their second document must be equal.
    """
    length = 8
    tokens = torch.arange(2 * length, device=model.device).repeat(2, 1)
    tokens[1, :length] = tokens[0, :length].flip(0)
    positions = (torch.arange(2 * length, device=model.device) % length).repeat(2, 1)
    model.model.eval()
    with torch.inference_mode():
        logits = model.model(input_ids=tokens, position_ids=positions, use_cache=False).logits.float()
    first, second = logits[:, length:]
    if (first - second).abs().max() > ISOLATION_TOLERANCE * first.std():
        raise ConfigInvalid(
            f"model {uri}: documents packed into one row attend to each other in this architecture "
            f"({type(model.model.get_base_model()).__name__}): set prepare.packing to false"
        )


def attach_adapter(base: torch.nn.Module, lora: Lora, source: ModelSource, seed: int) -> PeftModel:
    """Freeze the model and add a new adapter; raise ConfigInvalid if a name in targetModules matches no layer."""
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets(base, lora.target_modules),
        use_rslora=lora.variant == "RsLoRA",
        use_dora=lora.variant == "DoRA",
    )
    torch.manual_seed(seed)  # determines the adapter's initial weights, then all dropout
    try:
        model = get_peft_model(base, config, autocast_adapter_dtype=True)
    except ValueError as error:
        raise ConfigInvalid(f"train.lora: {error}; {linear_layer_names(base)}") from error
    if lora.variant == "DoRA":
        _compute_magnitudes_in_fp32(model)
    # PEFT filled in the local path, which would make the adapter's bytes depend on the machine.
    config.base_model_name_or_path, config.revision = source.uri, source.revision
    return model


def targets(base: torch.nn.Module, names: tuple[str, ...]) -> str | list[str]:
    """Return PEFT's `target_modules` for these names and patterns; raise ConfigInvalid if one matches no layer."""
    if names == (ALL_LINEAR,):
        return _all_linear(base)
    modules = [name for name, _ in base.named_modules() if name]
    # PEFT redirects the names of single experts' layers to the tensor that holds them all.
    selected = EXPERT_NAMES.intersection(names) if has_fused_experts(base) else set()
    for name in (name for name in names if name not in selected):
        matching = [m for m in modules if fnmatch.fnmatchcase(m, name) or fnmatch.fnmatchcase(m, f"*.{name}")]
        if not matching:
            hint = f"; {ALL_LINEAR} cannot be combined with other names" if name == ALL_LINEAR else ""
            raise ConfigInvalid(
                f"train.lora.targetModules: {name} matches no layer of the model{hint}; {linear_layer_names(base)}"
            )
        selected |= set(matching) if "*" in name else {name}
    return sorted(selected)


def has_fused_experts(base: torch.nn.Module) -> bool:
    """Return whether the model holds the weights of all experts of a layer in one tensor, which is no layer."""
    return any(name.endswith(".gate_up_proj") for name, _ in base.named_parameters())


def _all_linear(base: torch.nn.Module) -> str | list[str]:
    """Return PEFT's all-linear for a dense model; for a MoE model the names of the layers that it should select.

    An adapted router would send tokens to other experts than those that the base model learned to use.
    """
    linear = [name for name, module in base.named_modules() if isinstance(module, LINEAR_LAYERS)]
    is_fused = has_fused_experts(base)
    excluded = ROUTER_NAMES | (EXPERT_NAMES if is_fused else set())
    head = base.get_output_embeddings()
    selected = [
        name for name in linear if excluded.isdisjoint(name.split(".")) and base.get_submodule(name) is not head
    ]
    is_dense = not is_fused and len(selected) == len(linear) - isinstance(head, LINEAR_LAYERS)
    return ALL_LINEAR if is_dense else sorted(selected)


def _compute_magnitudes_in_fp32(model: PeftModel) -> None:
    """Replace DoRA's initial magnitudes, which PEFT computes in the base model's dtype.

    Rounded to bf16 they would differ by up to 0.3 % from the norms of the weights, and the untrained adapter would
    change the model's output. Raises ConfigInvalid if a norm is 0: DoRA divides by it.
    """
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and module.lora_magnitude_vector:
            weight = module.get_base_layer().weight.detach().float()
            magnitude = torch.linalg.norm(weight, dim=1 if isinstance(module.get_base_layer(), torch.nn.Linear) else 0)
            if not magnitude.all():
                raise ConfigInvalid(
                    f"train.lora: {int((magnitude == 0).sum())} rows of {name} are zero, and DoRA divides by their "
                    "norm: remove this layer from targetModules or set variant to lora"
                )
            module.lora_magnitude_vector["default"].weight.data = magnitude


def linear_layer_names(base: torch.nn.Module) -> str:
    """Return a sentence with the names of the model's linear layers, without their parents' names."""
    linear = {name.rpartition(".")[2] for name, module in base.named_modules() if isinstance(module, LINEAR_LAYERS)}
    return f"the model's linear layers are {', '.join(sorted(linear))}"


def adapter_config(model: PeftModel) -> bytes:
    """Return the bytes of adapter_config.json, which are the same for the same adapter in any process."""
    values: dict[str, Any] = model.peft_config["default"].to_dict() | {"inference_mode": True}
    # The order of a set of strings differs between processes.
    sorted_values = {name: sorted(value) if isinstance(value, set) else value for name, value in values.items()}
    return (json.dumps(sorted_values, indent=2, sort_keys=True) + "\n").encode()


def save_tensors(tensors: Tensors, path: Path) -> None:
    """Write a safetensors file; raise OSError if that fails."""
    try:
        save_file(tensors, os.fspath(path), metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from error
    path.chmod(FILE_MODE)


def copy_to_cpu(tensors: Tensors) -> Tensors:
    """Return copies of the tensors in CPU memory, which training does not write to."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
