"""Placement of a pod: node labels and tolerations from its node class, its pool and the user's spec."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from finetune_operator.api.placement import (
    CAPACITIES,
    ON_DEMAND,
    NodeClass,
    Nodes,
    PlacementDefaults,
    Toleration,
)
from finetune_operator.api.stages.base import StageSpec
from finetune_operator.core.auto import PRIOR_RATE, Offer

GPU_TOLERATION = Toleration(key="nvidia.com/gpu", operator="Exists", effect="NoSchedule")


@dataclass(frozen=True)
class PodPlacement:
    """The fields of a pod that restrict its nodes."""

    capacity: str = ""
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    excluded_labels: tuple[tuple[str, str], ...] = ()
    """Labels that the node must not have."""
    annotations: dict[str, str] = field(default_factory=dict)
    """Annotations of a Job's pod. The user's replace them."""


def offers(spec: StageSpec, capacity: str, defaults: PlacementDefaults) -> Sequence[Offer]:
    """Return the node classes of a capacity type on which the stage can run, at least one.

    Without a configured class it is any node of the capacity type, at an unknown price. An attempt has the price of
    all of its pods, and the interruptions of all of their nodes.
    """
    found = [
        Offer(one.name, _price(one, spec), _interruptions_per_hour(one, spec))
        for one in _suitable_classes(spec, capacity, defaults)
    ]
    return found or [Offer(any_nodes(capacity))]


def any_nodes(capacity: str) -> str:
    """Return what stands for a node class where none is configured; no node class has a name with a space."""
    return f"any {capacity}"


def words_for(node_class: str) -> str:
    """Return the name of a node class, or of the capacity type where it stands for any node of that."""
    return node_class.removeprefix("any ")


def class_name(offer: Offer) -> str | None:
    """Return the name of the offer's node class, or None where it is any node of the capacity type."""
    return None if " " in offer.node_class else offer.node_class


def _suitable_classes(
    spec: StageSpec, capacity: str, defaults: PlacementDefaults
) -> Iterator[NodeClass]:
    """Yield the classes that have what the stage asks for, and no label that its own node selector excludes."""
    wanted, accelerators = spec.pod.node_selector, spec.pod.resources.accelerator_names
    for one in defaults.node_classes:
        fits = one.accelerator in accelerators if accelerators else one.accelerator is None
        labels = one.node_selector.items()
        if (
            one.capacity == capacity
            and fits
            and all(wanted.get(key, value) == value for key, value in labels)
        ):
            yield one


def _price(one: NodeClass, spec: StageSpec) -> Decimal | None:
    return (
        None
        if one.price is None
        else one.price * max(1, spec.pod.resources.accelerators) * spec.pods
    )


def _interruptions_per_hour(one: NodeClass, spec: StageSpec) -> float | None:
    if spec.pods == 1:
        return one.interruptions_per_hour
    return spec.pods * (
        PRIOR_RATE if one.interruptions_per_hour is None else one.interruptions_per_hour
    )


def pod_placement(
    spec: StageSpec, capacity: str, node_class: str, defaults: PlacementDefaults
) -> PodPlacement:
    """Return the labels of the capacity type, the class, and the user or else the pool, and all else of the three."""
    # Another version of the operator may have recorded a capacity type that this one does not know.
    nodes_of = CAPACITIES.get(capacity, CAPACITIES[ON_DEMAND])
    nodes, pool = nodes_of(defaults), defaults.pools.get(spec.pool, Nodes())
    # A class that the platform team has removed since the attempt was recorded has no labels any more.
    own = next((one for one in defaults.node_classes if one.name == node_class), Nodes())
    selector = {
        **nodes.node_selector,
        **(spec.pod.node_selector or pool.node_selector),
        **own.node_selector,
    }
    gpu = (GPU_TOLERATION,) if spec.pod.resources.accelerators > 0 else ()
    tolerations = (
        *spec.pod.tolerations,
        *pool.tolerations,
        *nodes.tolerations,
        *own.tolerations,
        *gpu,
    )
    excluded = {label for one in (nodes, pool, own) for label in one.excluded_labels.items()}
    # A pod that asks for a label and excludes it would find no node: the selector is the user's word.
    excluded -= selector.items()
    annotations = {**nodes.annotations, **pool.annotations, **own.annotations}
    return PodPlacement(capacity, selector, tolerations, tuple(sorted(excluded)), annotations)
