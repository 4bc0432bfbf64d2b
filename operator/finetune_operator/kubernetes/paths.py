"""Paths of the API server's collections and objects."""

from finetune_operator.api.group import GROUP, PLURAL, VERSION
from finetune_operator.core.pipeline import Key

SERVER_VERSION = "/version"
"""The API server's version, which every account may read."""


def _path(group: str, plural: str, namespace: str | None, name: str | None) -> str:
    parts = [group]
    if namespace:
        parts += ["namespaces", namespace]
    parts.append(plural)
    if name:
        parts.append(name)
    return "/" + "/".join(parts)


def pipelines(namespace: str | None = None) -> str:
    """Return the path of the FinetunePipelines of a namespace, or of all namespaces."""
    return _path(f"apis/{GROUP}/{VERSION}", PLURAL, namespace, None)


def pipeline(key: Key) -> str:
    """Return the path of one FinetunePipeline."""
    return f"{pipelines(key.namespace)}/{key.name}"


def jobs(namespace: str | None = None, name: str | None = None) -> str:
    """Return the path of one Job, or of all Jobs."""
    return _path("apis/batch/v1", "jobs", namespace, name)


def deployments(namespace: str | None = None, name: str | None = None) -> str:
    """Return the path of one Deployment, or of all Deployments."""
    return _path("apis/apps/v1", "deployments", namespace, name)


def services(namespace: str | None = None, name: str | None = None) -> str:
    """Return the path of one Service, or of all Services."""
    return _path("api/v1", "services", namespace, name)


def pods(namespace: str | None = None, name: str | None = None) -> str:
    """Return the path of one pod, or of all pods."""
    return _path("api/v1", "pods", namespace, name)


def nodes() -> str:
    """Return the path of all nodes."""
    return _path("api/v1", "nodes", None, None)


def pod_log(namespace: str, pod: str) -> str:
    """Return the path of a pod's log."""
    return f"{pods(namespace, pod)}/log"


def pod_eviction(namespace: str, pod: str) -> str:
    """Return the path of a pod's evictions."""
    return f"{pods(namespace, pod)}/eviction"


def pod_proxy(namespace: str, pod: str, port: int, path: str) -> str:
    """Return the path of the API server's proxy to a path on a port of a pod."""
    return f"{pods(namespace, pod)}:{port}/proxy/{path}"


def service_proxy(namespace: str, service: str, port: int, path: str) -> str:
    """Return the path of the API server's proxy to a path on a port of a Service."""
    return f"{services(namespace, service)}:{port}/proxy/{path}"


def claims(namespace: str | None = None, name: str | None = None) -> str:
    """Return the path of one PersistentVolumeClaim, or of all of them."""
    return _path("api/v1", "persistentvolumeclaims", namespace, name)


def config_maps(namespace: str | None = None) -> str:
    """Return the path of the ConfigMaps of a namespace, or of all namespaces."""
    return _path("api/v1", "configmaps", namespace, None)


def events(namespace: str | None = None) -> str:
    """Return the path of the events of a namespace, or of all namespaces."""
    return _path("api/v1", "events", namespace, None)


def leases(namespace: str | None, name: str | None = None) -> str:
    """Return the path of one Lease, or of all Leases."""
    return _path("apis/coordination.k8s.io/v1", "leases", namespace, name)
