"""The configuration of a kind cluster: a control plane, one worker for each node, and patches of timeouts.

kind works without the patches, but then a silent node is marked as lost after 40 s instead of 16 s.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from testcluster.nodes import Node
from testcluster.volume_provisioner import NODE_FOLDER

GRACE_PERIOD = "16s"
HEARTBEAT = "4s"
"""Time without a heartbeat after which a node is not Ready, and the interval of the heartbeats."""
REGISTRIES = "/etc/containerd/certs.d"
"""Where containerd on a node reads the addresses of registries."""


def config(nodes: list[Node], volumes: Path, image: str | None = None) -> str:
    """Return the configuration as JSON, which is valid YAML. Every node mounts the host's folder `volumes`."""
    mounts = [{"hostPath": str(volumes), "containerPath": NODE_FOLDER}]
    common: dict[str, Any] = {"extraMounts": mounts} | (
        {"image": image} if image else {}
    )
    workers = [
        {
            "role": "worker",
            **common,
            "labels": node.labels,
            **_patches(_join_configuration(node)),
        }
        for node in nodes
    ]
    content = {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "nodes": [{"role": "control-plane", **common}, *workers],
        "containerdConfigPatches": [
            f'[plugins."io.containerd.cri.v1.images".registry]\n  config_path = "{REGISTRIES}"\n'
        ],
        **_patches(*_cluster_configurations(), _kubelet_configuration()),
    }
    return json.dumps(content, indent=1)


def _patches(*documents: dict[str, Any]) -> dict[str, list[str]]:
    patches = [json.dumps(document) for document in documents if document]
    return {"kubeadmConfigPatches": patches} if patches else {}


def _join_configuration(node: Node) -> dict[str, Any]:
    """Return the patch with the taints.

    Labels are a field of kind's node instead, because a patch of node-labels would replace them.
    """
    taints = [
        {"key": taint.key, "value": taint.value, "effect": taint.effect}
        for taint in node.taints
    ]
    return (
        {"kind": "JoinConfiguration", "nodeRegistration": {"taints": taints}}
        if taints
        else {}
    )


def _cluster_configurations() -> list[dict[str, Any]]:
    """Return the patch of the grace period for both versions of kubeadm's API; kind uses the one of its Kubernetes."""
    name = "node-monitor-grace-period"
    arguments = {
        "v1beta3": {name: GRACE_PERIOD},
        "v1beta4": [{"name": name, "value": GRACE_PERIOD}],
    }
    return [
        {
            "apiVersion": f"kubeadm.k8s.io/{version}",
            "kind": "ClusterConfiguration",
            "controllerManager": {"extraArgs": extra_args},
        }
        for version, extra_args in arguments.items()
    ]


def _kubelet_configuration() -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "nodeStatusUpdateFrequency": HEARTBEAT,
    }
