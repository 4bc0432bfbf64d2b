"""From pydantic's JSON schema to the structural schema that Kubernetes keeps.

What a structural schema cannot express is refused, never left out: a bound that is lost on the way would let
the API server take what the operator then stumbles over.
"""

from collections.abc import Callable, Mapping
from typing import Any

Schema = dict[str, Any]

PASSTHROUGH = frozenset(
    {
        "type", "format", "enum", "pattern", "minLength", "maxLength", "minimum", "maximum", "multipleOf",
        "minItems", "maxItems", "minProperties", "maxProperties", "required",
        "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-map-type",
        "x-kubernetes-preserve-unknown-fields",
    }
)  # fmt: skip

INT_OR_STRING = "x-kubernetes-int-or-string"
"""The one union that a custom resource's schema knows, and the one place where it is said with anyOf."""

REWRITES: Mapping[str, Callable[[Any], Schema]] = {
    "const": lambda value: {"enum": [value]},
    "exclusiveMinimum": lambda value: {"minimum": value, "exclusiveMinimum": True},
    "exclusiveMaximum": lambda value: {"maximum": value, "exclusiveMaximum": True},
    "title": lambda _: {},
    "$defs": lambda _: {},
}

ABOUT_NAMES = frozenset({"patternProperties", "propertyNames"})
HANDLED_ELSEWHERE = ABOUT_NAMES | {"description", "default", "x-kubernetes-validations"}


class UnsupportedSchema(Exception):
    """A custom resource's schema has no words for this."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}")


def structural(schema: Schema, path: str = "$") -> Schema:
    """Convert a whole schema with its definitions; raises NotExpressible with the place and the reason."""
    return _Converter(schema.get("$defs", {})).convert(schema, path)


def without_defaults(schema: Schema) -> Schema:
    """Give the same schema without defaults."""
    return {
        key: {name: without_defaults(inner) for name, inner in value.items()}
        if key == "properties"
        else without_defaults(value)
        if key in {"items", "additionalProperties"}
        else value
        for key, value in schema.items()
        if key != "default"
    }


class _Converter:
    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self.definitions = definitions
        self.open: list[str] = []

    def convert(self, schema: Schema, path: str) -> Schema:
        """Convert one schema and everything in it."""
        if "$ref" in schema:
            return self._inlined(schema, path)
        if INT_OR_STRING in schema:
            said = {key: value for key, value in schema.items() if key not in HANDLED_ELSEWHERE | {"title"}}
            return _annotated(schema) | said
        if "anyOf" in schema:
            return self.convert(_without_null(schema, path), path)
        converted = _annotated(schema)
        for keyword, value in schema.items():
            if keyword not in HANDLED_ELSEWHERE:
                converted |= self._keyword(keyword, value, path)
        if "type" not in converted:
            raise UnsupportedSchema(path, "has no type; a union is written as optional members and a rule between them")
        if schema.keys() & ABOUT_NAMES:
            converted |= self._values_by_name(schema, path)
        rules = [*schema.get("x-kubernetes-validations", ()), *_rules_for_names(schema, path)]
        return converted | ({"x-kubernetes-validations": rules} if rules else {})

    def _inlined(self, schema: Schema, path: str) -> Schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        if name in self.open:
            raise UnsupportedSchema(path, f"{name} contains itself; a structural schema is finite")
        self.open.append(name)
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        converted = self.convert(self.definitions[name] | beside, path)
        self.open.pop()
        return converted

    def _keyword(self, keyword: str, value: Any, path: str) -> Schema:
        if keyword in PASSTHROUGH:
            return {keyword: value}
        if keyword in REWRITES:
            return REWRITES[keyword](value)
        if keyword == "properties":
            return {keyword: {name: self.convert(inner, f"{path}.{name}") for name, inner in value.items()}}
        if keyword == "items":
            # A default that the server adds within a list looks like drift to GitOps tools; the models add it anyway.
            return {keyword: without_defaults(self.convert(value, f"{path}[]"))}
        if keyword == "additionalProperties":
            return self._additional(value, path)
        raise UnsupportedSchema(path, f"{keyword} cannot be expressed in a custom resource's schema")

    def _additional(self, value: Any, path: str) -> Schema:
        match value:
            case False:
                # The server prunes or, with strict field validation, refuses what is unknown; saying so is illegal.
                return {}
            case True:
                return {"x-kubernetes-preserve-unknown-fields": True}
            case _:
                return {"additionalProperties": self.convert(value, f"{path}.*")}

    def _values_by_name(self, schema: Schema, path: str) -> Schema:
        patterns: Schema = schema.get("patternProperties", {})
        if len(patterns) > 1:
            raise UnsupportedSchema(path, "values cannot differ by the pattern of their keys")
        inner = next(iter(patterns.values()), None)
        return {"additionalProperties": self.convert(inner, f"{path}.*")} if inner is not None else {}


def _rules_for_names(schema: Schema, path: str) -> list[Schema]:
    """Write what keys must look like as rules, for a structural schema has no propertyNames."""
    if not schema.keys() & ABOUT_NAMES:
        return []
    names: Schema = schema.get("propertyNames", {})
    if unknown := names.keys() - {"type", "minLength", "maxLength", "pattern"}:
        raise UnsupportedSchema(path, f"{', '.join(sorted(unknown))} of keys cannot be expressed")
    if "maxProperties" not in schema:
        raise UnsupportedSchema(path, "a rule for every key needs maxProperties, or its cost has no bound")
    rules = []
    if "maxLength" in names or "minLength" in names:
        least, most = names.get("minLength", 0), names.get("maxLength")
        bounds = [f"size(key) >= {least}"] * (least > 0) + [f"size(key) <= {most}"] * (most is not None)
        words = [f"at least {least}"] * (least > 0) + [f"at most {most}"] * (most is not None)
        rules.append(_for_every_key(" && ".join(bounds), f"have {' and '.join(words)} characters"))
    patterns = [*schema.get("patternProperties", ()), *([names["pattern"]] if "pattern" in names else [])]
    return rules + [_for_every_key(f"key.matches({_literal(pattern)})", f"match {pattern}") for pattern in patterns]


def _for_every_key(condition: str, words: str) -> Schema:
    return {"rule": f"self.all(key, {condition})", "message": f"every key must {words}"}


def _literal(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _without_null(schema: Schema, path: str) -> Schema:
    """Turn X | None into X: what is optional is absent, never null."""
    members = [member for member in schema["anyOf"] if member != {"type": "null"}]
    if len(members) != 1:
        raise UnsupportedSchema(path, "is one of several types; write optional members and a rule between them")
    beside = {key: value for key, value in schema.items() if key != "anyOf"}
    member: Schema = members[0]
    return member | beside


def _annotated(schema: Schema) -> Schema:
    annotated: Schema = {}
    if schema.get("description"):
        annotated["description"] = " ".join(str(schema["description"]).split())
    if schema.get("default") is not None:
        annotated["default"] = _without_nulls(schema["default"])
    return annotated


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
