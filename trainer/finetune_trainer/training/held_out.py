"""The loss of a trained model on the validation rows, beside the base model's: the task held_out of evaluate."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from finetune_trainer.contract import Score, TrainRecipe
from finetune_trainer.contract.question_scores import (
    HELD_OUT_SCORES,
    WEIGHT,
    mean_of,
    paired_difference,
    significant,
    stderr_of,
)
from finetune_trainer.data.packing.rows import PackedRows
from finetune_trainer.runtime.stage_folder import Context
from finetune_trainer.training.distributed.ranks import ALONE
from finetune_trainer.training.methods.trainable import Trainable, WeightsFormat
from finetune_trainer.training.model import document_attention
from finetune_trainer.training.model.model import TrainedModel
from finetune_trainer.training.objectives.base import LOSS, Start
from finetune_trainer.training.objectives.registry import objective_of

# DPO's rewards are relative to the base model, whose own rewards are 0.
WITHOUT_BASE = frozenset({"reward_accuracy"})
"""Scores that the base model does not have."""

OnExample = Callable[[int, int], None]
"""Called with the number of measured examples and of all examples."""


@dataclass(frozen=True)
class Sums:
    """What the means of a model are made from, for each example: a row, or with DPO a pair of rows."""

    by_mean: dict[str, NDArray[np.float64]]
    """[examples] by the name of the mean."""
    weights: NDArray[np.float64]
    """[examples]: the numbers of targets; 1 for a pair."""

    def write(self, path: Path) -> None:
        """Write one JSON object a line for each example."""
        columns = {name: values.tolist() for name, values in self.by_mean.items()}
        columns[WEIGHT] = self.weights.tolist()
        lines = [
            json.dumps(dict(zip(columns, values, strict=True))) + "\n"
            for values in zip(*columns.values(), strict=True)
        ]
        path.write_text("".join(lines))


class HeldOut:
    """The validation rows, measured with one model after the other."""

    def __init__(self, recipe: TrainRecipe, rows: PackedRows) -> None:
        """Raise ConfigInvalid if the rows were prepared for another objective."""
        # Each example by itself: its loss depends on no other example, and the spread gives the standard error.
        changes = {
            "micro_batch_size": 1,
            "gradient_checkpointing": False,
            "compile": False,
        }
        self._recipe = recipe.model_copy(update=changes)
        self._objective = objective_of(self._recipe, rows)

    @property
    def needs_base(self) -> bool:
        """Whether the base model is the reference of the objective, so that it must be measured first."""
        return self._recipe.objective == "DPO"

    def measure_base(
        self, module: Any, device: torch.device, context: Context, inputs: str
    ) -> Sums:
        """Measure the base model. `inputs` is a digest of all that determines what it computes for the rows."""
        model = self._model(module, device)
        start = Start(
            model, context.folder, inputs, context.progress, fence=context.fence
        )
        self._objective.begin(start)
        return self._measure(model, _reporter(context, "the base model"))

    def measure(self, module: Any, device: torch.device, context: Context) -> Sums:
        """Measure the trained model; after the base model if that is the reference."""
        model = self._model(module, device)
        return self._measure(model, _reporter(context, "the trained model"))

    def _model(self, module: Any, device: torch.device) -> TrainedModel:
        trainable = Trainable(module.to(device), {}, WeightsFormat("", {}))
        model = TrainedModel(trainable, device, self._recipe)
        document_attention.enable(model, self._recipe.dtype)
        return model

    def _measure(self, model: TrainedModel, on_example: OnExample) -> Sums:
        model.model.eval()
        count = len(self._objective)
        rows = []
        weights = []
        with torch.no_grad():
            for batch in self._objective.batches(
                np.arange(count), flat=model.is_flat, ranks=ALONE
            ):
                rows.append(self._objective.sums(model, batch).tolist())
                weights.append(batch.weight)
                on_example(len(rows), count)
        table = np.array(rows, dtype=np.float64).T
        names = (LOSS, *self._objective.metrics)
        by_name = dict(zip(names, table, strict=True))
        by_mean = {name: by_name[name] for name in HELD_OUT_SCORES if name in by_name}
        return Sums(by_mean, np.array(weights, dtype=np.float64))


def held_out_scores(model: Sums, base: Sums | None) -> dict[str, Score]:
    """Return the means over all examples, and the base model's beside them if it was measured."""
    scores = {}
    weights = model.weights.tolist()
    for mean, name in HELD_OUT_SCORES.items():
        if mean not in model.by_mean:
            continue
        sums = model.by_mean[mean].tolist()
        score = Score(
            value=significant(mean_of(sums, weights)),
            stderr=_rounded(stderr_of(sums, weights)),
        )
        if base is not None and name not in WITHOUT_BASE:
            base_sums = base.by_mean[mean].tolist()
            difference = paired_difference(sums, base_sums, weights)
            compared = {
                "base": significant(mean_of(base_sums, base.weights.tolist())),
                "difference_stderr": _rounded(difference.stderr),
            }
            score = score.model_copy(update=compared)
        scores[name] = score
    return scores


def _reporter(context: Context, name: str) -> OnExample:
    def report(done: int, total: int) -> None:
        context.progress.update(
            note=f"measuring {name}: {done} of {total} held-out rows or pairs"
        )

    return report


def _rounded(stderr: float | None) -> float | None:
    return None if stderr is None else significant(stderr)
