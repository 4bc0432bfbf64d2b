"""Convert pydantic's JSON schema to a structural schema of Kubernetes.

A keyword that a structural schema cannot express raises UnsupportedSchema. It is never dropped: the API server would
then accept objects that the operator cannot read.
"""

from collections.abc import Callable, Mapping
from typing import Any

from finetune_operator.api.names import ANNOTATION_KEY, LABEL_KEY

Schema = dict[str, Any]

PRESERVE = "x-kubernetes-preserve-unknown-fields"
RULES = "x-kubernetes-validations"
OLD_SELF = "optionalOldSelf"
"""Key of a rule that also runs when there is no object before, and may name it."""
PASSTHROUGH = frozenset(
    {
        "type", "format", "enum", "pattern", "minLength", "maxLength", "minimum", "maximum", "multipleOf",
        "minItems", "maxItems", "minProperties", "maxProperties", "required",
        "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-map-type",
        PRESERVE,
    }
)  # fmt: skip

INT_OR_STRING = "x-kubernetes-int-or-string"
"""The only union that a structural schema supports, and the only use of anyOf."""

REWRITES: Mapping[str, Callable[[Any], Schema]] = {
    # A structural schema has no const.
    "const": lambda value: {"enum": [value]},
    # Kubernetes has the older form of OpenAPI 3.0: a boolean beside the bound.
    "exclusiveMinimum": lambda value: {"minimum": value, "exclusiveMinimum": True},
    "exclusiveMaximum": lambda value: {"maximum": value, "exclusiveMaximum": True},
    "title": lambda _: {},
    "$defs": lambda _: {},
}

KEY_FORM = "be a label key: NAME or DOMAIN/NAME, with at most 63 letters, digits, _, . and - in NAME"
KEY_FORMS = {LABEL_KEY: KEY_FORM, ANNOTATION_KEY: KEY_FORM}
"""Pattern of keys -> what it requires, in words."""
KEY_KEYWORDS = frozenset({"patternProperties", "propertyNames"})
"""Keywords that constrain the keys of a mapping."""
HANDLED_ELSEWHERE = KEY_KEYWORDS | {
    "description",
    "default",
    RULES,
}


