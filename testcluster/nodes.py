"""Kinds of nodes: what a node class means in labels, taints and devices."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from typing_extensions import override

from testcluster.errors import UsageError

_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_NODE_SPEC = re.compile(rf"(?P<capacity>[a-z]+)(?:@(?P<workload>{_LABEL}))?(?::(?P<count>\d{{1,9}}))?")
NAME = "finetune.dev/node"
"""Label of a node's name in this program; as a Node object it may be called otherwise."""
CONTROL_PLANE = "control-plane"
"""The machine of the API server; it is no node, but it can be frozen and cut off like one."""
MAX_NODES = 32
"""Nodes of one cluster; each is a containerd and a kubelet of its own, about 150 MB."""


@dataclass(frozen=True)
class Taint:
    """As Kubernetes has it."""

    key: str
    value: str
    effect: str

    @override
    def __str__(self) -> str:
        return f"{self.key}={self.value}:{self.effect}"


@dataclass(frozen=True)
class NodeClass:
    """What all nodes of a class have in common."""

    capacity: str
    workload: str
    taints: tuple[Taint, ...] = ()
    devices: dict[str, int] = field(default_factory=dict)


NODE_CLASSES: dict[str, NodeClass] = {
    "ondemand": NodeClass("on-demand", "control"),
    "spot": NodeClass("spot", "training", (Taint("spot", "true", "NoSchedule"),)),
    "gpu": NodeClass(
        "on-demand", "training", (Taint("nvidia.com/gpu", "present", "NoSchedule"),), {"nvidia.com/gpu": 1}
    ),
}


@dataclass(frozen=True)
class Node:
    """One node: its name, its labels and taints, and the devices it claims to have."""

    name: str
    kind: str
    workload: str

    @property
    def labels(self) -> dict[str, str]:
        """Give the labels that the operator's generic placement selects by, the capacity class, and its name here."""
        return {NAME: self.name, "finetune.dev/capacity": NODE_CLASSES[self.kind].capacity, "workload": self.workload}

    @property
    def taints(self) -> tuple[Taint, ...]:
        """Give the taints that the node registers with."""
        return NODE_CLASSES[self.kind].taints

    @property
    def devices(self) -> dict[str, int]:
        """Give the extended resources to advertise: a number each, nothing behind it."""
        return NODE_CLASSES[self.kind].devices


def parse(wishes: str, taken: frozenset[str] = frozenset()) -> list[Node]:
    """Read `ondemand,spot:3,gpu:1`. Raises Refused.

    `ondemand@inference` sets the workload label; names go on after those taken; `none` is a control plane alone.
    """
    if wishes == "none":
        return []
    found = [_read(wish) for wish in wishes.split(",")]
    total = sum(count for *_, count in found) + len(taken)
    if total > MAX_NODES:
        raise UsageError(f"--nodes: {total} nodes; at most {MAX_NODES} fit one machine (--kwok makes thousands)")
    names = Counter(name.rpartition("-")[0] for name in taken)
    return [Node(_free(kind, names, taken), kind, workload) for kind, workload, count in found for _ in range(count)]


def _read(wish: str) -> tuple[str, str, int]:
    found = _NODE_SPEC.fullmatch(wish.strip())
    if not found or found["capacity"] not in NODE_CLASSES:
        raise UsageError(
            f"--nodes: {wish!r} is not a node class; write {', '.join(NODE_CLASSES)}, as in ondemand,spot:3"
        )
    kind = found["capacity"]
    return kind, found["workload"] or NODE_CLASSES[kind].workload, int(found["count"] or 1)


def _free(kind: str, used: Counter[str], taken: frozenset[str]) -> str:
    while True:
        used[kind] += 1
        name = f"{kind}-{used[kind]}"
        if name not in taken:
            return name
