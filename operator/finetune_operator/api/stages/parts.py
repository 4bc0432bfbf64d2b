"""A stage's spec is the common block and a recipe in one object; this takes the recipe out again."""

from typing import Any, TypeVar

from finetune_trainer.contract import ContractModel

R = TypeVar("R", bound=ContractModel)


def recipe_from(whole: ContractModel, kind: type[R]) -> R:
    """Give the fields of `kind` that `whole` inherited from it."""
    fields: dict[str, Any] = {name: getattr(whole, name) for name in kind.model_fields}
    return kind(**fields)
