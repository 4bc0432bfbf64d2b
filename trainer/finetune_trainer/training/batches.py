"""The step sampler, which chooses the rows of each step, and the batches built from these rows.

The order of rows is a function of the seed and the step alone. There is no data loader, so a checkpoint holds no
loader position.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from finetune_trainer.contract import TrainRecipe
from finetune_trainer.data.packing.rows import PackedRows
from finetune_trainer.data.sampling import Indices, permutation
from finetune_trainer.training.distributed.ranks import ALONE, Ranks

LENGTH_MULTIPLE = 8
"""Lengths of cut rows are multiples of this, which the matrix units of GPUs are fast for."""


@dataclass(frozen=True)
class Batch:
    """A micro-batch of rows: B rows of L tokens, N of which are targets of the loss.

    A flat batch has a single row: the documents of all rows in their order, without padding.
    """

    tokens: torch.Tensor
    """[B, L] int64."""
    positions: torch.Tensor
    """[B, L] int64, 0 at the first token of every document."""
    target_positions: torch.Tensor
    """[N] int64: indices into the flattened [B * L] whose next token is a target of the loss."""
    targets: torch.Tensor
    """[N] int64: these next tokens."""
    size: int
    """Number of tokens without padding."""
    is_padding: torch.Tensor
    """[B, L] bool: the tokens after a row's last document."""
    documents: "Documents | None" = None
    """The places of the documents in a flat batch; None if the batch is not flat."""

    def without_targets(self) -> "Batch":
        """Return the batch with nothing to learn from and nothing to count."""
        return replace(
            self,
            target_positions=self.target_positions[:0],
            targets=self.targets[:0],
            size=0,
        )

    def doubled(self) -> "Batch":
        """Return the batch with each row twice; only the first copy is learned from and counted."""
        twice = {
            name: getattr(self, name).repeat(2, 1)
            for name in ("tokens", "positions", "is_padding")
        }
        return replace(self, **twice)

    @property
    def weight(self) -> int:
        """Number of targets: the loss of a step is the mean over them."""
        return len(self.targets)

    @property
    def targets_per_row(self) -> list[int]:
        """Numbers of targets of the rows, if each row has a single document."""
        if self.documents is None:
            rows = len(self.tokens)
            row_of = self.target_positions // self.tokens.shape[1]
        else:
            # A flat batch has no rows any more, but each document was a row.
            boundaries = self.documents.boundaries
            rows = len(boundaries) - 1
            row_of = torch.bucketize(self.target_positions, boundaries, right=True) - 1
        return [int(count) for count in torch.bincount(row_of, minlength=rows)]

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device."""
        documents = self.documents
        if documents is not None:
            documents = documents.to(device)
        return Batch(
            self.tokens.to(device),
            self.positions.to(device),
            self.target_positions.to(device),
            self.targets.to(device),
            self.size,
            self.is_padding.to(device),
            documents,
        )


@dataclass(frozen=True)
class Documents:
    """The places of the N documents in a flat batch."""

    boundaries: torch.Tensor
    """[N + 1] int32: the index of each document's first token, and the number of tokens."""
    longest: int
    """Number of tokens of the longest document."""

    @classmethod
    def at(cls, positions: NDArray[Any]) -> "Documents":
        """Return the documents of tokens with these positions, 0 at the first token of every document."""
        starts = np.flatnonzero(positions.reshape(-1) == 0)
        # The attention kernel takes boundaries in int32 only.
        boundaries = np.append(starts, positions.size).astype(np.int32)
        return cls(torch.from_numpy(boundaries), int(np.diff(boundaries).max()))

    def to(self, device: torch.device) -> "Documents":
        """Return them with the boundaries on a device."""
        return Documents(self.boundaries.to(device), self.longest)


def load_batch(
    rows: PackedRows, indices: Iterable[int] | Indices, *, flat: bool = False
) -> Batch:
    """Read the rows with these indices; raise DataInvalid if a row is corrupt.

    Rows with a single document each are cut to the longest document, so that little is computed for padding.
    """
    read = rows.read(indices)
    if flat:
        read = read.flattened()
    elif not rows.packed:
        read = read.cut(cut_length(int(read.lengths.max()), rows.context_length))
    # PyTorch's cross-entropy takes targets in int64 only.
    tokens = read.tokens.astype(np.int64)
    positions = read.positions
    predicts = np.zeros(tokens.shape, dtype=bool)
    # A document's last token must not predict the first token of the next document (position 0).
    predicts[:, :-1] = (read.loss_mask[:, 1:] != 0) & (positions[:, 1:] != 0)
    target_positions = np.flatnonzero(predicts)
    return Batch(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        target_positions=torch.from_numpy(target_positions),
        targets=torch.from_numpy(tokens.reshape(-1)[target_positions + 1]),
        size=int(read.lengths.sum()),
        is_padding=torch.from_numpy(read.is_padding),
        documents=Documents.at(positions) if flat else None,
    )


def cut_length(longest: int, context_length: int) -> int:
    """Return the length of rows whose longest document has `longest` tokens: the next multiple of LENGTH_MULTIPLE."""
    return min(-(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, context_length)


def batches(
    rows: PackedRows,
    indices: Indices,
    batch_size: int,
    *,
    flat: bool = False,
    ranks: Ranks = ALONE,
) -> Iterator[Batch]:
    """Yield the rows with these indices in micro-batches of `batch_size`; the last micro-batch may be smaller.

    Several processes take turns, and each gets the same number of micro-batches. If there are too few for a process,
    it gets the first micro-batch without its targets.
    """
    for part, counts in ranks.micro_batches(indices, batch_size):
        batch = load_batch(rows, part, flat=flat)
        if not counts:
            # The process computes it nevertheless, so that no other process waits for a sum that never comes.
            batch = batch.without_targets()
        yield batch


@dataclass(frozen=True)
class StepSampler:
    """The rows of every optimizer step; with an objective on pairs, a row here is a pair.

    Epochs follow each other without a gap: a step may take rows of two epochs, and no row is dropped. Training
    sees exactly `epochs` times the number of rows. Only the very last step may have fewer rows than the others.
    """

    rows: int
    """Number of rows in the training split."""
    seed: int
    rows_per_step: int
    samples: int
    """Rows seen from the first step to the last; a row counts once for every epoch that has it."""

    @classmethod
    def of(cls, recipe: TrainRecipe, rows: int, seed: int) -> "StepSampler":
        """Return the sampler of a recipe."""
        rows_per_step = (
            recipe.micro_batch_size
            * recipe.gradient_accumulation_steps
            * recipe.processes
        )
        epochs = recipe.effective_epochs()
        samples = (recipe.max_steps or 0) * rows_per_step
        if epochs is not None:
            # A fraction of an epoch may round to no row, but a run has a step at least.
            samples = max(1, round(epochs * rows))
        return cls(rows, seed, rows_per_step, samples)

    @property
    def steps(self) -> int:
        """Total number of optimizer steps."""
        return math.ceil(self.samples / self.rows_per_step)

    def rows_for_step(self, step: int) -> Indices:
        """Return the row indices of a step; `step` counts from 0."""
        first = step * self.rows_per_step
        samples = np.arange(first, min(first + self.rows_per_step, self.samples))
        # No generator is kept: a resumed process finds the rows of any step without replaying the steps before it.
        epochs, offsets = np.divmod(samples, self.rows)
        return np.array(
            [
                permutation(self.rows, self.seed, int(e))[i]
                for e, i in zip(epochs, offsets, strict=True)
            ],
            dtype=np.int64,
        )
