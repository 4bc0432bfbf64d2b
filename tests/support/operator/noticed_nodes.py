"""Nodes with the marks that announce their end."""

from typing import Any

Object = dict[str, Any]
SPOT_ITN = "aws-node-termination-handler/spot-itn"
REBALANCE = "aws-node-termination-handler/rebalance-recommendation"


def node(name: str, *taints: str, version: int = 1, **more: Any) -> Object:
    """Return a node as an API server does, with what makes it large."""
    meta = {
        "name": name,
        "uid": f"uid-of-{name}",
        "resourceVersion": str(version),
        **more.pop("metadata", {}),
    }
    images = [
        {"names": [f"registry.example/{name}/{number}@sha256:{number:064}"]}
        for number in range(50)
    ]
    status = {
        "images": images,
        "conditions": [{"type": "Ready", "status": "True"}],
        **more.pop("status", {}),
    }
    raw = [{"key": key, "effect": "NoSchedule"} for key in ("spot", *taints)]
    return {
        "metadata": meta,
        "spec": {"taints": raw, **more},
        "status": status,
    }
