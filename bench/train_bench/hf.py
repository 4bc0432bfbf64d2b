"""HF's Trainer, as bench/train.py runs it: without shuffling, so that it sees our rows in our order."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from finetune_trainer.models.base_model import BaseModel
from finetune_trainer.training.batches import StepSampler
from finetune_trainer.training.methods.registry import load_trainable
from train_bench.benchmark import BATCH, PAUSES_EVERY, PAUSES_RANK, Benchmark
from train_bench.measuring import CLOCKS, Pause, timed


class StepTimesCallback(TrainerCallback):  # type: ignore[misc]  # a library without types
    """Records the time at the end of each step."""

    def __init__(self, clock: str) -> None:
        self.clock = clock
        self.ends: list[float] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        """Record the time."""
        self.ends.append(CLOCKS[self.clock]())


class InOrder(Trainer):  # type: ignore[misc]  # a library without types
    """HF's Trainer without shuffling."""

    def _get_train_sampler(self, *_: object) -> None:
        return None


def train(benchmark: Benchmark, **changes: Any) -> list[float]:
    """Train with HF's Trainer; return the times at which the steps ended."""
    return train_with(
        benchmark,
        lambda **arguments: InOrder(data_collator=stack_rows, **arguments),
        TrainingArguments,
        **changes,
    )


def pauses(benchmark: Benchmark) -> tuple[list[float], list[Pause]]:
    """Return the times at which the steps ended, and each of HF's checkpoints."""
    return pauses_of(train, InOrder, benchmark)


def pauses_of(
    train: Callable[..., list[float]], trainer: type[Trainer], benchmark: Benchmark
) -> tuple[list[float], list[Pause]]:
    """Return the times at which steps ended of HF's trainer or a subclass, and the checkpoints with all it adds."""
    checkpoints: list[Pause] = []
    with timed(trainer, "_save_checkpoint", checkpoints):
        return train(
            benchmark, rank=PAUSES_RANK, save_strategy="steps", save_steps=PAUSES_EVERY
        ), checkpoints


def train_with(
    benchmark: Benchmark,
    make: Callable[..., Trainer],
    arguments: type[TrainingArguments],
    rank: int = 16,
    **changes: Any,
) -> list[float]:
    """Train with HF's Trainer or a subclass, on our model and rows; return the times at which the steps ended."""
    config = benchmark.config("theirs", rank=rank)
    steps = config.recipe.max_steps
    assert steps
    model = load_trainable(
        BaseModel("model", benchmark.model, ""), config, torch.device("cpu")
    ).module
    examples = (
        len(benchmark.rows) // 2
        if benchmark.options.objective == "DPO"
        else len(benchmark.rows)
    )
    sampler = StepSampler.of(config.recipe, examples, 0)
    order = np.concatenate([sampler.rows_for_step(step) for step in range(steps)])
    times = StepTimesCallback(benchmark.options.clock)
    settings = {
        "output_dir": str(benchmark.folder / "theirs"),
        "max_steps": steps,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "bf16": benchmark.options.dtype == "BF16",
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 500,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
    }
    trainer = make(
        model=model,
        args=arguments(**(settings | changes)),
        train_dataset=[record(benchmark, example) for example in order],
        callbacks=[times],
    )
    for parameter in model.parameters():
        if (
            parameter.requires_grad
        ):  # TRL has rounded them to bf16 beside a base model in 4 bits
            parameter.data = parameter.data.float()
    trainer.train()
    return times.ends


def record(benchmark: Benchmark, example: int) -> dict[str, Any]:
    """Return one of our examples in the format that HF's and TRL's trainers expect."""
    if benchmark.options.objective == "DPO":
        read = benchmark.rows.read([2 * example, 2 * example + 1])
        prompt = int(np.argmax(read.loss_mask[0] != 0))
        chosen, rejected = (tokens.tolist() for tokens in read.tokens)
        return {
            "prompt_ids": chosen[:prompt],
            "chosen_ids": chosen[prompt:],
            "rejected_ids": rejected[prompt:],
        }
    read = benchmark.rows.read([example])
    tokens = torch.from_numpy(read.tokens[0].astype(np.int64))
    labels = tokens.masked_fill(torch.from_numpy(read.loss_mask[0] == 0), -100)
    return {
        "input_ids": tokens,
        "labels": labels,
        "position_ids": torch.from_numpy(read.positions[0]),
    }


def stack_rows(records: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch of rows, which all have the same length."""
    return {
        name: torch.stack([record[name] for record in records]) for name in records[0]
    }
