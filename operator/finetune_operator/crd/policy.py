"""The rules between fields as a ValidatingAdmissionPolicy, which a write of the status does not run.

The API server runs every rule in the schema of a custom resource at each write, also at a write of the status, which
cannot break a rule of the spec. A policy names the resource and not its subresource. The schema is checked before any
policy, so that a policy only ever sees values of the right types.

The subresource scale adds or changes a part of the spec, and a policy about it sees no pipeline. So the rules about
that part stay in the schema, too.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from finetune_operator.api.group import GROUP, PLURAL, VERSION
from finetune_operator.crd.structural import (
    OLD_SELF,
    RULES,
    Schema,
    UnsupportedSchema,
    cel_literal,
    mapped,
)

NAME = f"{PLURAL}.{GROUP}"
"""Name of the policy, of its binding, and of the CustomResourceDefinition."""
ROOT = "spec"
"""Path of the spec, and name of the list of its own rules."""
SCALED = "self.deploy"
"""The part of the spec that the subresource scale writes, in CEL."""
OTHER_ERRORS = (
    "spec: breaks too many rules for one message: run finetune validate on the manifest"
)
"""Message if the messages of the broken rules are too long for the API server, which cuts none."""


def without_rules(schema: Schema) -> Schema:
    """Return the schema without the rules between fields that no request but a write of the pipeline can break."""
    own = {key: value for key, value in schema.items() if key != RULES}
    kept = rules_of_scale(schema.get(RULES, ()))
    if kept:
        own[RULES] = kept
    return mapped(own, without_rules)


def rules_of_scale(rules: Iterable[Schema]) -> list[Schema]:
    """Return the rules that a request to the subresource scale may break."""
    return [rule for rule in rules if SCALED in rule["rule"]]


def policy(spec: Schema) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the policy with the rules in the schema of a spec, and its binding.

    A change that leaves the spec as it is runs no rule, and a part that stays as it is breaks none. So a pipeline from
    before a new rule can be cancelled, lose its finalizers, and be edited elsewhere, as with rules in the schema.
    """
    errors = {
        path.removeprefix(f"{ROOT}.").replace(".", "_"): _list_of_errors(
            path, expressions
        )
        for path, expressions in _errors_by_part(spec).items()
    }
    variables = [
        {"name": name, "expression": expression} for name, expression in errors.items()
    ]
    lists = " + ".join(f"variables.{name}" for name in errors)
    variables.append(
        {"name": "errors", "expression": f"({lists}).filter(error, error != '')"}
    )
    content = {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [_matched()]},
        "matchConditions": [
            {
                "name": "spec-changes",
                "expression": "request.operation == 'CREATE' || object.spec != oldObject.spec",
            }
        ],
        "variables": variables,
        "validations": [
            {
                "expression": "size(variables.errors) == 0",
                "messageExpression": "variables.errors.join('; ')",
                "message": OTHER_ERRORS,
                "reason": "Invalid",
            }
        ],
    }
    binding = {"policyName": NAME, "validationActions": ["Deny"]}
    return (
        _object("ValidatingAdmissionPolicy", content),
        _object("ValidatingAdmissionPolicyBinding", binding),
    )


def _list_of_errors(path: str, expressions: list[str]) -> str:
    # A line for each rule.
    errors = "[\n" + ",\n".join(expressions) + "\n]"
    if path == ROOT:
        return errors
    members = path.removeprefix(ROOT).replace(".", ".?")
    unchanged = f"object.spec{members} == oldObject.spec{members}"
    return f"request.operation == 'UPDATE' && {unchanged} ? [] : {errors}"


def _object(kind: str, content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": kind,
        "metadata": {"name": NAME},
        "spec": dict(content),
    }


def _matched() -> dict[str, list[str]]:
    # Not finetunepipelines/status.
    return {
        "apiGroups": [GROUP],
        "apiVersions": [VERSION],
        "operations": ["CREATE", "UPDATE"],
        "resources": [PLURAL],
    }


def _errors_by_part(spec: Schema) -> dict[str, list[str]]:
    """Return the path of each object and list with rules of its own -> an expression for each of these rules."""
    expressions: dict[str, list[str]] = {}
    for part, expression in _errors(spec, _Place("object.spec", ROOT)):
        expressions.setdefault(part, []).append(expression)
    return expressions


def _errors(schema: Schema, place: "_Place") -> Iterator[tuple[str, str]]:
    """Yield the path of a part, and the expression of a rule on it; an element belongs to its list."""
    for rule in schema.get(RULES, ()):
        yield (place.elements_of or place).path, place.error(rule)
    for name, inner in schema.get("properties", {}).items():
        yield from _errors(inner, place.member(name))
    if "items" in schema:
        yield from _errors(schema["items"], place.elements())
    values = schema.get("additionalProperties")
    if isinstance(values, dict) and list(_errors(values, place)):
        raise UnsupportedSchema(
            place.path, "a rule for each value of a mapping cannot be a policy"
        )


@dataclass(frozen=True)
class _Place:
    """A part of the object, on which rules may be: at a path of members, and perhaps of one list's elements."""

    value: str
    """Its value in CEL. In a list, `self` is the element."""
    path: str
    """Its path for people; in a list, below the element."""
    guards: tuple[str, ...] = ()
    """Conditions, in CEL, of which each means that there is no such part."""
    elements_of: "_Place | None" = None
    """The list."""
    before: str = "oldObject.spec"
    """The value before an update, in CEL. It may be optional."""

    def member(self, name: str) -> "_Place":
        """Return a member of this part."""
        value = f"{self.value}.{name}"
        return replace(
            self,
            value=value,
            path=f"{self.path}.{name}",
            before=f"{self.before}.?{name}",
            guards=(*self.guards, f"!has({value})"),
        )

    def elements(self) -> "_Place":
        """Return the elements of this part, which is a list."""
        return _Place("self", "", elements_of=self)

    def _old_value(self) -> str:
        """Return the value before an update, in CEL: always optional, and none if the object is created."""
        if self.elements_of:
            raise UnsupportedSchema(
                self.path, "a rule about an element before an edit cannot be a policy"
            )
        before = self.before
        if self.path == ROOT:
            before = f"optional.of({before})"
        return f"(request.operation == 'UPDATE' ? {before} : optional.none())"

    def error(self, rule: Mapping[str, Any]) -> str:
        """Return the expression of a rule's message at this place; its value is empty if the rule holds."""
        holds = f"({rule['rule']})"
        if self.value != "self":
            # A rule says self. A list of the single value gives it this name.
            holds = f"[{self.value}].all(self, {rule['rule']})"
        if rule.get(OLD_SELF):
            holds = f"[{self._old_value()}].all(oldSelf, {holds})"
        condition = " || ".join([*self.guards, holds])
        if self.elements_of is None:
            message = cel_literal(f"{self.path}: {rule['message']}")
            return f"{condition} ? '' : {message}"
        elements = self.elements_of
        if elements.elements_of:
            raise UnsupportedSchema(
                self.path, "a rule in a list of lists cannot be a policy"
            )
        # The index of the first element that breaks the rule.
        index = f"string({elements.value}.map(self, {condition}).indexOf(false))"
        before = cel_literal(f"{elements.path}[")
        after = cel_literal(f"]{self.path}: {rule['message']}")
        all_hold = " || ".join(
            [*elements.guards, f"{elements.value}.all(self, {condition})"]
        )
        return f"{all_hold} ? '' : {before} + {index} + {after}"
