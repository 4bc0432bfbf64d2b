"""What every objective of training has: its examples, their micro-batches, and the sums of which a step is the mean."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from finetune_trainer.contract import TrainRecipe
from finetune_trainer.data.packing.rows import PackedRows
from finetune_trainer.data.sampling import Indices
from finetune_trainer.runtime.fence import UNFENCED, Fence
from finetune_trainer.runtime.progress.progress import ProgressReporter
from finetune_trainer.training.distributed.ranks import ALONE, Ranks
from finetune_trainer.training.model.model import TrainedModel

LOSS = "loss"


class MicroBatch(Protocol):
    """The examples of a single forward pass."""

    @property
    def weight(self) -> int:
        """What the loss is a mean over: the number of targets, or of pairs."""

    @property
    def size(self) -> int:
        """Number of tokens without padding."""


@dataclass(frozen=True)
class Start:
    """What an objective may use before the first step, when the model is as it is before training."""

    model: TrainedModel
    folder: Path
    """The stage's folder."""
    inputs: str
    """Digest of all that determines what the model computes for the rows."""
    progress: ProgressReporter
    ranks: Ranks = ALONE
    fence: Fence = UNFENCED


class Objective(ABC):
    """The loss that training minimises, over the examples of a single split."""

    metrics: ClassVar[tuple[str, ...]] = ()
    """Names of the metrics besides the loss, each a mean over the weight of a step."""
    progress: ClassVar[Mapping[str, str]] = {}
    """Which of them are fields of Progress: the metric's name -> the field's."""
    rows_per_example: ClassVar[int] = 1

    def __init__(self, rows: PackedRows, recipe: TrainRecipe) -> None:
        self.rows = rows
        self._recipe = recipe

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.rows) // self.rows_per_example

    def begin(self, start: Start) -> None:  # noqa: B027  an objective may need nothing
        """Compute what is needed of the model before training; each process of a training calls this."""

    @abstractmethod
    def batches(self, examples: Indices, *, flat: bool, ranks: Ranks) -> Iterator[Any]:
        """Yield the share of this process in these examples, in micro-batches of the recipe's size.

        The last micro-batch may be smaller. All processes get the same number: an additional micro-batch has no weight.
        """

    @abstractmethod
    def sums(self, model: TrainedModel, batch: Any) -> torch.Tensor:
        """Return [1 + metrics] in fp32: the loss summed over a micro-batch, and the metrics, without a gradient."""

    def means(self, sums: Sequence[float], weight: int) -> dict[str, float]:
        """Return loss and metrics by name, from their sums over examples of this weight."""
        # A mean of the micro-batches' means would weigh their targets unequally.
        return {
            name: value / max(1, weight)
            for name, value in zip((LOSS, *self.metrics), sums, strict=True)
        }

    def progress_of(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics that are fields of Progress."""
        return {field: means[name] for name, field in self.progress.items()}
