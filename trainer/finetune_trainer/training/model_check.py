"""Looks at a base model, and at the settings that depend on it, before a pipeline starts. It reads no weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from finetune_trainer.contract import PrepareConfig, TrainRecipe
from finetune_trainer.models.base_model import BaseModel
from finetune_trainer.models.requirements import (
    ModelFiles,
    check_headers,
    check_model,
)
from finetune_trainer.models.structure import check_stored_weights, load_structure
from finetune_trainer.training.requirements import (
    setting_errors,
    unquantized_experts,
)

GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """A setting that cannot work, or a note about it."""

    field: str
    """Path of the field below spec."""
    message: str
    is_note: bool = False


def model_findings(
    files: ModelFiles, config: PrepareConfig, *, has_weights: bool
) -> Iterator[Finding]:
    """Yield what is wrong with the settings that depend on a model.

    Raise ConfigInvalid if the model cannot be trained, whatever the settings. `has_weights`: the files of the weights
    are in the folder, too.
    """
    check_model(files)
    if has_weights:
        check_headers(files)
    structure = load_structure(files.folder, files.uri)
    if has_weights:
        check_stored_weights(files.folder, files.uri, structure)
    recipe = config.training
    if recipe is not None:
        yield from _notes(recipe, structure)
    base = BaseModel(files.uri, files.folder, "")
    for place, error in setting_errors(
        base, config, structure, has_weights=has_weights
    ):
        # Some errors name a field themselves.
        field, _, message = str(error).partition(": ")
        if not field.startswith("train."):
            field = place
            message = str(error)
        yield Finding(field, message)


def _notes(recipe: TrainRecipe, structure: Any) -> Iterator[Finding]:
    experts = unquantized_experts(recipe, structure)
    if experts:
        message = f"QLoRA quantizes linear layers only: the experts stay in 16 bits, {experts / GIB:,.1f} GiB"
        yield Finding("train.method", message, is_note=True)
