"""The environment variables of a stage's container, and the rules for them.

The operator reads no Secret: it passes on only the name and key of a Secret. The kubelet reads the value when the
container starts.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import StringConstraints

from finetune_operator.api.names import (
    DataKey,
    FieldPath,
    ObjectName,
    VariableName,
    VariablePrefix,
)
from finetune_operator.api.rules import Rule, WithRules
from finetune_trainer.contract import ContractModel
from finetune_trainer.contract.environment import (
    GIT_SHA,
    INSECURE_REGISTRIES,
    METRICS_PORT,
)

# etcd stores an object of at most 1.5 MiB by default, and a pipeline has five stages and a status.
MAX_TEXT = 65536
"""Characters of env, command and args of one pod together."""
# The operator sets the variables of the stage contract itself. A user's value would break the contract.
RESERVED_PREFIX = "FINETUNE_"
USER_SETTABLE = (METRICS_PORT, GIT_SHA, INSECURE_REGISTRIES)

Argument = Annotated[str, StringConstraints(max_length=4096)]


class KeyRef(ContractModel):
    """A key of a Secret or ConfigMap of the namespace."""

    name: ObjectName
    """Name of the object."""
    key: DataKey
    """Key in the object."""
    optional: bool | None = None
    """Whether the pod starts without the object or the key. Absent: it does not."""


class ObjectRef(ContractModel):
    """A Secret or ConfigMap of the namespace."""

    name: ObjectName
    """Name of the object."""
    optional: bool | None = None
    """Whether the pod starts without the object. Absent: it does not."""


class FieldRef(ContractModel):
    """A field of the pod."""

    field_path: FieldPath
    """Path of the field, for example spec.nodeName."""


def exactly_one(field: str, names: tuple[str, ...]) -> Rule:
    """Return the rule that a single field of these is set."""
    return Rule(
        field=field,
        message=f"set exactly one of {', '.join(names)}",
        cel="["
        + ", ".join(f"has(self.{name})" for name in names)
        + "].filter(set, set).size() == 1",
        is_valid=lambda data: sum(name in data for name in names) == 1,
    )


class ValueFrom(WithRules):
    """Source of a variable's value. A local run takes the variable from your environment instead."""

    rules: ClassVar[tuple[Rule, ...]] = (
        exactly_one("valueFrom", ("secretKeyRef", "configMapKeyRef", "fieldRef")),
    )

    secret_key_ref: KeyRef | None = None
    """A key of a Secret. The kubelet reads it; the operator cannot."""
    config_map_key_ref: KeyRef | None = None
    """A key of a ConfigMap."""
    field_ref: FieldRef | None = None
    """A field of the pod."""


class EnvVar(WithRules):
    """An environment variable."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="value",
            message="set value or valueFrom, not both",
            reason="FieldValueForbidden",
            cel="!(has(self.value) && has(self.valueFrom))",
            is_valid=lambda data: not ("value" in data and "valueFrom" in data),
        ),
    )

    name: VariableName
    """Name of the variable."""
    value: Argument | None = None
    """Value of the variable. $(NAME) is not expanded, so that the value means the same in a local run."""
    value_from: ValueFrom | None = None
    """Source of the value, instead of value."""


class EnvFrom(WithRules):
    """All keys of a Secret or ConfigMap as variables. A local run uses your environment instead."""

    rules: ClassVar[tuple[Rule, ...]] = (
        exactly_one("envFrom", ("secretRef", "configMapRef")),
    )

    prefix: VariablePrefix | None = None
    """Text before the name of each variable."""
    secret_ref: ObjectRef | None = None
    """A Secret. The kubelet reads it; the operator cannot."""
    config_map_ref: ObjectRef | None = None
    """A ConfigMap."""


RESERVED_NAMES = Rule(
    field="env",
    message=f"names with the prefix FINETUNE_ are reserved for the stage contract; only {', '.join(USER_SETTABLE[:-1])}"
    f" and {USER_SETTABLE[-1]} may be set",
    reason="FieldValueForbidden",
    cel=f"!has(self.env) || self.env.all(one, !one.name.startsWith('FINETUNE_') || one.name in {list(USER_SETTABLE)})",
    is_valid=lambda data: all(
        variable["name"] in USER_SETTABLE
        or not variable["name"].startswith(RESERVED_PREFIX)
        for variable in data.get("env", ())
    ),
)


ENV_LENGTH = (
    "self.env.map(one, size(one.name) + (has(one.value) ? size(one.value) : 0)).sum()"
)


def text_is_bounded(*more: str) -> Rule:
    """Return the rule that the texts of env and of these lists have a bounded length together."""
    lengths = {"env": ENV_LENGTH} | {
        name: f"self.{name}.map(word, size(word)).sum()" for name in more
    }
    total = " + ".join(
        f"(has(self.{name}) ? {length} : 0)" for name, length in lengths.items()
    )
    return Rule(
        field="env",
        message=f"{', '.join(lengths)} have more than {MAX_TEXT} characters together: move long texts into a Secret"
        " (envFrom), the image or a volume",
        cel=f"{total} <= {MAX_TEXT}",
        is_valid=lambda data: sum(map(len, _words(data, more))) <= MAX_TEXT,
    )


def _words(data: Mapping[str, Any], more: Iterable[str]) -> Iterator[str]:
    for variable in data.get("env", ()):
        yield from (variable["name"], variable.get("value", ""))
    for name in more:
        yield from data.get(name, ())
