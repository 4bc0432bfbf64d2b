"""Where a pod may run: node labels and tolerations from its capacity, its pool and the user's wishes."""

from dataclasses import dataclass, field

from finetune_operator.api.placement import NODE_CLASSES, NodeClass, PlacementDefaults, Toleration

GPU_TOLERATION = Toleration(key="nvidia.com/gpu", operator="Exists", effect="NoSchedule")


@dataclass(frozen=True)
class PlacementRequest:
    """What is known of a stage when its nodes are chosen."""

    capacity: str
    pool: str
    """The kind of node the stage is made for: control, training, eval, inference."""
    gpu: bool
    defaults: PlacementDefaults = field(default_factory=PlacementDefaults)
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()


@dataclass(frozen=True)
class PodPlacement:
    """The part of a pod that says where it may run."""

    capacity: str
    node_selector: dict[str, str]
    tolerations: tuple[Toleration, ...]


def compose_placement(request: PlacementRequest) -> PodPlacement:
    """Join the labels of capacity and pool, unless the user named labels, and all tolerations."""
    nodes = NODE_CLASSES[request.capacity](request.defaults)
    pool = request.defaults.pools.get(request.pool, NodeClass())
    selector = {**nodes.node_selector, **(request.node_selector or pool.node_selector)}
    gpu = (GPU_TOLERATION,) if request.gpu else ()
    tolerations = (*request.tolerations, *pool.tolerations, *nodes.tolerations, *gpu)
    return PodPlacement(request.capacity, selector, tolerations)
