"""The loss on the validation rows, which training never sees."""

from collections.abc import Callable

import numpy as np
import torch

from finetune_trainer.data.packing import PackedRows
from finetune_trainer.training.batches import batches
from finetune_trainer.training.model import TrainedModel
from finetune_trainer.training.ranks import Ranks
from finetune_trainer.training.state import State


class Validator:
    """Decides when a validation is due and computes its loss."""

    def __init__(self, rows: PackedRows, batch_size: int, every_steps: int | None, last_step: int) -> None:
        self._rows, self._batch_size = rows, batch_size
        self._every, self._last_step = every_steps, last_step

    def should_validate(self, state: State) -> bool:
        """Return whether a validation is due at this step boundary and has not run yet."""
        if not len(self._rows) or state.step in {0, state.validated_step}:
            return False
        return state.step == self._last_step or (self._every is not None and state.step % self._every == 0)

    def loss(self, model: TrainedModel, ranks: Ranks, raise_if_stop_requested: Callable[[], None]) -> float:
        """Return the mean cross-entropy per target over all validation rows; uses no random numbers."""
        loss_sum, targets = 0.0, 0
        model.model.eval()
        try:
            with torch.no_grad():
                indices = np.arange(len(self._rows))
                for batch in batches(self._rows, indices, self._batch_size, flat=model.is_flat, ranks=ranks):
                    raise_if_stop_requested()
                    loss_sum += model.loss_sum(batch).item()
                    targets += len(batch.targets)
        finally:
            model.model.train()
        loss_sum, all_targets = ranks.sum(loss_sum, targets)
        return loss_sum / max(1, all_targets)
