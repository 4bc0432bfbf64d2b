"""Kubernetes' rules for structural schemas, and which schemas the converter rejects instead of weakening them."""

import re
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import BaseModel, Field, StringConstraints

from finetune_operator.crd import generate
from finetune_operator.crd.structural import UnsupportedSchema, structural

JSON_SCHEMA_PROPS = {
    "description", "type", "format", "default", "enum", "pattern", "minLength", "maxLength", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems", "maxItems", "minProperties", "maxProperties",
    "required", "properties", "items", "additionalProperties", "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
    "x-kubernetes-map-type", "x-kubernetes-preserve-unknown-fields", "x-kubernetes-validations",
}  # fmt: skip
FORMATS = {"date-time", "int32", "int64", "double", "float", "byte"}
OF_TYPE = {
    "string": {"format", "enum", "pattern", "minLength", "maxLength"},
    "integer": {"format", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "number": {"format", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "boolean": {"enum"},
    "array": {"items", "minItems", "maxItems", "x-kubernetes-list-type", "x-kubernetes-list-map-keys"},
    "object": {
        "properties", "required", "additionalProperties", "minProperties", "maxProperties",
        "x-kubernetes-map-type", "x-kubernetes-preserve-unknown-fields",
    },
}  # fmt: skip
ANYWHERE = {"description", "default", "type", "x-kubernetes-validations"}
NOT_IN_RE2 = re.compile(r"\(\?[=!<]|\\[1-9]|\(\?>|[*+?}]\+|\\Z|\(\?P=")


INT_OR_STRING = {
    "x-kubernetes-int-or-string": True,
    "anyOf": [{"type": "integer"}, {"type": "string"}],
}
"""A part of a structural schema that may have no type and may have anyOf."""
SCALAR = {
    "x-kubernetes-preserve-unknown-fields": True,
    "minItems": 1,
    "maxItems": 0,
    "minProperties": 1,
    "maxProperties": 0,
    "minimum": -(10**15),
    "maximum": 10**15,
}
"""The other part without a type: any value but an object or a list, which its bounds refuse."""


def parts(schema, path="$"):
    if "x-kubernetes-int-or-string" in schema:
        assert schema.items() >= INT_OR_STRING.items(), path
        schema = {
            key: value for key, value in schema.items() if key not in INT_OR_STRING
        } | {"type": "string"}
    elif "type" not in schema:
        assert schema.items() >= SCALAR.items(), path
        schema = {key: value for key, value in schema.items() if key not in SCALAR} | {
            "type": "string"
        }
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from parts(inner, f"{path}.{name}")
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            yield from parts(schema[keyword], f"{path}.{keyword}")


@pytest.fixture(scope="module")
def schema():
    return yaml.safe_load(generate.FILE.read_text())["spec"]["versions"][0]["schema"][
        "openAPIV3Schema"
    ]


def test_every_part_has_a_type_and_only_its_keywords(schema):
    for path, part in parts(schema):
        assert part.keys() <= JSON_SCHEMA_PROPS, path
        assert part.keys() <= OF_TYPE[part["type"]] | ANYWHERE, path
        assert part.get("format", "date-time") in FORMATS, path


def test_mappings_have_named_or_free_keys_but_not_both(schema):
    for path, part in parts(schema):
        assert not {"properties", "additionalProperties"} <= part.keys(), path
        assert isinstance(part.get("additionalProperties", {}), dict), path
        assert part["type"] != "array" or "items" in part, path


def test_required_fields_have_a_schema_and_no_default(schema):
    for path, part in parts(schema):
        for name in part.get("required", ()):
            assert "default" not in part["properties"][name], f"{path}.{name}"


def test_exclusive_bounds_are_booleans_beside_a_number(schema):
    for path, part in parts(schema):
        for bound in ("minimum", "maximum"):
            exclusive = f"exclusive{bound.capitalize()}"
            assert part.get(exclusive, True) is True, path
            assert exclusive not in part or bound in part, path


def test_bounds_let_every_whole_number_between_them_pass(schema):
    """The API server compares an integer, such as the default 0, with a bound that it has cut to an integer."""
    for path, part in parts(schema):
        lowest = part.get("minimum", 0)
        highest = part.get("maximum", 1)
        assert not part.get("exclusiveMaximum") or highest == int(highest), path
        assert not part.get("exclusiveMinimum") or lowest == int(lowest), path


def test_patterns_are_valid_re2(schema):
    patterns = {part["pattern"] for _, part in parts(schema) if "pattern" in part}
    assert patterns
    for pattern in patterns:
        assert not NOT_IN_RE2.search(pattern), pattern
        assert pattern[0] == "^"
        assert pattern[-1] == "$"
        re.compile(pattern)


def test_keys_of_list_maps_are_required_members(schema):
    maps = [
        part for _, part in parts(schema) if part.get("x-kubernetes-list-type") == "map"
    ]
    assert maps
    for part in maps:
        for key in part["x-kubernetes-list-map-keys"]:
            assert key in part["items"]["required"]


def test_list_items_have_no_defaults(schema):
    """GitOps tools would report defaults inside list items as drift."""
    for path, part in parts(schema):
        for inner_path, item in parts(part["items"]) if "items" in part else ():
            assert "default" not in item, f"{path}{inner_path}"


def test_rules_are_bounded_and_their_messages_fit(schema):
    count = 0
    for path, part in parts(schema):
        for rule in part.get("x-kubernetes-validations", ()):
            count += 1
            assert 0 < len(rule["message"]) <= 2048, path
            assert "\n" not in rule["message"], path
            if "self.all(" in rule["rule"]:
                assert "maxProperties" in part or "maxItems" in part, path
            assert rule["rule"].count("(") == rule["rule"].count(")"), path
    assert count > 5


def test_rule_names_the_field_and_the_kind_of_mistake(schema):
    """The API server refuses a CRD with a path that its schema does not have, so the longest path is kept."""
    paths = {
        rule["message"].partition(":")[0]: rule.get("fieldPath")
        for _, part in parts(schema["properties"]["spec"])
        for rule in part.get("x-kubernetes-validations", ())
    }
    assert paths["maxSteps"] == ".maxSteps"
    assert paths["validation.uri"] == ".validation.uri"
    assert paths["limits.ephemeral-storage"] == ".limits['ephemeral-storage']"
    at_the_object = {name for name, path in paths.items() if path is None}
    # A rule about all keys of a mapping, and the rules about all fields of an object, are at their objects.
    assert {name.partition(" ")[0] for name in at_the_object} == {
        "every",
        "envFrom",
        "valueFrom",
        "volumes",
    }


def test_reason_is_written_if_the_api_server_would_not_add_it(schema):
    """Its default is FieldValueInvalid; in each of hundreds of rules it would take 8 KB of the CRD."""
    reasons = [
        rule["reason"]
        for _, part in parts(schema["properties"]["spec"])
        for rule in part.get("x-kubernetes-validations", ())
        if "reason" in rule
    ]
    assert set(reasons) == {"FieldValueForbidden", "FieldValueDuplicate"}


def test_strings_lists_and_mappings_of_the_spec_are_bounded(schema):
    for path, part in parts(schema["properties"]["spec"], "spec"):
        bound = {"string": "maxLength", "array": "maxItems"}.get(part["type"])
        if part["type"] == "object" and "additionalProperties" in part:
            bound = "maxProperties"
        assert bound is None or bound in part or "enum" in part, path


class Node(BaseModel):
    child: "Node | None" = None


class Tags(BaseModel):
    it: set[str]


class Pair(BaseModel):
    it: tuple[int, str]


class Either(BaseModel):
    it: int | str


class Anything(BaseModel):
    it: Any


class Unbounded(BaseModel):
    it: dict[Annotated[str, StringConstraints(pattern="^a$")], int]


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]


class Pet(BaseModel):
    it: Annotated[Cat | Dog, Field(discriminator="kind")]


class EnumKeys(BaseModel):
    it: dict[Literal["a", "b"], int] = Field(max_length=2)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Node, ".child: Node contains itself"),
        (Tags, "$.it: uniqueItems"),
        (Pair, "$.it: "),
        (Either, "$.it: is one of several types"),
        (Anything, "$.it: has no type"),
        (Unbounded, "$.it: a rule for every key needs maxProperties"),
        (Pet, "$.it: "),
        (EnumKeys, "$.it: "),
    ],
)
def test_unsupported_schema_is_rejected_with_its_path(model, message):
    with pytest.raises(UnsupportedSchema) as error:
        structural(model.model_json_schema())
    assert message in str(error.value)


