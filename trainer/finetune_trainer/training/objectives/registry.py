"""The objectives of training: their losses, and the examples that these sum over.

A new objective is a class and a line in OBJECTIVES, besides its name in the contract and the shapes of its records in
`data.records`.
"""

from collections.abc import Iterator

import torch
from typing_extensions import override

from finetune_trainer.contract import Objective as Name
from finetune_trainer.contract import TrainRecipe
from finetune_trainer.data.packing.rows import PackedRows
from finetune_trainer.data.sampling import Indices
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.training.batches import Batch, batches
from finetune_trainer.training.distributed.ranks import ALONE, Ranks
from finetune_trainer.training.model.model import TrainedModel
from finetune_trainer.training.objectives.base import Objective
from finetune_trainer.training.objectives.dpo import PreferenceOptimization


class SupervisedFineTuning(Objective):
    """The cross-entropy per target of the completions; an example is a row."""

    @override
    def batches(
        self, examples: Indices, *, flat: bool, ranks: Ranks = ALONE
    ) -> Iterator[Batch]:
        return batches(
            self.rows, examples, self._recipe.micro_batch_size, flat=flat, ranks=ranks
        )

    @override
    def sums(self, model: TrainedModel, batch: Batch) -> torch.Tensor:
        return model.loss_sum(batch).view(1)


OBJECTIVES: dict[Name, type[Objective]] = {
    "SFT": SupervisedFineTuning,
    "DPO": PreferenceOptimization,
}
"""By the name in `train.objective`."""


def objective_of(recipe: TrainRecipe, rows: PackedRows) -> Objective:
    """Return the recipe's objective on these rows; raise ConfigInvalid if they were prepared for another objective."""
    objective = OBJECTIVES[recipe.objective](rows, recipe)
    if rows.pairs != (objective.rows_per_example > 1):
        kind = "pairs" if rows.pairs else "no pairs"
        raise ConfigInvalid(
            f"train.objective is {recipe.objective}, but the rows of prepare are {kind}: "
            "run prepare with the same objective"
        )
    return objective
