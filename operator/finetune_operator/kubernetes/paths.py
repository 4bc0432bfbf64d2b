"""Where things are in the API."""

from finetune_operator.api.group import GROUP, PLURAL, VERSION
from finetune_operator.core.pipeline import Key


def _path(group: str, plural: str, namespace: str | None, name: str | None) -> str:
    parts = [group, *(["namespaces", namespace] if namespace else []), plural, *([name] if name else [])]
    return "/" + "/".join(parts)


def pipelines(namespace: str | None = None) -> str:
    """Give the collection."""
    return _path(f"apis/{GROUP}/{VERSION}", PLURAL, namespace, None)


def pipeline(key: Key) -> str:
    """Give the object."""
    return f"{pipelines(key.namespace)}/{key.name}"


def jobs(namespace: str | None = None, name: str | None = None) -> str:
    """Give a Job, or all."""
    return _path("apis/batch/v1", "jobs", namespace, name)


def deployments(namespace: str | None = None, name: str | None = None) -> str:
    """Give a Deployment, or all."""
    return _path("apis/apps/v1", "deployments", namespace, name)


def services(namespace: str | None = None, name: str | None = None) -> str:
    """Give a Service, or all."""
    return _path("api/v1", "services", namespace, name)


def pods(namespace: str | None = None, name: str | None = None) -> str:
    """Give a pod, or all."""
    return _path("api/v1", "pods", namespace, name)


def pod_log(namespace: str, pod: str) -> str:
    """Give what a pod's process has written."""
    return f"{pods(namespace, pod)}/log"


def claims(namespace: str | None = None, name: str | None = None) -> str:
    """Give a PersistentVolumeClaim, or all."""
    return _path("api/v1", "persistentvolumeclaims", namespace, name)


def events(namespace: str) -> str:
    """Give the collection."""
    return _path("api/v1", "events", namespace, None)


def leases(namespace: str, name: str | None = None) -> str:
    """Give a Lease, or all."""
    return _path("apis/coordination.k8s.io/v1", "leases", namespace, name)
