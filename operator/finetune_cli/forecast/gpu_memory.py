"""The memory of the GPUs that a manifest or the operator's placement asks for, by the labels of their nodes."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from finetune_operator.api.placement import CAPACITIES, PlacementDefaults
from finetune_operator.api.stages.base import StageSpec
from finetune_operator.core.capacity.nodes import offers, pod_placement

MIB = 1 << 20
GIB = 1 << 30
MEMORY_LABELS = ("nvidia.com/gpu.memory", "karpenter.k8s.aws/instance-gpu-memory")
"""Labels with the memory of a node's GPU in MiB: of NVIDIA's GPU feature discovery, and of Karpenter."""
NAME_LABELS = (
    "nvidia.com/gpu.product",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
    "k8s.amazonaws.com/accelerator",
)
"""Labels with the name of a node's GPU."""
SIZE_IN_NAME = re.compile(r"(\d+)\s?gb", re.IGNORECASE)
"""The memory in a name: NVIDIA-A100-SXM4-40GB, or nvidia.com/mig-3g.40gb for a slice of a GPU."""
# Names of a GPU that exists with several sizes, such as A100, are not here: they say nothing without the size.
GIGABYTES = {
    "t4": 16,
    "l4": 24,
    "a10": 24,
    "a10g": 24,
    "a30": 24,
    "a40": 48,
    "l40": 48,
    "l40s": 48,
    "h200": 141,
}
"""A word of a GPU's name -> its memory, by NVIDIA's data sheets."""


class Gpu(NamedTuple):
    """GPUs on which a stage may run."""

    place: str
    """What names them, for a message."""
    size: int
    """Bytes of memory of each."""


def gpus_of(stage: StageSpec, defaults: PlacementDefaults | None) -> Iterator[Gpu]:
    """Yield the GPUs that the stage's resources, labels and node classes name, as far as their memory is known."""
    for resource in stage.pod.resources.accelerator_names:
        slice_size = _size_in(resource)
        if slice_size:
            yield Gpu(resource, slice_size)
    placement = defaults or PlacementDefaults()
    known: set[Gpu] = set()
    for capacity in CAPACITIES:
        if stage.placement.capacity not in (capacity, "Auto"):
            continue
        for offer in offers(stage, capacity, placement):
            labels = pod_placement(
                stage, capacity, offer.node_class or "", placement
            ).node_selector
            gpu = _gpu_with(labels, offer.node_class)
            if gpu and gpu not in known:
                known.add(gpu)
                yield gpu


def _gpu_with(labels: Mapping[str, str], node_class: str | None) -> Gpu | None:
    """Return the GPU of nodes with these labels; None if its memory is not known."""
    for label in MEMORY_LABELS:
        value = labels.get(label, "")
        if value.isdigit():
            return Gpu(_place(label, value, node_class), int(value) * MIB)
    for label in NAME_LABELS:
        value = labels.get(label, "")
        size = _size_in(value) or _size_by_name(value)
        if size:
            return Gpu(_place(label, value, node_class), size)
    return None


def _place(label: str, value: str, node_class: str | None) -> str:
    place = f"{label}: {value}"
    if node_class:
        return f"node class {node_class} ({place})"
    return place


def _size_in(name: str) -> int:
    """Return the bytes that a name has in it, the last of several; 0 without."""
    sizes = SIZE_IN_NAME.findall(name)
    return int(sizes[-1]) * GIB if sizes else 0


def _size_by_name(name: str) -> int:
    for word in re.split(r"[^a-z0-9]+", name.lower()):
        if word in GIGABYTES:
            return GIGABYTES[word] * GIB
    return 0
