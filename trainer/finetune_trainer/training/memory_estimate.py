"""Estimates the memory that a process of a training needs, from config.json: no weights are read, no GPU is used.

Weights, gradients and the optimizer's state are counted by their shapes. A step is run on fake tensors, which have
shapes and no memory: the same model, adapter and loss as in training, with each row full and learned in full.
"""

from collections.abc import Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO

import torch
from peft.tuners.lora import LoraLayer
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface

from finetune_trainer.contract import ModelSource, TrainRecipe
from finetune_trainer.contract.memory import MemoryEstimate
from finetune_trainer.models.base_model import BaseModel
from finetune_trainer.models.loading import DTYPES
from finetune_trainer.models.structure import load_structure
from finetune_trainer.models.trained.full_weights import trained_names
from finetune_trainer.runtime.errors import ConfigInvalid, short_reason
from finetune_trainer.training.batches import Batch, Documents
from finetune_trainer.training.methods.lora import trainable_adapter
from finetune_trainer.training.methods.trainable import Trainable, WeightsFormat
from finetune_trainer.training.model.model import TrainedModel
from finetune_trainer.training.optimizer import create_optimizer
from finetune_trainer.training.simulated_memory import (
    ATTENTION,
    PeakBytes,
    bytes_of,
    simulated_attention,
)

CPU = torch.device("cpu")
QUANTIZED_BLOCK = 64
"""Weights of QLoRA that share a scale of 8 bits."""
SCALES_BLOCK = 256
"""Scales of 8 bits that share a scale of 32 bits."""


@dataclass(frozen=True)
class _Weights:
    """The weights of a training, by what happens to them."""

    frozen: list[torch.Tensor]
    trained: dict[str, torch.nn.Parameter]
    in_4_bits: list[torch.Tensor]
    """The frozen weights that QLoRA quantizes."""


def estimate_memory(
    base: BaseModel, recipe: TrainRecipe, context_length: int
) -> MemoryEstimate:
    """Return the estimate for a process of the training; raise ConfigInvalid if there is no such training."""
    if recipe.start_from and recipe.lora is None:
        raise ConfigInvalid(
            "the adapter that training starts from decides its size: write its rank under train.lora"
        )
    AttentionInterface.register(ATTENTION, simulated_attention)
    try:
        # Libraries may print what they notice.
        with redirect_stdout(StringIO()):
            trainable = _trainable(base, recipe)
    except ConfigInvalid:
        raise
    except Exception as error:
        # A method may need the values of weights, as DoRA does.
        raise ConfigInvalid(
            f"train.method {recipe.method} cannot be simulated: {short_reason(error)}"
        ) from error
    with FakeTensorMode(allow_non_fake_inputs=True):
        _make_fake(trainable.module)
        known = _without_activations(trainable.module, recipe)
        return _with_activations(known, trainable, recipe, context_length)


def _without_activations(
    module: torch.nn.Module, recipe: TrainRecipe
) -> MemoryEstimate:
    """Return the memory of what exists during the whole training."""
    weights = _weights(module, recipe)
    optimizer = create_optimizer(recipe.optimizer, weights.trained)
    state = sum(tensor.nbytes for tensor in optimizer.layout().values())
    trained = bytes_of(weights.trained.values())
    known = MemoryEstimate(
        parameters=sum(p.numel() for p in _base_parameters(module)),
        trained_parameters=sum(p.numel() for p in weights.trained.values()),
        frozen_weights=_frozen_bytes(weights),
        trained_weights=trained,
        gradients=trained,
        optimizer=state,
        copies=trained + state,
        device_bytes=_device_bytes(),
    )
    if recipe.parallelism == "FSDP":
        return _sharded(known, recipe.processes)
    return known


def _trainable(base: BaseModel, recipe: TrainRecipe) -> Trainable:
    """Return the model on the meta device, prepared by the method of training."""
    dtype = torch.float32 if recipe.method == "Full" else DTYPES[recipe.dtype]
    model = load_structure(base.folder, base.uri).to(dtype)
    if recipe.method != "Full":
        source = ModelSource(uri=base.uri)
        with torch.device("meta"):
            return trainable_adapter(model, recipe.adapter, source, seed=0)
    model.requires_grad_(False)
    for name in trained_names(model, base.folder):
        model.get_parameter(name).requires_grad_(True)
    return Trainable(model, {}, WeightsFormat("", {}))


def _make_fake(module: torch.nn.Module) -> None:
    """Replace weights and buffers on the meta device by fake tensors, which have a device and no memory either."""
    replaced: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        weights = part._parameters  # noqa: SLF001  there is no other way to replace a weight that layers share
        for name, weight in weights.items():
            if weight is None:
                continue
            if id(weight) not in replaced:
                fake = torch.empty(weight.shape, dtype=weight.dtype, device=CPU)
                replaced[id(weight)] = torch.nn.Parameter(fake, weight.requires_grad)
            weights[name] = replaced[id(weight)]
        buffers = part._buffers  # noqa: SLF001  as for weights
        for name, buffer in buffers.items():
            if buffer is not None:
                buffers[name] = torch.empty(
                    buffer.shape, dtype=buffer.dtype, device=CPU
                )


