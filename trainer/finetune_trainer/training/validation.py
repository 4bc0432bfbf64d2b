"""The loss on the validation examples, which training never sees."""

from collections.abc import Callable

import numpy as np
import torch

from finetune_trainer.training.distributed.ranks import Ranks
from finetune_trainer.training.model.model import TrainedModel
from finetune_trainer.training.objectives.base import Objective
from finetune_trainer.training.state import State


class Validator:
    """Decides when a validation is due and computes its loss and metrics."""

    def __init__(
        self, objective: Objective, every_steps: int | None, last_step: int
    ) -> None:
        self._objective = objective
        self._every = every_steps
        self._last_step = last_step

    @property
    def has_examples(self) -> bool:
        """Whether there is anything to validate with."""
        return len(self._objective) > 0

    def should_validate(self, state: State) -> bool:
        """Return whether a validation is due at this step boundary and has not run yet."""
        if not self.has_examples or state.step in {0, state.validated_step}:
            return False
        return state.step == self._last_step or (
            self._every is not None and state.step % self._every == 0
        )

    def means(
        self,
        model: TrainedModel,
        ranks: Ranks,
        raise_if_stop_requested: Callable[[], None],
    ) -> dict[str, float]:
        """Return the loss over all validation examples and the objective's metrics; uses no random numbers."""
        sums = [0.0] * (1 + len(self._objective.metrics))
        weight = 0
        everything = np.arange(len(self._objective))
        # Without dropout, so that the loss depends on the weights alone.
        model.model.eval()
        try:
            with torch.no_grad():
                for batch in self._objective.batches(
                    everything, flat=model.is_flat, ranks=ranks
                ):
                    raise_if_stop_requested()
                    batch_sums: list[float] = self._objective.sums(
                        model, batch
                    ).tolist()
                    sums = [
                        total + value
                        for total, value in zip(sums, batch_sums, strict=True)
                    ]
                    weight += batch.weight
        finally:
            model.model.train()
        *all_sums, all_weight = ranks.sum(*sums, weight)
        return self._objective.means(all_sums, int(all_weight))