class Wide(BaseModel):
    above: float = Field(gt=0, lt=1)
    maybe: int | None = None
    only: Literal["x"] = "x"
    names: dict[
        Annotated[str, StringConstraints(pattern=r"^\S'$", max_length=9)], int
    ] = Field(max_length=3)


def test_converted_schema_keeps_all_constraints():
    properties = structural(Wide.model_json_schema())["properties"]
    assert properties["above"] == {
        "type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 1, "exclusiveMaximum": True,
    }  # fmt: skip
    assert properties["maybe"] == {"type": "integer"}
    assert properties["only"] == {"type": "string", "enum": ["x"], "default": "x"}
    assert properties["names"]["additionalProperties"] == {"type": "integer"}
    assert [
        rule["rule"] for rule in properties["names"]["x-kubernetes-validations"]
    ] == [
        r"self.all(key, size(key) <= 9 && key.matches('^\\S\'$'))",
    ]


def test_default_of_an_object_has_only_defaults_of_its_fields(schema):
    """No manager owns another value, so no later manifest removes it: it stays beside a field that excludes it."""
    differing = [
        f"{path}.{name}"
        for path, part in parts(schema["properties"]["spec"], "spec")
        if isinstance(part.get("default"), dict)
        for name, value in part["default"].items()
        if part.get("properties", {}).get(name, {}).get("default") != value
    ]
    assert differing == []
