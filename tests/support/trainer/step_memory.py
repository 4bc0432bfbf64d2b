"""Trains a few steps in this process, and prints their memory: `python step_memory.py MODEL RECIPE LENGTH`.

The memory is the peak of this process, without what it had before the model was loaded.
"""

import json
import sys
from pathlib import Path

import torch

from finetune_trainer.contract import ModelSource, TrainConfig, TrainRecipe
from finetune_trainer.contract.recipes import Checkpoint
from finetune_trainer.models.base_model import BaseModel
from finetune_trainer.training.batches import Batch
from finetune_trainer.training.methods.registry import load_trainable
from finetune_trainer.training.model.model import TrainedModel
from finetune_trainer.training.optimizer import create_optimizer

STEPS = 2
"""The optimizer has its state from the second step on."""
CPU = torch.device("cpu")


def kibibytes(name: str) -> int:
    """Return a size of this process that the kernel knows, such as VmHWM, its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0])
    raise KeyError(name)


def warm_up() -> None:
    """Multiply once, so that the threads and the buffers of PyTorch exist before memory is measured."""
    weight = torch.ones(256, 256, requires_grad=True)
    (torch.ones(256, 256) @ weight).sum().backward()


def full_rows(rows: int, length: int) -> Batch:
    tokens = torch.randint(3, 300, (rows, length))
    positions = torch.arange(length).repeat(rows, 1)
    predicting = torch.arange(rows * length).view(rows, length)[:, :-1].reshape(-1)
    targets = tokens.reshape(-1)[predicting + 1]
    return Batch(tokens, positions, predicting, targets, tokens.numel(), tokens < 0)


def main() -> None:
    model = Path(sys.argv[1])
    recipe = TrainRecipe.model_validate_json(sys.argv[2])
    config = TrainConfig(
        identity="a" * 16,
        prepare="p" * 16,
        model=ModelSource(uri="model"),
        recipe=recipe,
        checkpoint=Checkpoint(),
    )
    warm_up()
    before = kibibytes("VmRSS")
    trainable = load_trainable(BaseModel("model", model, ""), config, CPU)
    trained = TrainedModel(trainable, CPU, recipe)
    trained.model.train()
    optimizer = create_optimizer(recipe.optimizer, trained.trainable)
    batch = full_rows(recipe.micro_batch_size, int(sys.argv[3]))
    for _ in range(STEPS):
        trained.loss_sum(batch).backward()
        optimizer.step(1e-4)
        optimizer.optimizer.zero_grad(set_to_none=True)
    print(json.dumps(1024 * (kibibytes("VmHWM") - before)))


if __name__ == "__main__":
    main()
