"""What a training needs of the base model and of the rows: checked without weights and without a GPU."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from finetune_trainer.contract import HELD_OUT, Lora, PrepareConfig, TrainRecipe
from finetune_trainer.data.packing.writer import PackedWriter
from finetune_trainer.models.base_model import BaseModel
from finetune_trainer.models.finite import check_casts
from finetune_trainer.models.isolation import check_packing
from finetune_trainer.models.loading import check_context_length, load_config
from finetune_trainer.models.positions import embeddings_of
from finetune_trainer.models.stored_weights import StoredWeights
from finetune_trainer.models.structure import (
    check_stored_weights,
    layers_of,
    load_structure,
    no_checkpointing,
    no_layers,
)
from finetune_trainer.models.tokenizer import (
    RESIZE,
    check_end,
    tokens_beyond,
    too_few_embeddings,
)
from finetune_trainer.models.trained.full_weights import trained_names
from finetune_trainer.runtime.errors import ConfigInvalid, DataInvalid
from finetune_trainer.runtime.progress.progress import log_line


def check_model_for(base: BaseModel, config: PrepareConfig) -> None:
    """Raise ConfigInvalid if the base model and the settings cannot work together; the weights are in its folder."""
    structure = load_structure(base.folder, base.uri)
    check_stored_weights(base.folder, base.uri, structure)
    for _, error in setting_errors(base, config, structure, has_weights=True):
        raise error


def setting_errors(
    base: BaseModel, config: PrepareConfig, structure: Any, *, has_weights: bool
) -> Iterator[tuple[str, ConfigInvalid]]:
    """Yield each setting that cannot work with the model: its field below spec, and the error.

    The structure is used up. `has_weights`: the files of the weights are in the model's folder.
    """
    checks: list[tuple[str, Check]] = [("prepare.contextLength", _check_length)]
    if has_weights:
        checks.append(("push.dtype", _check_published_dtype))
    if config.training is not None:
        checks += TRAINING_CHECKS
        if has_weights:
            checks.append(("train.method", _check_full))
        # At the end: it gives the structure other weights.
        checks.append(("prepare.packing", _check_packing))
    for field, check in checks:
        try:
            check(base, config, structure)
        except ConfigInvalid as error:
            yield field, error


def _check_length(base: BaseModel, config: PrepareConfig, structure: Any) -> None:  # noqa: ARG001  as of all checks
    check_context_length(base, config.recipe.context_length)


def _check_published_dtype(
    base: BaseModel,
    config: PrepareConfig,
    structure: Any,  # noqa: ARG001  as above
) -> None:
    # BF16 and FP32 differ in their last values only, and reading all weights takes time.
    if config.published_dtype == "FP16":
        check_casts(StoredWeights(base.folder), torch.float16)


def _check_lora(base: BaseModel, config: PrepareConfig, structure: Any) -> None:
    recipe = config.training
    if recipe is None or not names_layers(recipe):
        return
    check_layers(base.folder, base.uri, recipe.adapter, structure)
    if recipe.method == "QLoRA":
        from finetune_trainer.training.methods.lora import check_saved_in_full  # noqa: PLC0415  as in check_layers

        check_saved_in_full(structure, recipe.adapter)


def _check_full(base: BaseModel, config: PrepareConfig, structure: Any) -> None:
    if config.training is not None and config.training.method == "Full":
        trained_names(structure, base.folder)


def _check_compile(base: BaseModel, config: PrepareConfig, structure: Any) -> None:  # noqa: ARG001  as above
    if config.training is None or not config.training.compile:
        return
    if not layers_of(structure):
        raise no_layers(type(structure).__name__)


def _check_checkpointing(
    base: BaseModel,  # noqa: ARG001  as above
    config: PrepareConfig,
    structure: Any,
) -> None:
    if config.training is None or not config.training.gradient_checkpointing:
        return
    if not structure.supports_gradient_checkpointing:
        raise no_checkpointing(type(structure).__name__)


def _check_packing(base: BaseModel, config: PrepareConfig, structure: Any) -> None:
    # A row of a pair has a single completion, whatever the field says.
    if config.recipe.packing and config.objective != "DPO":
        check_packing(structure, base.uri)


Check = Callable[[BaseModel, PrepareConfig, Any], None]
TRAINING_CHECKS: list[tuple[str, Check]] = [
    ("train.lora", _check_lora),
    ("train.compile", _check_compile),
    ("train.gradientCheckpointing", _check_checkpointing),
]
"""Field of a setting -> its check."""


def names_layers(training: TrainRecipe) -> bool:
    """Return whether the recipe names layers, and not only all-linear."""
    lora = training.adapter
    if training.method == "Full":
        return False
    # Without a block, the names are in the adapter that training starts from.
    return lora.target_modules != Lora().target_modules or bool(lora.modules_to_save)


def check_layers(folder: Path, uri: str, lora: Lora, structure: Any = None) -> None:
    """Raise ConfigInvalid if a name in the recipe matches no layer that can be trained."""
    # Imported here: PEFT takes seconds, which prepare of a recipe without names should not wait for.
    from finetune_trainer.training.methods.lora import check_names  # noqa: PLC0415

    check_names(structure or load_structure(folder, uri), lora)


def unquantized_experts(training: TrainRecipe, structure: Any) -> int:
    """Return the bytes of experts that QLoRA leaves in 16 bits; 0 with another method, or without fused experts."""
    if training.method != "QLoRA":
        return 0
    from finetune_trainer.training.methods.lora import expert_bytes  # noqa: PLC0415  as above

    return expert_bytes(structure)


class Embeddings:
    """The embeddings of a model, which must have each token that occurs."""

    def __init__(self, base: BaseModel, tokenizer: Any) -> None:
        self._uri = base.uri
        self._tokenizer = tokenizer
        check_end(base.uri, base.folder, tokenizer)
        config = load_config(base.folder, base.uri)
        self.count = embeddings_of(config.to_dict())
        self._problem = ""
        if self.count is None:
            return
        self._check_end()
        beyond = tokens_beyond(tokenizer, self.count)
        if beyond:
            self._problem = too_few_embeddings(beyond, self.count)

    def _check_end(self) -> None:
        """Raise ConfigInvalid if the token that ends a text has no embedding: no model could write it."""
        number = self._tokenizer.eos_token_id
        if number is None or number < self.count:
            return
        raise ConfigInvalid(
            f"{self._uri}: the model has {self.count} embeddings, none for eos_token {self._tokenizer.eos_token}: "
            "set eos_token in tokenizer_config.json to a token of the model"
        )

    def log_unused(self) -> None:
        """Log that tokens without an embedding must not occur."""
        if self._problem:
            log_line(f"prepare: {self._problem}: a record with such a token is refused")

    def padding_token(self) -> int:
        """Return the id of the token that pads rows."""
        for token in (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id):
            # Padding is computed, too. Some tokenizers got a token for it that their model has no embedding for.
            if token is not None and (self.count is None or token < self.count):
                return int(token)
        # Padding is never a target of the loss, so any id works.
        return 0

    def check(self, writer: PackedWriter) -> None:
        """Raise ConfigInvalid if the rows have a token without an embedding."""
        token = writer.largest_token
        if self.count is None or token < self.count:
            return
        used = self._tokenizer.convert_ids_to_tokens(token)
        raise ConfigInvalid(
            f"{self._uri}: {self._problem}; the records use {used}: {RESIZE}"
        )


def check_validation(
    training: TrainRecipe | None, reason: str, *, held_out: bool = False
) -> None:
    """Raise DataInvalid if training or evaluate needs validation rows, of which there are none for this reason."""
    field = None
    if training is not None and training.early_stopping:
        field = "train.earlyStopping"
    elif training is not None and training.eval_steps:
        field = "train.evalSteps"
    elif held_out:
        field = f"evaluate.tasks[{HELD_OUT}]"
    if field:
        raise DataInvalid(
            f"{field} needs validation rows: {reason}; "
            f"raise validation.fraction, set validation.uri, or remove {field}"
        )
