"""Log-probabilities of the rows under the model before training, computed once and kept in the stage's folder.

They are in parts of PART_ROWS rows, with a file for each part. A part is written when it is whole, with a checksum. So
a killed process loses a single part at most, and each later process reads the parts that exist and computes the rest.
Which rows share a forward pass depends only on their numbers. So the values are the same wherever a process was killed.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from finetune_trainer.data.packing.rows import PackedRows
from finetune_trainer.data.sampling import Indices
from finetune_trainer.files import write_durably
from finetune_trainer.runtime.progress.activity import activity
from finetune_trainer.runtime.progress.progress import log_line
from finetune_trainer.training.batches import Batch, load_batch
from finetune_trainer.training.determinism import restore_thread_count
from finetune_trainer.training.distributed.ranks import Ranks
from finetune_trainer.training.model.model import TrainedModel
from finetune_trainer.training.non_finite import is_finite, non_finite
from finetune_trainer.training.objectives.base import Start

FOLDER = "reference"
PART_ROWS = 512
"""Rows of a part: a multiple of two, so that no pair is in two parts."""

LogProbabilities = NDArray[np.float32]
Compute = Callable[[TrainedModel, Batch], torch.Tensor]
"""Returns the log-probabilities of a batch's rows [rows] in fp32."""


class Part(BaseModel):
    """The content of a part's file."""

    model_config = ConfigDict(extra="forbid")

    inputs: str
    """Digest of all that determines the values, besides the machine."""
    threads: int = Field(ge=1)
    """Number of threads that computed them."""
    log_probabilities: list[FiniteFloat]
    sha256: str
    """Of the values as little-endian fp32."""

    def values(self) -> LogProbabilities:
        """Return the values."""
        return np.array(self.log_probabilities, dtype="<f4")


def reference_of(
    start: Start, rows: PackedRows, batch_rows: int, compute: Compute
) -> LogProbabilities:
    """Return the log-probability of every row, in forward passes of `batch_rows`; compute missing parts.

    Several processes take turns with the parts, and the first keeps all. With a sharded model, all compute every part.
    Raises Diverged if a value is not finite, and Replaced behind the fence.
    """
    ranks = start.ranks
    values = [np.empty(0, dtype=np.float32)]
    numbers = _numbers_of_parts(len(rows))
    paths = [
        start.folder / FOLDER / f"{rows.split}-{number:05}.json"
        for number in range(len(numbers))
    ]
    # Only the folder of the first process has parts. The others get them by the sums.
    parts = [
        _read(path, start.inputs, len(indices))
        for path, indices in zip(paths, numbers, strict=True)
    ]
    # Missing parts are computed with the thread count of existing parts: another count adds in another order.
    (threads,) = ranks.sum(_threads_of(parts))
    restore_thread_count(str(int(threads)))
    is_in_file = ranks.sum(*(part is not None for part in parts))

    def own(number: int, *, is_mine: bool) -> LogProbabilities:
        """Return this process's summand: a part that it has read or computed, or zeros."""
        zeros = np.zeros(len(numbers[number]), dtype=np.float32)
        part = parts[number]
        if part is not None:
            return part.values()
        if is_in_file[number] or not is_mine:
            return zeros
        progress = f"{numbers[number][0]} of {len(rows)} {rows.split} rows"
        start.progress.update(
            note=f"computing log-probabilities of the reference: {progress}"
        )
        computed = _finite(start.model, rows, numbers[number], batch_rows, compute)
        if ranks.is_sharded and not ranks.is_first:
            # All have computed the same values, and the sum must have them once.
            return zeros
        return computed

    # A pass of a sharded model needs all processes, so they cannot work on different parts.
    turns = 1 if ranks.is_sharded else ranks.size
    for first in range(0, len(numbers), turns):
        group = range(first, min(first + turns, len(numbers)))
        owned = [
            own(number, is_mine=number % turns == ranks.rank % turns)
            for number in group
        ]
        for number, summed in zip(group, _summed(owned, ranks), strict=True):
            values.append(summed)
            # The first process alone writes, as it does with checkpoints, and behind the fence.
            if ranks.is_first and not is_in_file[number]:
                content = _part(start.inputs, summed).model_dump_json().encode()
                write_durably(paths[number], content, start.fence.check)
    return np.concatenate(values)


def _numbers_of_parts(rows: int) -> list[Indices]:
    """Return the numbers of the rows of each part."""
    return [
        np.arange(first, min(first + PART_ROWS, rows))
        for first in range(0, rows, PART_ROWS)
    ]


def _threads_of(parts: list[Part | None]) -> int:
    """Return the thread count of the first part; 0 if there is none."""
    for part in parts:
        if part is not None:
            return part.threads
    return 0


def _summed(arrays: list[LogProbabilities], ranks: Ranks) -> list[LogProbabilities]:
    """Return the sums of all processes' arrays; only one process has other values than 0 for each number."""
    total = np.array(ranks.sum(*np.concatenate(arrays).tolist()), dtype=np.float32)
    return np.split(total, np.cumsum([len(array) for array in arrays])[:-1])


def _part(inputs: str, values: LogProbabilities) -> Part:
    return Part(
        inputs=inputs,
        threads=torch.get_num_threads(),
        log_probabilities=[float(value) for value in values],
        sha256=_digest(values),
    )


def _digest(values: LogProbabilities) -> str:
    return hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()


def _read(path: Path, inputs: str, count: int) -> Part | None:
    """Return a part, or None if there is none for these inputs; log a part that is damaged."""
    try:
        part = Part.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        log_line(
            f"train: {path.parent.name}/{path.name} cannot be read, and is computed again: {error}"
        )
        return None
    if (
        part.inputs == inputs
        and len(part.log_probabilities) == count
        and part.sha256 == _digest(part.values())
    ):
        return part
    log_line(
        f"train: {path.parent.name}/{path.name} is corrupt or of another training, and is computed again"
    )
    return None


def _finite(
    model: TrainedModel,
    rows: PackedRows,
    indices: Indices,
    batch_rows: int,
    compute: Compute,
) -> LogProbabilities:
    """Return the values of these rows; raise as a step of training does if a value is not finite."""
    values = _computed(model, rows, indices, batch_rows, compute)
    total = float(values.sum())
    if not is_finite(total):
        again = float(_computed(model, rows, indices, batch_rows, compute).sum())
        raise non_finite(
            "before the first step",
            "the reference's log-probability is {}",
            (total,),
            (again,),
        )
    return values


def _computed(
    model: TrainedModel,
    rows: PackedRows,
    indices: Indices,
    batch_rows: int,
    compute: Compute,
) -> LogProbabilities:
    # Dropout is off: the reference is the model itself, not a random part of it.
    model.model.eval()
    values = []
    with torch.no_grad():
        for first in range(0, len(indices), batch_rows):
            activity.report()
            batch = load_batch(
                rows, indices[first : first + batch_rows], flat=model.is_flat
            )
            values.append(compute(model, batch).float().cpu().numpy())
    return np.concatenate(values)