class UnsupportedSchema(Exception):
    """A structural schema cannot express this."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")


def structural(schema: Schema, path: str = "$") -> Schema:
    """Convert a schema with its definitions; raise UnsupportedSchema with the path and the reason."""
    return _Converter(schema.get("$defs", {})).convert(schema, path)


def without_defaults(schema: Schema) -> Schema:
    """Return the schema without defaults."""
    own = {key: value for key, value in schema.items() if key != "default"}
    return mapped(own, without_defaults)


def without_descriptions(schema: Schema) -> Schema:
    """Return the schema without descriptions."""
    own = {key: value for key, value in schema.items() if key != "description"}
    return mapped(own, without_descriptions)


def mapped(schema: Schema, change: Callable[[Schema], Schema]) -> Schema:
    """Return the schema with each schema directly inside it changed."""
    changed = dict(schema)
    if "properties" in schema:
        properties: dict[str, Schema] = schema["properties"]
        changed["properties"] = {
            name: change(inner) for name, inner in properties.items()
        }
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            changed[keyword] = change(schema[keyword])
    return changed


class _Converter:
    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self.definitions = definitions
        self.open: list[str] = []

    def convert(self, schema: Schema, path: str) -> Schema:
        """Convert one schema and all nested schemas."""
        if "$ref" in schema:
            return self._inlined(schema, path)
        if INT_OR_STRING in schema:
            kept = {
                key: value
                for key, value in schema.items()
                if key not in HANDLED_ELSEWHERE | {"title"}
            }
            return _annotated(schema) | kept
        if "anyOf" in schema:
            return self.convert(_without_null(schema, path), path)
        converted = _annotated(schema)
        for keyword, value in schema.items():
            if keyword not in HANDLED_ELSEWHERE:
                converted |= self._keyword(keyword, value, path)
        # The API server then stores any value. Bounds without a type still hold for values of their type.
        if "type" not in converted and PRESERVE not in converted:
            raise UnsupportedSchema(
                path,
                "has no type; write a union as optional members and a rule between them",
            )
        if schema.keys() & KEY_KEYWORDS:
            converted |= self._mapping_values(schema, path)
        rules = [
            *(_with_field_path(rule, converted) for rule in schema.get(RULES, ())),
            *_key_rules(schema, path),
        ]
        return converted | ({RULES: rules} if rules else {})

    def _inlined(self, schema: Schema, path: str) -> Schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        if name in self.open:
            raise UnsupportedSchema(
                path, f"{name} contains itself; a structural schema cannot be recursive"
            )
        # Definitions that are being inlined, to find one that contains itself.
        self.open.append(name)
        siblings = {key: value for key, value in schema.items() if key != "$ref"}
        converted = self.convert(self.definitions[name] | siblings, path)
        self.open.pop()
        return converted

    def _keyword(self, keyword: str, value: Any, path: str) -> Schema:
        if keyword in PASSTHROUGH:
            return {keyword: value}
        if keyword in REWRITES:
            return REWRITES[keyword](value)
        if keyword == "properties":
            return {
                keyword: {
                    name: self.convert(inner, f"{path}.{name}")
                    for name, inner in value.items()
                }
            }
        if keyword == "items":
            # Defaults inside lists look like drift to GitOps tools. The models add them when they read the object.
            return {keyword: without_defaults(self.convert(value, f"{path}[]"))}
        if keyword == "additionalProperties":
            return self._additional(value, path)
        raise UnsupportedSchema(
            path, f"{keyword} cannot be expressed in a custom resource's schema"
        )

    def _additional(self, value: Any, path: str) -> Schema:
        match value:
            case False:
                # Illegal beside properties. The API server prunes unknown fields, or rejects them in strict validation.
                return {}
            case True:
                return {PRESERVE: True}
            case _:
                return {"additionalProperties": self.convert(value, f"{path}.*")}

    def _mapping_values(self, schema: Schema, path: str) -> Schema:
        patterns: Schema = schema.get("patternProperties", {})
        if len(patterns) > 1:
            raise UnsupportedSchema(
                path, "values cannot depend on the pattern of their keys"
            )
        inner = next(iter(patterns.values()), None)
        return (
            {"additionalProperties": self.convert(inner, f"{path}.*")}
            if inner is not None
            else {}
        )


def _with_field_path(rule: Schema, schema: Schema) -> Schema:
    """Return the rule with the path of its field in the form of the API server, as far as the schema has it.

    Without a path, the API server reports the mistake at the object of the rule.
    """
    steps: list[str] = []
    inner = schema
    for name in str(rule.get("fieldPath", "")).split("."):
        if name in inner.get("properties", {}):
            inner = inner["properties"][name]
        elif "additionalProperties" in inner:
            inner = inner["additionalProperties"]
        else:
            break
        steps.append(f".{name}" if name.isidentifier() else f"['{name}']")
    kept = {key: value for key, value in rule.items() if key != "fieldPath"}
    return kept | ({"fieldPath": "".join(steps)} if steps else {})


def _key_rules(schema: Schema, path: str) -> list[Schema]:
    """Return the constraints on keys as CEL rules, because a structural schema has no propertyNames."""
    if not schema.keys() & KEY_KEYWORDS:
        return []
    names: Schema = schema.get("propertyNames", {})
    unknown = names.keys() - {"type", "minLength", "maxLength", "pattern"}
    if unknown:
        raise UnsupportedSchema(
            path, f"{', '.join(sorted(unknown))} of keys cannot be expressed"
        )
    if "maxProperties" not in schema:
        raise UnsupportedSchema(
            path,
            "a rule for every key needs maxProperties, or the API server cannot bound its cost",
        )
    conditions = []
    requirements = []
    if names.get("minLength", 0) > 0:
        conditions.append(f"size(key) >= {names['minLength']}")
        requirements.append(f"have at least {names['minLength']} characters")
    if "maxLength" in names:
        conditions.append(f"size(key) <= {names['maxLength']}")
        requirements.append(f"have at most {names['maxLength']} characters")
    patterns = list(schema.get("patternProperties", ()))
    if "pattern" in names:
        patterns.append(names["pattern"])
    for pattern in patterns:
        conditions.append(f"key.matches({cel_literal(pattern)})")
        requirements.append(KEY_FORMS.get(pattern, f"match {pattern}"))
    if not conditions:
        return []
    # A single rule: the size of the CustomResourceDefinition is limited.
    rule = {
        "rule": f"self.all(key, {' && '.join(conditions)})",
        "message": f"every key must {' and '.join(requirements)}",
    }
    return [rule]


def cel_literal(text: str) -> str:
    """Return a text as a literal of CEL."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _without_null(schema: Schema, path: str) -> Schema:
    """Convert X | None to X, because an optional field is absent and never null."""
    members = [member for member in schema["anyOf"] if member != {"type": "null"}]
    if len(members) != 1:
        raise UnsupportedSchema(
            path,
            "is one of several types; write optional members and a rule between them",
        )
    siblings = {key: value for key, value in schema.items() if key != "anyOf"}
    member: Schema = members[0]
    return member | siblings


def _annotated(schema: Schema) -> Schema:
    annotated: Schema = {}
    if schema.get("description"):
        annotated["description"] = " ".join(str(schema["description"]).split())
    default = _without_empty(schema.get("default"))
    # An empty default says nothing, and the API server would store and send it with each write.
    if not _is_empty(default):
        annotated["default"] = default
    return annotated


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        members = {key: _without_empty(inner) for key, inner in value.items()}
        return {key: inner for key, inner in members.items() if not _is_empty(inner)}
    return value


def _is_empty(value: Any) -> bool:
    return value is None or value in ({}, [], "")
