"""Which rows a step sees, and what of them the model is asked to predict.

The order is a function of the seed and of a row's place in the whole course of training, so there is no
loader whose position would have to be saved.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from finetune_trainer.contract import TrainRecipe
from finetune_trainer.data.packing import PackedRows

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Packed rows as tensors; B rows of L tokens of which N are to be predicted."""

    tokens: torch.Tensor
    """[B, L] int64."""
    positions: torch.Tensor
    """[B, L] int64, 0 at the first token of every document."""
    target_positions: torch.Tensor
    """[N] int64: places in the flattened [B * L] whose next token counts."""
    targets: torch.Tensor
    """[N] int64: those next tokens."""
    size: int
    """Tokens without padding."""

    def to(self, device: torch.device) -> "Batch":
        """Give the same batch on a device."""
        return Batch(
            self.tokens.to(device),
            self.positions.to(device),
            self.target_positions.to(device),
            self.targets.to(device),
            self.size,
        )


def load_batch(rows: PackedRows, chosen: Rows) -> Batch:
    """Read rows by index."""
    tokens, positions, counted = rows.tokens[chosen], rows.positions[chosen], rows.loss_mask[chosen]
    follows = np.zeros(tokens.shape, dtype=bool)
    # Nothing may be asked to predict the next document's first token.
    follows[:, :-1] = (counted[:, 1:] != 0) & (positions[:, 1:] != 0)
    predicting = np.flatnonzero(follows)
    padding = (tokens == rows.pad_token_id) & (counted == 0)
    size = tokens.size - int(np.logical_and.accumulate(padding[:, ::-1], axis=1).sum())
    return Batch(
        tokens=torch.from_numpy(tokens.astype(np.int64)),
        positions=torch.from_numpy(positions.astype(np.int64)),
        target_positions=torch.from_numpy(predicting),
        targets=torch.from_numpy(tokens.reshape(-1)[predicting + 1].astype(np.int64)),
        size=size,
    )


def batches(rows: PackedRows, chosen: Rows, batch_size: int) -> Iterator[Batch]:
    """Read rows by index, so many at a time."""
    for start in range(0, len(chosen), batch_size):
        yield load_batch(rows, chosen[start : start + batch_size])


@dataclass(frozen=True)
class StepSampler:
    """The rows of every optimizer step.

    One permutation follows another without regard to where a step ends, so a step may reach from one pass
    over the rows into the next, no row is ever left over, and `epochs` times the number of rows is exactly
    what is seen. Only the very last step may be smaller than the others.
    """

    rows: int
    seed: int
    rows_per_step: int
    samples: int
    """Rows seen from the first step to the last."""

    @classmethod
    def of(cls, recipe: TrainRecipe, rows: int, seed: int) -> "StepSampler":
        """Lay out the course that a recipe asks for."""
        per_step = recipe.batch_size * recipe.gradient_accumulation
        passes = recipe.effective_epochs()
        samples = (recipe.max_steps or 0) * per_step if passes is None else max(1, round(passes * rows))
        return cls(rows, seed, per_step, samples)

    @property
    def steps(self) -> int:
        """Optimizer steps in all."""
        return math.ceil(self.samples / self.rows_per_step)

    def rows_for_step(self, step: int) -> Rows:
        """Give the rows of the step that follows `step` finished ones."""
        first = step * self.rows_per_step
        places = np.arange(first, min(first + self.rows_per_step, self.samples))
        epochs, within = np.divmod(places, self.rows)
        return np.array(
            [permutation(self.rows, self.seed, int(e))[w] for e, w in zip(epochs, within, strict=True)], dtype=np.int64
        )


@lru_cache(maxsize=2)
def permutation(rows: int, seed: int, epoch: int) -> Rows:
    """Give the order of the rows in one epoch.

    Sorted by the raw stream of Philox (Salmon et al. 2011), which numpy promises to keep; it does not
    promise that for its own permutations.
    """
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(rows), kind="stable").astype(np.int64)
