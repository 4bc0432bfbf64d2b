"""The progress of a training, read from its pod through the API server's pod proxy."""

import json
from typing import Any

from testcluster.errors import TimedOut
from testcluster.kube_namespace import KubeNamespace, until

PORT = 8080


def progress(namespace: KubeNamespace, selector: str) -> dict[str, Any]:
    """Read the progress of the only pod that the selector matches; empty while the pod does not respond."""
    try:
        [pod] = json.loads(namespace.run("get", "pods", "-l", selector, "-o", "json"))[
            "items"
        ]
        path = f"/api/v1/namespaces/{namespace.name}/pods/{pod['metadata']['name']}:{PORT}/proxy/progress"
        response: dict[str, Any] = json.loads(
            namespace.kube.run("get", "--raw", path, timeout=5)
        )
    except (ValueError, TimedOut):
        # The pod may not exist yet or any more, or its process may still be importing.
        return {}
    return response


def wait_for_step(namespace: KubeNamespace, selector: str, step: int) -> dict[str, Any]:
    """Wait up to 180 s until an attempt has reached a step; return its progress."""

    def reached() -> dict[str, Any]:
        current = progress(namespace, selector)
        return current if (current.get("step") or 0) >= step else {}

    return dict(
        until(reached, 180, lambda: namespace.run("logs", "-l", selector, "--tail=20"))
    )
