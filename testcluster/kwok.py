"""KWOK nodes: Node objects without a machine, simulated by kwok, to test the operator with thousands of pods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testcluster.kube import Kube
from testcluster.service import Service

NODES_PER_APPLY = 500
"""Node objects of one kubectl call; a call for each node would be slow."""
SECONDS_PER_NODE = 0.2
"""Timeout per node. 5,000 nodes took five minutes on two cores, including the creation of their objects."""
_ANNOTATION = "kwok.x-k8s.io/node"


def service(binaries: Path, kubeconfig: Path) -> Service:
    """Return the kwok program. It simulates the nodes that have the annotation, and their pods."""
    selector = f"--manage-nodes-with-annotation-selector={_ANNOTATION}=fake"
    stages = f"--config={Path(__file__).with_name('kwok-stages.yaml')}"
    options = [
        "--manage-all-nodes=false",
        selector,
        "--node-lease-duration-seconds=40",
        "--server-address=",
        stages,
    ]
    return Service(
        "kwok", [str(binaries / "kwok"), f"--kubeconfig={kubeconfig}", *options]
    )


def create_nodes(kube: Kube, count: int) -> None:
    """Create the Node objects and wait until kwok has made them Ready."""
    nodes = [_node(number) for number in range(1, count + 1)]
    for first in range(0, count, NODES_PER_APPLY):
        kube.apply(nodes[first : first + NODES_PER_APPLY])
    if nodes:
        kube.wait_ready(
            [node["metadata"]["name"] for node in nodes], 60 + count * SECONDS_PER_NODE
        )


def _node(number: int) -> dict[str, Any]:
    name = f"fake-{number}"
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {_ANNOTATION: "fake"},
            "labels": {
                "kubernetes.io/hostname": name,
                "type": "kwok",
                "workload": "training",
            },
        },
        "spec": {
            "taints": [{"key": _ANNOTATION, "value": "fake", "effect": "NoSchedule"}]
        },
    }
