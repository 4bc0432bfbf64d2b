"""The types of the manifest's fields, by the keys of the manifest."""

from collections.abc import Mapping
from functools import cache
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

from pydantic.fields import FieldInfo

from finetune_cli.manifest.yaml.reader import Location
from finetune_trainer.contract import ContractModel


def unwrap_optional(annotation: Any) -> Any:
    """Return X for X | None and for Annotated[X, …]; other annotations unchanged."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return unwrap_optional(arguments[0])
    others = [kind for kind in arguments if kind is not NoneType]
    is_optional = NoneType in arguments
    if is_optional and len(others) == 1:
        return unwrap_optional(others[0])
    return annotation


def is_model(kind: Any) -> bool:
    """Return whether a type is a model, a mapping with fixed keys."""
    return isinstance(kind, type) and issubclass(kind, ContractModel)


# Cached: each unknown key of a manifest looks at all models.
@cache
def aliases(kind: type[ContractModel]) -> Mapping[str, Any]:
    """Return the keys of a model as the manifest spells them, with the types of their values."""
    fields = kind.model_fields.items()
    return {info.alias or name: _constrained(info) for name, info in fields}


def _constrained(info: FieldInfo) -> Any:
    """Return the type of a field with its limits and its pattern."""
    if not info.metadata:
        return info.annotation
    return Annotated[(info.annotation, *info.metadata)]


def required_keys(kind: type[ContractModel]) -> list[str]:
    """Return the keys without a default."""
    return [
        info.alias or name
        for name, info in kind.model_fields.items()
        if info.is_required()
    ]


def annotation_at(annotation: Any, location: Location) -> Any:
    """Return the type of the value at a location below a value of this type; None if it is not known."""
    for step in location:
        kind = unwrap_optional(annotation)
        annotation = None
        if is_model(kind) and isinstance(step, str):
            annotation = aliases(kind).get(step)
        elif get_origin(kind) is tuple and isinstance(step, int):
            annotation = get_args(kind)[0]
        elif get_origin(kind) is dict:
            annotation = get_args(kind)[1]
    return annotation
