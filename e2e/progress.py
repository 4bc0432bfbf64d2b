"""How far a training is, asked of its own pod through the API server."""

import json
from typing import Any

from testcluster.errors import TimedOut
from testcluster.kube_namespace import KubeNamespace, until

PORT = 8080


def progress(namespace: KubeNamespace, selector: str) -> dict[str, Any]:
    """Ask the one pod that the selector finds; nothing while it does not answer."""
    try:
        [found] = json.loads(namespace.run("get", "pods", "-l", selector, "-o", "json"))["items"]
        path = f"/api/v1/namespaces/{namespace.name}/pods/{found['metadata']['name']}:{PORT}/proxy/progress"
        answer: dict[str, Any] = json.loads(namespace.kube.run("get", "--raw", path, timeout=5))
    except (ValueError, TimedOut):  # the pod may not be there yet, or no longer, or still be importing
        return {}
    return answer


def wait_for_step(namespace: KubeNamespace, selector: str, step: int) -> dict[str, Any]:
    """Wait until an attempt has done so many steps, and give its progress then."""

    def far() -> dict[str, Any]:
        seen = progress(namespace, selector)
        return seen if (seen.get("step") or 0) >= step else {}

    return dict(until(far, 180, lambda: namespace.run("logs", "-l", selector, "--tail=20")))
