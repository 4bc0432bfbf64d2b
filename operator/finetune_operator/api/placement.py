"""Capacity types, and the labels and taints of their nodes. A new capacity type is one line of NODE_CLASSES."""

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from finetune_trainer.contract import ContractModel


class Toleration(ContractModel):
    """A taint that the pod tolerates."""

    key: str = Field(min_length=1, max_length=316)
    """Key of the taint."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """Equal compares the value. Exists matches any value."""
    value: str | None = Field(default=None, max_length=63)
    """Value of the taint, for operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint. Absent: all effects."""


class NodeClass(ContractModel):
    """Labels and taints of one class of nodes on this cluster."""

    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of these nodes."""
    tolerations: tuple[Toleration, ...] = ()
    """Tolerations for the taints of these nodes."""


SPOT_TAINT = Toleration(key="spot", operator="Equal", value="true", effect="NoSchedule")


class PlacementDefaults(ContractModel):
    """Meaning of pools and capacity types on this cluster. Set by the platform team, not by a pipeline."""

    pools: dict[str, NodeClass] = Field(default_factory=dict)
    """Nodes for each kind of stage: control, training, eval, inference. Absent: any node."""
    on_demand: NodeClass = NodeClass()
    """Nodes that the cloud provider does not reclaim."""
    spot: NodeClass = NodeClass(tolerations=(SPOT_TAINT,))
    """Cheaper nodes that the cloud provider may reclaim at short notice."""


NODE_CLASSES: dict[str, Callable[[PlacementDefaults], NodeClass]] = {
    "on-demand": lambda defaults: defaults.on_demand,  # no toleration: the taint of spot nodes keeps the pod away
    "spot": lambda defaults: defaults.spot,
}


def _check_capacity(value: str) -> str:
    if value not in NODE_CLASSES:
        raise ValueError(f"must be one of {', '.join(sorted(NODE_CLASSES))}")
    return value


Capacity = Annotated[str, AfterValidator(_check_capacity), Field(json_schema_extra={"enum": sorted(NODE_CLASSES)})]
