"""Direct Preference Optimization (Rafailov et al. 2023, arXiv:2305.18290).

The reward of a completion is beta times how much more likely it is under the model than under the reference, as the
difference of their log-probabilities. The loss is minus the log-sigmoid of the chosen completion's reward minus the
rejected completion's. The reference is the model before training. Its log-probabilities are computed once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch.nn.functional import logsigmoid
from typing_extensions import override

from finetune_trainer.data.sampling import Indices
from finetune_trainer.training.batches import Batch, load_batch
from finetune_trainer.training.distributed.ranks import ALONE, Ranks
from finetune_trainer.training.model.model import TrainedModel
from finetune_trainer.training.objectives.base import Objective, Start
from finetune_trainer.training.objectives.reference import (
    LogProbabilities,
    reference_of,
)


@dataclass(frozen=True)
class PairBatch:
    """A micro-batch of pairs: rows 2 i and 2 i + 1 are the chosen and the rejected completion of pair i."""

    rows: Batch
    reference: torch.Tensor
    """[2 pairs] fp32: the log-probability of each row's completion under the reference."""

    @property
    def weight(self) -> int:
        """Number of pairs: the loss of a step is the mean over them."""
        return len(self.reference) // 2

    @property
    def size(self) -> int:
        """Number of tokens without padding."""
        return self.rows.size

    def without_targets(self) -> "PairBatch":
        """Return the batch with nothing to learn from and nothing to count."""
        return PairBatch(self.rows.without_targets(), self.reference[:0])


class PreferenceOptimization(Objective):
    """The DPO loss per pair; with label smoothing, the loss of conservative DPO."""

    metrics: ClassVar[tuple[str, ...]] = (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/margins",
        "rewards/accuracies",
        "logps/chosen",
        "logps/rejected",
    )
    progress: ClassVar[Mapping[str, str]] = {
        "rewards/margins": "reward_margin",
        "rewards/accuracies": "reward_accuracy",
    }
    # The chosen and the rejected completion.
    rows_per_example: ClassVar[int] = 2
    _reference: LogProbabilities

    @override
    def begin(self, start: Start) -> None:
        batch_rows = self.rows_per_example * self._recipe.micro_batch_size
        self._reference = reference_of(start, self.rows, batch_rows, log_probabilities)

    @override
    def batches(
        self, examples: Indices, *, flat: bool, ranks: Ranks = ALONE
    ) -> Iterator[PairBatch]:
        for pairs, counts in ranks.micro_batches(
            examples, self._recipe.micro_batch_size
        ):
            rows = rows_of(pairs)
            batch = PairBatch(
                load_batch(self.rows, rows, flat=flat),
                torch.from_numpy(self._reference[rows]),
            )
            if not counts:
                # The process computes it nevertheless, so that no other process waits for a sum that never comes.
                batch = batch.without_targets()
            yield batch

    @override
    def sums(self, model: TrainedModel, batch: PairBatch) -> torch.Tensor:
        settings = self._recipe.preference
        # Not all rows: a batch of a process without examples has rows, but no reference.
        log_probs = log_probabilities(model, batch.rows)[: len(batch.reference)]
        rewards = settings.beta * (log_probs - batch.reference.to(log_probs.device))
        margins = rewards[::2] - rewards[1::2]
        losses = -(1 - settings.label_smoothing) * logsigmoid(margins)
        losses = losses - settings.label_smoothing * logsigmoid(-margins)
        columns = (
            rewards[::2],
            rewards[1::2],
            margins,
            (margins > 0).float(),
            log_probs[::2],
            log_probs[1::2],
        )
        return torch.stack(
            [losses.sum(), *(column.detach().sum() for column in columns)]
        )


def rows_of(pairs: Indices) -> Indices:
    """Return the indices of the rows of these pairs: of each the chosen and the rejected completion."""
    rows: Indices = np.stack((2 * pairs, 2 * pairs + 1), axis=1).reshape(-1)
    return rows


def log_probabilities(model: TrainedModel, rows: Batch) -> torch.Tensor:
    """Return [rows] in fp32: the log-probability of each row's completion, the sum over its tokens."""
    of_targets = -model.cross_entropy(rows, "none")
    # Each row is summed by itself, so that the sum does not depend on the rows beside it.
    return torch.stack(
        [of_row.sum() for of_row in of_targets.split(rows.targets_per_row)]
    )
