"""Placement of a pod: node labels and tolerations from its capacity, its pool and the user's spec."""

from dataclasses import dataclass, field

from finetune_operator.api.placement import NODE_CLASSES, NodeClass, PlacementDefaults, Toleration

GPU_TOLERATION = Toleration(key="nvidia.com/gpu", operator="Exists", effect="NoSchedule")


@dataclass(frozen=True)
class PlacementRequest:
    """The inputs from which the placement of a stage's pod is composed."""

    capacity: str
    pool: str
    """Node pool of the stage: control, training, eval or inference."""
    gpu: bool
    defaults: PlacementDefaults = field(default_factory=PlacementDefaults)
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()


@dataclass(frozen=True)
class PodPlacement:
    """The fields of a pod that restrict its nodes."""

    capacity: str
    node_selector: dict[str, str]
    tolerations: tuple[Toleration, ...]


def compose_placement(request: PlacementRequest) -> PodPlacement:
    """Return the labels of the capacity and of the user, or else of the pool, and all tolerations."""
    nodes = NODE_CLASSES[request.capacity](request.defaults)
    pool = request.defaults.pools.get(request.pool, NodeClass())
    selector = {**nodes.node_selector, **(request.node_selector or pool.node_selector)}
    gpu = (GPU_TOLERATION,) if request.gpu else ()
    tolerations = (*request.tolerations, *pool.tolerations, *nodes.tolerations, *gpu)
    return PodPlacement(request.capacity, selector, tolerations)
