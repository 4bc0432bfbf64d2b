"""What kind is told: one control plane, one worker for each node, patches that make a lost node seen sooner.

Nothing here is needed for kind to work; without the patches a node counts as lost after 40 s instead of 16.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from testcluster.nodes import Node
from testcluster.volume_provisioner import ON_NODES

GRACE, HEARTBEAT = "16s", "4s"
REGISTRIES = "/etc/containerd/certs.d"
"""Where containerd in a node looks for how to reach a registry."""


def config(nodes: list[Node], volumes: Path, image: str | None = None) -> str:
    """Write the configuration, as JSON, which YAML contains; volumes is a folder of this host that every node sees."""
    mounts = [{"hostPath": str(volumes), "containerPath": ON_NODES}]
    common: dict[str, Any] = {"extraMounts": mounts} | ({"image": image} if image else {})
    workers = [{"role": "worker", **common, "labels": node.labels, **_patches(_joins(node))} for node in nodes]
    content = {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "nodes": [{"role": "control-plane", **common}, *workers],
        "containerdConfigPatches": [
            f'[plugins."io.containerd.cri.v1.images".registry]\n  config_path = "{REGISTRIES}"\n'
        ],
        **_patches(*_sees_losses_soon(), _kubelets()),
    }
    return json.dumps(content, indent=1)


def _patches(*documents: dict[str, Any]) -> dict[str, list[str]]:
    written = [json.dumps(document) for document in documents if document]
    return {"kubeadmConfigPatches": written} if written else {}


def _joins(node: Node) -> dict[str, Any]:
    """Register with taints. The labels are given beside it: a patch of node-labels would replace them."""
    taints = [{"key": taint.key, "value": taint.value, "effect": taint.effect} for taint in node.taints]
    return {"kind": "JoinConfiguration", "nodeRegistration": {"taints": taints}} if taints else {}


def _sees_losses_soon() -> list[dict[str, Any]]:
    """Shorten the grace period, in both versions of kubeadm's configuration; kind takes that of its Kubernetes."""
    name = "node-monitor-grace-period"
    arguments = {"v1beta3": {name: GRACE}, "v1beta4": [{"name": name, "value": GRACE}]}
    return [
        {
            "apiVersion": f"kubeadm.k8s.io/{version}",
            "kind": "ClusterConfiguration",
            "controllerManager": {"extraArgs": given},
        }
        for version, given in arguments.items()
    ]


def _kubelets() -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "nodeStatusUpdateFrequency": HEARTBEAT,
    }
