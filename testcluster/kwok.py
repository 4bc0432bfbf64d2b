"""Nodes that exist on paper only, played by kwok, to see the operator with thousands of pods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testcluster.kube import Kube
from testcluster.service import Service

AT_ONCE = 500
SECONDS_EACH = 0.2
"""At most; 5,000 took five minutes on two cores, making their objects included."""
_MARK = "kwok.x-k8s.io/node"


def service(binaries: Path, kubeconfig: Path) -> Service:
    """Give the program that plays the nodes that carry the mark, and their pods."""
    selector = f"--manage-nodes-with-annotation-selector={_MARK}=fake"
    stages = f"--config={Path(__file__).with_name('kwok-stages.yaml')}"
    own = ["--manage-all-nodes=false", selector, "--node-lease-duration-seconds=40", "--server-address=", stages]
    return Service("kwok", [str(binaries / "kwok"), f"--kubeconfig={kubeconfig}", *own])


def make(kube: Kube, count: int) -> None:
    """Create the Node objects, some hundreds with one kubectl; kwok makes them Ready."""
    nodes = [_node(number) for number in range(1, count + 1)]
    for first in range(0, count, AT_ONCE):
        kube.apply(nodes[first : first + AT_ONCE])
    if nodes:
        kube.wait_ready([node["metadata"]["name"] for node in nodes], 60 + count * SECONDS_EACH)


def _node(number: int) -> dict[str, Any]:
    name = f"fake-{number}"
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {_MARK: "fake"},
            "labels": {"kubernetes.io/hostname": name, "type": "kwok", "workload": "training"},
        },
        "spec": {"taints": [{"key": _MARK, "value": "fake", "effect": "NoSchedule"}]},
    }
