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


@dataclass(frozen=True)
class Wish:
    """What is known of a stage when its place is chosen."""

    pool: str
    """The kind of node the stage is made for: control, training, eval, inference."""
    gpu: bool
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()


@dataclass(frozen=True)
class PodPlacement:
    """The part of a pod that says where it may run."""

    capacity: str
    node_selector: dict[str, str]
    tolerations: tuple[Toleration, ...]


GPU_TOLERATION = Toleration(key="nvidia.com/gpu", operator="Exists", effect="NoSchedule")


def own_choice(wish: Wish) -> tuple[dict[str, str], tuple[Toleration, ...]]:
    """Give the pool's label unless the user named labels, and the tolerations of the user and of GPU nodes."""
    selector = wish.node_selector or {"workload": wish.pool}
    return dict(selector), (*wish.tolerations, *((GPU_TOLERATION,) if wish.gpu else ()))
