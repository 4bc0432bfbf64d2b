"""The loss on rows that training never sees."""

import math
from collections.abc import Callable

import numpy as np
import torch

from finetune_trainer.data.packing import PackedRows
from finetune_trainer.runtime.errors import StageError
from finetune_trainer.training.batches import batches
from finetune_trainer.training.model import AdaptedModel
from finetune_trainer.training.state import State


class Validator:
    """Measures the validation loss when it is time to."""

    def __init__(self, rows: PackedRows, batch_size: int, every_steps: int | None, last_step: int) -> None:
        self._rows, self._batch_size = rows, batch_size
        self._every, self._last_step = every_steps, last_step

    def should_validate(self, state: State) -> bool:
        """Say whether this boundary wants a validation and has not had it."""
        if not len(self._rows) or state.step in {0, state.validated_step}:
            return False
        return state.step == self._last_step or (self._every is not None and state.step % self._every == 0)

    def loss(self, model: AdaptedModel, stop_if_asked: Callable[[], None]) -> float:
        """Give the mean nats per counted token over all validation rows; draws no random number."""
        nats, counted = 0.0, 0
        model.model.eval()
        try:
            with torch.inference_mode():
                for batch in batches(self._rows, np.arange(len(self._rows)), self._batch_size):
                    stop_if_asked()
                    nats += model.loss_sum(batch).item()
                    counted += len(batch.targets)
        finally:
            model.model.train()
        if not math.isfinite(nats):
            raise StageError("the validation loss is not finite: lower train.optimizer.learningRate or use fp32")
        return nats / max(1, counted)
