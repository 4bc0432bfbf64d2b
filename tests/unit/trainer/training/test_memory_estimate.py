"""The estimated memory of a training is near what a real step takes, and each part is what it says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainer.models import make_tiny_model

from finetune_trainer.contract import TrainRecipe
from finetune_trainer.contract.memory import MemoryEstimate
from finetune_trainer.models.base_model import BaseModel
from finetune_trainer.models.loading import load_base
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.training.batches import Batch
from finetune_trainer.training.memory_estimate import estimate_memory
from finetune_trainer.training.methods.lora import trainable_adapter
from finetune_trainer.training.methods.trainable import Trainable, WeightsFormat
from finetune_trainer.training.model.model import TrainedModel
from finetune_trainer.training.optimizer import create_optimizer
from finetune_trainer.training.simulated_memory import PeakBytes, bytes_of

LENGTH = 256
CPU = torch.device("cpu")
MARGIN = 0.1
"""Largest difference from what is measured: real attention has a mask on a CPU, and the model keeps small tensors."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("model") / "model", hidden=128, layers=4, vocabulary=320
    )


def recipe_of(**fields: Any) -> TrainRecipe:
    return TrainRecipe.model_validate({"dtype": "FP32", "microBatchSize": 4, **fields})


def estimate(model: Path, recipe: TrainRecipe) -> MemoryEstimate:
    return estimate_memory(BaseModel(f"file://{model}", model, ""), recipe, LENGTH)


def rows(recipe: TrainRecipe) -> Batch:
    """Return a micro-batch of full rows."""
    count = recipe.micro_batch_size * (2 if recipe.objective == "DPO" else 1)
    tokens = torch.randint(3, 300, (count, LENGTH))
    positions = torch.arange(LENGTH).repeat(count, 1)
    targets = torch.arange(count * LENGTH).view(count, LENGTH)[:, :-1].reshape(-1)
    return Batch(
        tokens,
        positions,
        targets,
        tokens.reshape(-1)[targets + 1],
        tokens.numel(),
        tokens < 0,
    )


def real_trainable(model: Path, recipe: TrainRecipe) -> Trainable:
    base = load_base(model, torch.float32)
    if recipe.method == "Full":
        return Trainable(base.requires_grad_(True), {}, WeightsFormat("", {}))
    source: Any = type("Source", (), {"uri": "", "revision": None})()
    return trainable_adapter(base, recipe.adapter, source, 0)


def measured(model: Path, recipe: TrainRecipe) -> int:
    """Return the most bytes of a real step, with weights, gradients and the optimizer's state."""
    trained = TrainedModel(real_trainable(model, recipe), CPU, recipe)
    trained.model.train()
    optimizer = create_optimizer(recipe.optimizer, trained.trainable)
    weights = bytes_of([*trained.model.parameters(), *trained.model.buffers()])
    peak = PeakBytes()
    peak.exclude([*trained.model.parameters(), *trained.model.buffers()])
    with peak:
        trained.loss_sum(rows(recipe)).backward()
        optimizer.step(1e-4)
        for parameter in trained.trainable.values():
            parameter.grad = None
        peak.peak = peak.current
        trained.loss_sum(rows(recipe)).backward()
    return weights + peak.peak


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "LoRA"},
        {"method": "Full"},
        {"method": "LoRA", "gradientCheckpointing": True},
        {"method": "Full", "objective": "DPO", "microBatchSize": 2},
    ],
    ids=str,
)
def test_estimate_is_near_a_real_step(model, fields):
    recipe = recipe_of(**fields)
    ratio = estimate(model, recipe).total / measured(model, recipe)
    print(f"{fields}: estimate / measured = {ratio:.3f}")
    assert 1 - MARGIN < ratio < 1 + MARGIN


def test_parts_are_counted_by_their_shapes(model):
    full = estimate(model, recipe_of(method="Full"))
    # FP32: 4 bytes for a weight, as many for its gradient, and twice as many for the moments.
    assert full.trained_weights == full.gradients == 4 * full.parameters
    assert full.trained_parameters == full.parameters
    assert full.optimizer == pytest.approx(8 * full.parameters, rel=0.01)
    lora = estimate(model, recipe_of(method="LoRA", dtype="BF16"))
    assert lora.frozen_weights == pytest.approx(2 * lora.parameters, rel=0.01)
    assert lora.trained_weights == 4 * lora.trained_parameters


def test_larger_batches_and_longer_rows_take_more(model):
    base = estimate(model, recipe_of()).activations
    twice = estimate(model, recipe_of(microBatchSize=8)).activations
    checkpointed = estimate(model, recipe_of(gradientCheckpointing=True)).activations
    assert base
    assert twice
    assert checkpointed
    assert twice == pytest.approx(2 * base, rel=0.1)
    assert checkpointed < 0.7 * base


def test_qlora_has_frozen_weights_of_four_bits(model):
    plain = estimate(model, recipe_of(method="LoRA", dtype="BF16"))
    quantized = estimate(model, recipe_of(method="QLoRA", dtype="BF16"))
    assert quantized.frozen_weights < 0.5 * plain.frozen_weights
    assert quantized.trained_weights == plain.trained_weights


def test_sharded_weights_are_divided_by_the_processes(model):
    fields = {"method": "Full", "processesPerNode": 4}
    whole = estimate(model, recipe_of(**fields))
    shard = estimate(model, recipe_of(**fields, parallelism="FSDP"))
    assert shard.trained_weights == whole.trained_weights // 4
    assert shard.activations == whole.activations


def test_start_without_a_rank_is_not_known(model):
    recipe = recipe_of(startFrom={"uri": "adapter"})
    with pytest.raises(ConfigInvalid, match=r"write its rank under train\.lora"):
        estimate(model, recipe)
