"""What a placement is asked and what it answers."""

from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from finetune_trainer.contract import Contract


class Toleration(Contract):
    """A taint that the pod does not mind."""

    key: str = Field(min_length=1, max_length=316)
    """The taint's key."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """Equal compares the value; Exists takes any."""
    value: str | None = Field(default=None, max_length=63)
    """The taint's value, with operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The taint's effect; absent: all."""


class NodeClass(Contract):
    """What marks a kind of node on this cluster."""

    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that such a node has."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints that such a node has."""


SPOT_TAINT = Toleration(key="spot", operator="Equal", value="true", effect="NoSchedule")


class Preset(Contract):
    """What the words of a manifest mean on this cluster; whoever runs the operator decides, and no pipeline."""

    pools: dict[str, NodeClass] = Field(default_factory=dict)
    """By what a stage is made for: control, training, eval, inference. Absent: any node."""
    on_demand: NodeClass = NodeClass()
    """Nodes that nobody takes away."""
    spot: NodeClass = NodeClass(tolerations=(SPOT_TAINT,))
    """Nodes that are cheap because they may be taken away at short notice."""


@dataclass(frozen=True)
class Wish:
    """What is known of a stage when its place is chosen."""

    pool: str
    """The kind of node the stage is made for: control, training, eval, inference."""
    gpu: bool
    preset: Preset = field(default_factory=Preset)
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()


@dataclass(frozen=True)
class PodPlacement:
    """The part of a pod that says where it may run."""

    capacity: str
    node_selector: dict[str, str]
    tolerations: tuple[Toleration, ...]


GPU_TOLERATION = Toleration(key="nvidia.com/gpu", operator="Exists", effect="NoSchedule")


def placed(capacity: str, wish: Wish, nodes: NodeClass) -> PodPlacement:
    """Join what a capacity class asks for with the pool's labels, unless the user named labels, and all tolerations."""
    pool = wish.preset.pools.get(wish.pool, NodeClass())
    selector = {**nodes.node_selector, **(wish.node_selector or pool.node_selector)}
    gpu = (GPU_TOLERATION,) if wish.gpu else ()
    return PodPlacement(capacity, selector, (*wish.tolerations, *pool.tolerations, *nodes.tolerations, *gpu))
