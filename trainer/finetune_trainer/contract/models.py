"""Bases of the contract's models, and constraints that several of them share."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema
from typing_extensions import override

from finetune_trainer.contract.field_docs import field_docs


class ContractModel(BaseModel):
    """Base of all models of the contract: camelCase in JSON, snake_case in Python, no unknown fields, immutable."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        # A misspelt field is an error of the user. Without this, its default would be used in silence.
        extra="forbid",
        frozen=True,
    )

    @override
    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the schema, in which the docstrings of the fields are their descriptions.

        They are what `kubectl explain` and docs/reference show.
        """
        schema = handler(core)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in field_docs(cls).items():
            shown = properties.get(to_camel(name), properties.get(name))
            if shown is not None:
                shown.setdefault("description", text)
        return schema

    @override
    def model_copy(
        self, *, update: Mapping[str, Any] | None = None, deep: bool = False
    ) -> Self:
        """Return a copy with some fields changed. Raises TypeError if the model has no field of such a name.

        Pydantic checks neither names nor values. A misspelt name would be stored and never read.
        """
        unknown = set(update or ()) - type(self).model_fields.keys()
        if unknown:
            names = ", ".join(sorted(unknown))
            raise TypeError(
                f"{type(self).__name__} has no field {names}; use its name in Python"
            )
        return super().model_copy(update=update, deep=deep)


class ExtensibleModel(ContractModel):
    """Base of models that another version may have written with more fields: unknown fields are kept, not rejected.

    Specs and configs stay strict: an unknown field there is a typing error of the user.
    """

    # In the schema nothing changes: the API server prunes fields that the CRD does not know.
    model_config = ConfigDict(
        extra="allow", json_schema_extra={"additionalProperties": False}
    )

    def with_unknown_fields_of(self, other: "ExtensibleModel | None") -> Self:
        """Return a copy with the unknown fields of another object, so that a new object does not lose them."""
        if other is None or not other.model_extra:
            return self
        # They are no fields of this version, which `self.model_copy` would refuse.
        return BaseModel.model_copy(self, update=other.model_extra)


def none_if_invalid(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Return the valid value, or None, so that the rest of the object remains usable; for a WrapValidator."""
    try:
        return handler(value)
    except ValidationError:
        return None


class ListMap:
    """Constraint of a list: a map by these fields, as Kubernetes merges it in server-side apply.

    Raise ValueError if two entries have the same keys.
    """

    def __init__(self, *keys: str) -> None:
        """Take the names of the fields in JSON."""
        self.keys = keys

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(
            self._check, handler(source)
        )

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(core) | {
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": list(self.keys),
        }

    def _check(self, entries: tuple[BaseModel, ...]) -> tuple[BaseModel, ...]:
        seen = set()
        for entry in entries:
            data = entry.model_dump(mode="json", by_alias=True)
            key = tuple(data.get(name) for name in self.keys)
            if key in seen:
                pairs = zip(self.keys, key, strict=True)
                shown = ", ".join(f"{name} {value}" for name, value in pairs)
                raise ValueError(
                    f"two entries have the same {shown}: remove or rename one"
                )
            seen.add(key)
        return entries


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """Return a validator that accepts these names, in the order of the alphabet in its message."""

    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"must be one of {', '.join(sorted(names))}")
        return value

    return check
