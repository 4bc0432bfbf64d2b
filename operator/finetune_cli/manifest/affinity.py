"""The affinity of a pod as an API server accepts it.

The schema of a pipeline passes an affinity on as it is. An API server would refuse it only in the Job of an attempt.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from finetune_operator.api.names import DNS_LABEL, LabelKey, LabelValue
from finetune_operator.api.rules import Detail, Rule, WithRules
from finetune_trainer.contract import ContractModel

NAMESPACE = Annotated[
    str, StringConstraints(min_length=1, max_length=63, pattern=DNS_LABEL)
]
# The limits of Kubernetes for the weight of a preferred term.
Weight = Annotated[int, Field(ge=1, le=100)]
NO_CEL = ""
"""These models are no part of the schema, so their rules are for the command line only."""
COMPARED = ("Gt", "Lt")
LISTED = ("In", "NotIn")
UNCOMPARED = ("Exists", "DoesNotExist")


def _wrong_values(data: Mapping[str, Any]) -> Iterator[Detail]:
    operator = data["operator"]
    values = data.get("values", ())
    if operator in LISTED and not values:
        yield ("values",), f"operator {operator} needs values: add values: […]"
    if operator in COMPARED and not _is_one_integer(values):
        message = (
            f'operator {operator} needs one integer in quotes, as in values: ["8"]'
        )
        yield ("values",), message
    if operator in UNCOMPARED and values:
        yield ("values",), f"operator {operator} takes no values: remove values"


def _is_one_integer(values: list[str]) -> bool:
    # Kubernetes compares the values of Gt and Lt as integers, although the API has them as strings.
    return len(values) == 1 and values[0].removeprefix("-").isdecimal()


VALUES = Rule(
    field="values",
    message="values must suit the operator",
    cel=NO_CEL,
    is_valid=lambda data: not any(_wrong_values(data)),
    details=_wrong_values,
)


class NodeRequirement(WithRules):
    """A condition on a label of a node."""

    rules: ClassVar[tuple[Rule, ...]] = (VALUES,)

    key: LabelKey
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    values: tuple[LabelValue, ...] = ()


class FieldRequirement(WithRules):
    """A condition on the name of a node."""

    # Kubernetes selects by no other field, and refuses lists of several names.
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="values",
            message="needs the name of one node, as in values: [NODE]",
            cel=NO_CEL,
            is_valid=lambda data: (
                data["operator"] not in LISTED or len(data["values"]) == 1
            ),
        ),
    )

    key: Literal["metadata.name"]
    operator: Literal["In", "NotIn"]
    values: tuple[str, ...] = ()


class NodeTerm(ContractModel):
    """Conditions on a node that hold together."""

    match_expressions: tuple[NodeRequirement, ...] = ()
    match_fields: tuple[FieldRequirement, ...] = ()


class NodeSelector(ContractModel):
    """Terms, of which a node must match at least one."""

    node_selector_terms: tuple[NodeTerm, ...] = Field(min_length=1)


class PreferredNodes(ContractModel):
    """Nodes that are preferred."""

    weight: Weight
    preference: NodeTerm


class NodeAffinity(ContractModel):
    """Nodes on which the pod may run, and nodes that are preferred."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    preferred_during_scheduling_ignored_during_execution: tuple[
        PreferredNodes, ...
    ] = ()


class LabelRequirement(WithRules):
    """A condition on a label of a pod or a namespace."""

    # Without Gt and Lt: Kubernetes has them for labels of nodes only.
    rules: ClassVar[tuple[Rule, ...]] = (VALUES,)

    key: LabelKey
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[LabelValue, ...] = ()


class LabelSelector(ContractModel):
    """Conditions on labels that hold together."""

    match_labels: dict[LabelKey, LabelValue] = Field(default_factory=dict)
    match_expressions: tuple[LabelRequirement, ...] = ()


KEY_LISTS = ("matchLabelKeys", "mismatchLabelKeys")


def _wrong_keys(data: Mapping[str, Any]) -> Iterator[Detail]:
    taken: set[str] = set()
    for field in KEY_LISTS:
        keys = data.get(field, ())
        # Kubernetes merges these keys into labelSelector, so they need it.
        if keys and "labelSelector" not in data:
            yield (field,), f"needs labelSelector: add labelSelector, or remove {field}"
        for key in keys:
            if key in taken:
                yield (field,), f"{key} is in both lists: keep it in one of them"
            taken.add(key)


class PodTerm(WithRules):
    """Pods on whose nodes, or away from whose nodes, the pod runs."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field=KEY_LISTS[0],
            message="keys of labels must be in one place only",
            cel=NO_CEL,
            is_valid=lambda data: not any(_wrong_keys(data)),
            details=_wrong_keys,
        ),
    )

    topology_key: LabelKey
    label_selector: LabelSelector | None = None
    namespace_selector: LabelSelector | None = None
    namespaces: tuple[NAMESPACE, ...] = ()
    match_label_keys: tuple[LabelKey, ...] = ()
    mismatch_label_keys: tuple[LabelKey, ...] = ()


class PreferredPods(ContractModel):
    """Pods that are preferred."""

    weight: Weight
    pod_affinity_term: PodTerm


class PodAffinity(ContractModel):
    """Required and preferred terms."""

    required_during_scheduling_ignored_during_execution: tuple[PodTerm, ...] = ()
    preferred_during_scheduling_ignored_during_execution: tuple[PreferredPods, ...] = ()


class Affinity(ContractModel):
    """The affinity of a pod."""

    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None