def _weights(module: torch.nn.Module, recipe: TrainRecipe) -> _Weights:
    trained = {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    frozen: list[torch.Tensor] = [p for p in module.parameters() if not p.requires_grad]
    frozen += module.buffers()
    in_4_bits: list[torch.Tensor] = []
    if recipe.method == "QLoRA":
        head = module.get_output_embeddings()
        in_4_bits = [
            layer.weight
            for layer in module.modules()
            if isinstance(layer, torch.nn.Linear)
            and layer is not head
            and not layer.weight.requires_grad
        ]
    return _Weights(frozen, trained, in_4_bits)


def _base_parameters(module: torch.nn.Module) -> Iterable[torch.nn.Parameter]:
    """Yield the parameters of the base model, without an adapter's."""
    for name, parameter in module.named_parameters():
        if "lora_" not in name and "modules_to_save" not in name:
            yield parameter


def _frozen_bytes(weights: _Weights) -> int:
    total = bytes_of(weights.frozen)
    for weight in weights.in_4_bits:
        blocks = -(-weight.numel() // QUANTIZED_BLOCK)
        scales = blocks + 4 * -(-blocks // SCALES_BLOCK)
        total += weight.numel() // 2 + scales - weight.nbytes
    return total


def _sharded(known: MemoryEstimate, processes: int) -> MemoryEstimate:
    """Return the estimate for a process of several over which the model is sharded."""
    names = ("frozen_weights", "trained_weights", "gradients", "optimizer")
    return known.model_copy(
        update={name: -(-getattr(known, name) // processes) for name in names}
    )


def _device_bytes() -> int | None:
    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)


def _with_activations(
    known: MemoryEstimate,
    trainable: Trainable,
    recipe: TrainRecipe,
    context_length: int,
) -> MemoryEstimate:
    """Return the estimate with the memory of a simulated step, or with the reason why it cannot be simulated."""
    try:
        activations = _peak_of_step(trainable, recipe, context_length)
    except Exception as error:  # noqa: BLE001  a model may ask a fake tensor for values, and fail in any way
        return known.model_copy(update={"activations_unknown": short_reason(error)})
    if recipe.method == "QLoRA":
        # A layer's weights are computed from their 4 bits when it is used, and then freed.
        sizes = [w.nbytes for w in _weights(trainable.module, recipe).in_4_bits]
        activations += max(sizes, default=0)
    return known.model_copy(update={"activations": activations})


def _peak_of_step(
    trainable: Trainable, recipe: TrainRecipe, context_length: int
) -> int:
    """Return the most bytes that the tensors of a step take, without the gradients that are left at its end."""
    # Both ask for values, and change the memory little.
    plain = recipe.model_copy(update={"compile": False, "neftune_noise_alpha": None})
    model = TrainedModel(trainable, CPU, plain, plain_head=True)
    _use_plain_dropout(model.model)
    model.use_flat_attention(ATTENTION)
    model.model.train()
    rows = recipe.micro_batch_size * (2 if recipe.objective == "DPO" else 1)
    batch = _full_batch(rows, context_length)
    peak = PeakBytes()
    peak.exclude([*model.model.parameters(), *model.model.buffers()])
    with peak:
        # With a second pass the gradients of the first exist from the beginning.
        for _ in range(min(2, recipe.gradient_accumulation_steps)):
            model.loss_sum(batch).backward()
    gradients = [p.grad for p in model.trainable.values() if p.grad is not None]
    return peak.peak - bytes_of(gradients)


def _use_plain_dropout(module: torch.nn.Module) -> None:
    """Replace LoRA's dropout by PyTorch's: the other draws real numbers on a CPU."""
    for layer in module.modules():
        if not isinstance(layer, LoraLayer):
            continue
        for name, dropout in layer.lora_dropout.items():
            if isinstance(dropout, torch.nn.Dropout):
                layer.lora_dropout[name] = torch.nn.Dropout(dropout.p)


def _full_batch(rows: int, length: int) -> Batch:
    """Return a flat micro-batch of full rows, each a document of which each token but the first is learned."""
    tokens = torch.zeros(1, rows * length, dtype=torch.int64)
    count = rows * (length - 1)
    return Batch(
        tokens=tokens,
        positions=torch.zeros_like(tokens),
        target_positions=torch.zeros(count, dtype=torch.int64),
        targets=torch.zeros(count, dtype=torch.int64),
        size=rows * length,
        is_padding=torch.zeros_like(tokens, dtype=torch.bool),
        documents=Documents(torch.zeros(rows + 1, dtype=torch.int32), length),
    )
