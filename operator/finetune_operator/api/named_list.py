"""A mapping by name that is a list of named objects in JSON.

Python code looks a stage up by its name. Kubernetes' API conventions ask for a list.
"""

from typing import Any

from pydantic import (
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema


class NamedList:
    """A mapping that is a list of named objects in JSON, as Kubernetes' conventions ask for."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(
            _by_name,
            handler(source),
            # For JSON only: Python code copies the mapping as it is.
            serialization=core_schema.wrap_serializer_function_ser_schema(
                _as_list, when_used="json"
            ),
        )

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        entry = handler.resolve_ref_schema(handler(core)["additionalProperties"])
        name = {"type": "string", "description": "Name of the stage."}
        # The name is the key of a list map, which the API server accepts only as a required field.
        named = entry | {
            "properties": {"name": name, **entry["properties"]},
            "required": ["name"],
        }
        keys = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
        return {"type": "array", "items": named, **keys}


def _by_name(value: Any) -> Any:
    # Python code passes a mapping; only JSON has the list.
    if not isinstance(value, list):
        return value
    if not all(isinstance(entry, dict) and "name" in entry for entry in value):
        raise ValueError("every entry must be an object with a name")
    return {
        entry["name"]: {key: inner for key, inner in entry.items() if key != "name"}
        for entry in value
    }


def _as_list(
    value: dict[str, Any], handler: SerializerFunctionWrapHandler
) -> list[Any]:
    return [{"name": name} | entry for name, entry in handler(value).items()]
