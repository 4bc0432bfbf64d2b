"""Node classes: the labels, taints and devices of each class of node."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from typing_extensions import override

from testcluster.errors import UsageError

_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_NODE_SPEC = re.compile(
    rf"(?P<capacity>[a-z]+)(?:@(?P<workload>{_LABEL}))?(?::(?P<count>\d{{1,9}}))?"
)
NAME = "finetune.dev/node"
"""Label with the name of a node in this program; its Node object may have another name."""
CONTROL_PLANE = "control-plane"
"""The machine of the API server. It is not a node, but it can be paused and partitioned like one."""
MAX_NODES = 32
"""Maximum number of nodes of a cluster. Each runs its own containerd and kubelet, about 150 MB."""


@dataclass(frozen=True)
class Taint:
    """A taint of a Node object."""

    key: str
    value: str
    effect: str

    @override
    def __str__(self) -> str:
        return f"{self.key}={self.value}:{self.effect}"


@dataclass(frozen=True)
class NodeClass:
    """The properties that all nodes of a class share."""

    capacity: str
    workload: str
    taints: tuple[Taint, ...] = ()
    devices: dict[str, int] = field(default_factory=dict)


NODE_CLASSES: dict[str, NodeClass] = {
    "ondemand": NodeClass("on-demand", "control"),
    "spot": NodeClass("spot", "training", (Taint("spot", "true", "NoSchedule"),)),
    "gpu": NodeClass(
        "on-demand",
        "training",
        (Taint("nvidia.com/gpu", "present", "NoSchedule"),),
        {"nvidia.com/gpu": 1},
    ),
}


@dataclass(frozen=True)
class Node:
    """A node: its name, its class, its workload label."""

    name: str
    kind: str
    workload: str

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels: name, capacity class, and the workload that generic placement of the operator selects."""
        return {
            NAME: self.name,
            "finetune.dev/capacity": NODE_CLASSES[self.kind].capacity,
            "workload": self.workload,
        }

    @property
    def taints(self) -> tuple[Taint, ...]:
        """Return the taints that the node registers with."""
        return NODE_CLASSES[self.kind].taints

    @property
    def devices(self) -> dict[str, int]:
        """Return the extended resources to advertise, as numbers; there is no device behind them."""
        return NODE_CLASSES[self.kind].devices


def parse(classes: str, taken: frozenset[str] = frozenset()) -> list[Node]:
    """Parse `ondemand,spot:3,gpu:1` into nodes. Raises UsageError for an unknown class or too many nodes.

    `ondemand@inference` sets the workload label. Names in `taken` are not used again. `none` means no nodes.
    """
    if classes == "none":
        return []
    classes_and_counts = [_parse_class(text) for text in classes.split(",")]
    total = sum(count for *_, count in classes_and_counts) + len(taken)
    if total > MAX_NODES:
        raise UsageError(
            f"--nodes: {total} nodes; at most {MAX_NODES} fit on one machine (--kwok creates thousands)"
        )
    names = Counter(name.rpartition("-")[0] for name in taken)
    return [
        Node(_free_name(kind, names, taken), kind, workload)
        for kind, workload, count in classes_and_counts
        for _ in range(count)
    ]


def _parse_class(text: str) -> tuple[str, str, int]:
    match = _NODE_SPEC.fullmatch(text.strip())
    if not match or match["capacity"] not in NODE_CLASSES:
        raise UsageError(
            f"--nodes: {text!r} is not a node class; write {', '.join(NODE_CLASSES)}, as in ondemand,spot:3"
        )
    kind = match["capacity"]
    return (
        kind,
        match["workload"] or NODE_CLASSES[kind].workload,
        int(match["count"] or 1),
    )


def _free_name(kind: str, used: Counter[str], taken: frozenset[str]) -> str:
    while True:
        used[kind] += 1
        name = f"{kind}-{used[kind]}"
        if name not in taken:
            return name
