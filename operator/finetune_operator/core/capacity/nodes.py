"""The nodes of a stage: the node classes that suit it, and the labels and tolerations of a pod on them. Pure."""

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
from finetune_operator.core.capacity.decision import NodeGroup, Offer
from finetune_operator.core.capacity.policy import PRIOR_RATE

# Clouds taint GPU nodes with it, so that other pods stay away.
GPU_TOLERATION = Toleration(
    key="nvidia.com/gpu", operator="Exists", effect="NoSchedule"
)


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


def offers(
    spec: StageSpec, capacity: str, defaults: PlacementDefaults
) -> Sequence[Offer]:
    """Return the node classes of a capacity type on which the stage can run, at least one.

    Without a configured class, it is any node of the capacity type, at an unknown price. The price is for all pods of
    an attempt, and so are the interruptions.
    """
    classes = [
        Offer(
            NodeGroup(capacity, node_class.name),
            _price(node_class, spec),
            _interruptions_per_hour(node_class, spec),
        )
        for node_class in _suitable_classes(spec, capacity, defaults)
    ]
    return classes or [Offer(NodeGroup(capacity))]


def _suitable_classes(
    spec: StageSpec, capacity: str, defaults: PlacementDefaults
) -> Iterator[NodeClass]:
    """Yield the classes that have what the stage asks for, and no label that its own node selector excludes."""
    wanted = spec.pod.node_selector
    accelerators = spec.pod.resources.accelerator_names
    for node_class in defaults.node_classes:
        if node_class.capacity != capacity:
            continue
        # A stage without accelerators must not occupy a node that has some.
        fits = node_class.accelerator is None
        if accelerators:
            fits = node_class.accelerator in accelerators
        labels = node_class.node_selector.items()
        if fits and all(wanted.get(key, value) == value for key, value in labels):
            yield node_class


def _price(node_class: NodeClass, spec: StageSpec) -> Decimal | None:
    if node_class.price is None:
        return None
    # The price of a class is for one accelerator, or for a node without accelerators.
    return node_class.price * max(1, spec.pod.resources.accelerators) * spec.pods


def _interruptions_per_hour(node_class: NodeClass, spec: StageSpec) -> float | None:
    rate = node_class.interruptions_per_hour
    if spec.pods == 1:
        return rate
    # The loss of any of its pods interrupts the attempt.
    return spec.pods * (PRIOR_RATE if rate is None else rate)


def pod_placement(
    spec: StageSpec, capacity: str, node_class: str, defaults: PlacementDefaults
) -> PodPlacement:
    """Return the labels of the capacity type, the class, and the user or else the pool, and all else of the three."""
    # Another version of the operator may have recorded a capacity type that this one does not know.
    nodes_of = CAPACITIES.get(capacity, CAPACITIES[ON_DEMAND])
    nodes = nodes_of(defaults)
    pool = defaults.pools.get(spec.pool, Nodes())
    # A class that the platform team has removed since the attempt was recorded has no labels any more.
    classes: dict[str, Nodes] = {known.name: known for known in defaults.node_classes}
    own = classes.get(node_class, Nodes())
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
    excluded = {
        *nodes.excluded_labels.items(),
        *pool.excluded_labels.items(),
        *own.excluded_labels.items(),
    }
    # A pod that asks for a label and excludes it would find no node: the selector is the user's word.
    excluded -= selector.items()
    annotations = {**nodes.annotations, **pool.annotations, **own.annotations}
    return PodPlacement(
        capacity, selector, tolerations, tuple(sorted(excluded)), annotations
    )
