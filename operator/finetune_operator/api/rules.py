"""Validation rules between fields: CEL for the API server, and the same rule in Python for all other callers."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

from pydantic import GetJsonSchemaHandler, ValidationInfo, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError
from typing_extensions import override

from finetune_trainer.contract import ContractModel

Reason = Literal["FieldValueInvalid", "FieldValueForbidden", "FieldValueDuplicate"]
Detail = tuple[tuple[str | int, ...], str]
"""The path of a value below the object, and what is wrong with it."""
STORED = MappingProxyType({"stored": True})
"""Context of the validation of an object that is stored: an upgrade with a new harmless rule stops no pipeline."""


@dataclass(frozen=True)
class Rule:
    """A constraint between the fields of one object."""

    field: str
    """Path of the field to fix, relative to the object, for example placement.capacity."""
    message: str
    """The mistake, and how to fix it."""
    cel: str
    """The rule for the API server, in CEL. `self` is the object."""
    is_valid: Callable[[Mapping[str, Any]], bool] = lambda _data: True
    """The same rule in Python. The argument is the object as plain camelCase data with defaults filled in. Absent: the
    rule holds on a cluster only."""
    details: Callable[[Mapping[str, Any]], Iterator[Detail]] | None = None
    """Yields the places of the mistake for the command line, which prints them instead of the message."""
    reason: Reason = "FieldValueInvalid"
    """The kind of the mistake for clients of the API server. With Forbidden it prints no value."""
    is_harmless: bool = False
    """Whether an object that breaks the rule works: its field has no effect. The rule holds for what a user creates or
    changes, and not for a stored object. `cel` may then name `oldSelf`, the object before, which is optional."""

    @property
    def admission(self) -> dict[str, Any]:
        """The rule in the schema for the API server."""
        content: dict[str, Any] = {
            "rule": self.cel,
            "message": f"{self.field}: {self.message}",
            # `crd/structural.py` keeps the part of it that names a field of the schema.
            "fieldPath": self.field,
        }
        # The API server's default, in each of hundreds of rules: the size of the CustomResourceDefinition is limited.
        if self.reason != "FieldValueInvalid":
            content["reason"] = self.reason
        if not self.is_harmless:
            return content
        # An object that has broken the rule since before it was one can be edited elsewhere.
        broken_before = (
            f"(oldSelf.hasValue() && ![oldSelf.value()].all(self, {self.cel}))"
        )
        rule = f"({self.cel}) || {broken_before}"
        return {**content, "rule": rule, "optionalOldSelf": True}


class WithRules(ContractModel):
    """A model with rules between its fields."""

    rules: ClassVar[tuple[Rule, ...]] = ()
    """Rules of this class. Rules of its base classes apply too."""

    @classmethod
    @cache
    def all_rules(cls) -> tuple[Rule, ...]:
        """Return the rules of this class and of its base classes."""
        return tuple(
            rule
            for kind in reversed(cls.__mro__)
            for rule in vars(kind).get("rules", ())
        )

    @model_validator(mode="after")
    def _check_rules(self, info: ValidationInfo) -> Self:
        is_stored = bool(info.context and info.context.get("stored"))
        # Named as in a manifest. A field without a value is absent, as it is for has() in CEL.
        data = self.model_dump(by_alias=True, exclude_none=True, mode="json")
        broken = [
            f"{rule.field}: {rule.message}"
            for rule in self.all_rules()
            if not (is_stored and rule.is_harmless) and not rule.is_valid(data)
        ]
        if broken:
            # All broken rules in a single error, so that the user fixes them at once. A ValueError would add a prefix.
            raise PydanticCustomError("rule", "{broken}", {"broken": "; ".join(broken)})
        return self

    @override
    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        schema = super().__get_pydantic_json_schema__(core, handler)
        if cls.all_rules():
            target = handler.resolve_ref_schema(schema)
            target["x-kubernetes-validations"] = [
                rule.admission for rule in cls.all_rules()
            ]
        return schema
