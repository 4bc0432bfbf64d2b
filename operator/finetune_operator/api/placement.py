"""Kinds of capacity, and what marks their nodes. A placement is one line of NODE_CLASSES."""

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from finetune_trainer.contract import ContractModel


class Toleration(ContractModel):
    """A taint that the pod does not mind."""

    key: str = Field(min_length=1, max_length=316)
    """The taint's key."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """Equal compares the value; Exists takes any."""
    value: str | None = Field(default=None, max_length=63)
    """The taint's value, with operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The taint's effect; absent: all."""


class NodeClass(ContractModel):
    """What marks a kind of node on this cluster."""

    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that such a node has."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints that such a node has."""


SPOT_TAINT = Toleration(key="spot", operator="Equal", value="true", effect="NoSchedule")


class PlacementDefaults(ContractModel):
    """What the words of a manifest mean on this cluster; set by the platform team, not by a pipeline."""

    pools: dict[str, NodeClass] = Field(default_factory=dict)
    """By what a stage is made for: control, training, eval, inference. Absent: any node."""
    on_demand: NodeClass = NodeClass()
    """Nodes that the cloud does not take back."""
    spot: NodeClass = NodeClass(tolerations=(SPOT_TAINT,))
    """Nodes that are cheap because the cloud may take them back at short notice."""


NODE_CLASSES: dict[str, Callable[[PlacementDefaults], NodeClass]] = {
    "on-demand": lambda defaults: defaults.on_demand,  # the pod does not tolerate the taint of spot nodes
    "spot": lambda defaults: defaults.spot,
}


def _check_capacity(value: str) -> str:
    if value not in NODE_CLASSES:
        raise ValueError(f"must be one of {', '.join(sorted(NODE_CLASSES))}")
    return value


Capacity = Annotated[str, AfterValidator(_check_capacity), Field(json_schema_extra={"enum": sorted(NODE_CLASSES)})]
