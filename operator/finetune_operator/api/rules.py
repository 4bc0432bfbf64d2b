"""Rules between fields, written once: the API server gets them as CEL, everyone else as Python."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError
from typing_extensions import override

from finetune_trainer.contract import ContractModel


@dataclass(frozen=True)
class Rule:
    """What must hold between the fields of one object."""

    field: str
    """Where the mend is made, from the object on: placement.capacity."""
    message: str
    """What is wrong and how to mend it."""
    cel: str
    """The rule for the API server; `self` is the object."""
    is_valid: Callable[[Mapping[str, Any]], bool]
    """The same for the object as plain camelCase data, with defaults filled in."""


class WithRules(ContractModel):
    """An object with rules between its fields."""

    rules: ClassVar[tuple[Rule, ...]] = ()
    """Of this class; those of the classes it is made of hold as well."""

    @classmethod
    def all_rules(cls) -> tuple[Rule, ...]:
        """Give the rules of this class and of those it is made of."""
        return tuple(rule for kind in reversed(cls.__mro__) for rule in vars(kind).get("rules", ()))

    @model_validator(mode="after")
    def _keep_rules(self) -> Self:
        data = self.model_dump(by_alias=True, exclude_none=True, mode="json")
        broken = [f"{rule.field}: {rule.message}" for rule in self.all_rules() if not rule.is_valid(data)]
        if broken:
            raise PydanticCustomError("rule", "{broken}", {"broken": "; ".join(broken)})
        return self

    @override
    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core)
        if cls.all_rules():
            target = handler.resolve_ref_schema(schema)
            target["x-kubernetes-validations"] = [
                {"rule": rule.cel, "message": f"{rule.field}: {rule.message}"} for rule in cls.all_rules()
            ]
        return schema
