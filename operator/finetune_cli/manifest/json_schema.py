"""The JSON Schema of a manifest, for editors."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from finetune_operator.api.group import API_VERSIONS, KIND
from finetune_operator.crd.generate import spec_schema
from finetune_operator.crd.structural import INT_OR_STRING, PRESERVE

Schema = dict[str, Any]
DIALECT = "http://json-schema.org/draft-07/schema#"
"""The newest version that the language servers of editors read in full."""
FILE = ".finetune/schema.json"
"""Where `finetune init` writes it, relative to the manifest."""
EDITOR_LINE = f"# yaml-language-server: $schema={FILE}"
"""First line of a manifest, with which an editor completes and checks its fields."""


def manifest_schema() -> Schema:
    """Return the schema of one manifest, with a description of each field."""
    return {
        "$schema": DIALECT,
        "title": KIND,
        "type": "object",
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "properties": {
            "apiVersion": {"enum": list(API_VERSIONS)},
            "kind": {"const": KIND},
            "metadata": {"type": "object", "required": ["name"]},
            "spec": _converted(spec_schema()),
            "status": {"type": "object"},
        },
        "additionalProperties": False,
    }


def schema_text() -> str:
    """Return the schema as the content of a file."""
    return json.dumps(manifest_schema(), indent=1, ensure_ascii=False) + "\n"


def write_schema(manifest: Path) -> None:
    """Write the schema to the path in the first line of a manifest, if that folder can be written."""
    file = manifest.parent / FILE
    # Without the schema, only an editor misses it, and `finetune schema` prints it.
    with suppress(OSError):
        file.parent.mkdir(exist_ok=True)
        file.write_text(schema_text(), encoding="utf-8")


def _converted(schema: Schema) -> Schema:
    """Return a structural schema of Kubernetes as JSON Schema: unknown fields are errors."""
    result = {
        key: value
        for key, value in schema.items()
        if not key.startswith("x-kubernetes")
    }
    if INT_OR_STRING in schema:
        result.pop("type", None)
        result["type"] = ["integer", "string"]
    if "properties" in schema:
        result["properties"] = {
            name: _converted(field) for name, field in schema["properties"].items()
        }
        if PRESERVE not in schema:
            result["additionalProperties"] = False
    if "items" in schema:
        result["items"] = _converted(schema["items"])
    if isinstance(schema.get("additionalProperties"), dict):
        result["additionalProperties"] = _converted(schema["additionalProperties"])
    for limit in ("Minimum", "Maximum"):
        # Kubernetes has the switch of earlier dialects, JSON Schema the limit itself.
        if result.pop(f"exclusive{limit}", False):
            result[f"exclusive{limit}"] = result.pop(limit.lower())
    if result.pop("nullable", False) and isinstance(result.get("type"), str):
        result["type"] = [result["type"], "null"]
    return result
