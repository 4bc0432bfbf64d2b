"""The trainers of HF and TRL without shuffling, so that they see our rows in our order."""

import torch
from datasets import Dataset
from transformers import Trainer, TrainerCallback
from trl import DPOTrainer, SFTTrainer

from train_bench.measuring import CLOCKS


class StepTimesCallback(TrainerCallback):
    """Records the time at the end of each step of HF's and TRL's trainers."""

    def __init__(self, clock: str) -> None:
        self.clock = clock
        self.ends: list[float] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        """Record the time."""
        self.ends.append(CLOCKS[self.clock]())


def stack_rows(records: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch of rows, which all have the same length."""
    return {name: torch.stack([record[name] for record in records]) for name in records[0]}


class InOrder(Trainer):
    """HF's Trainer without shuffling, so that it sees our rows in our order."""

    def _get_train_sampler(self, *_: object) -> None:
        return None


class InOrderSFT(SFTTrainer):
    """TRL's SFTTrainer without shuffling."""

    def _get_train_sampler(self, *_: object) -> None:
        return None


class InOrderDPO(DPOTrainer):
    """TRL's DPOTrainer without shuffling, on tokens."""

    def _get_train_sampler(self, *_: object) -> None:
        return None

    def _prepare_dataset(self, dataset: Dataset, *_: object) -> Dataset:
        return dataset
