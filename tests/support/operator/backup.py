"""A backup of objects, and their restoration as Velero does it: new uids, and the status in a second request."""

import json
from copy import deepcopy
from typing import Any

from testcluster.kube_namespace import KubeNamespace, until

Object = dict[str, Any]
CLAIMS = "persistentvolumeclaims"
PIPELINES = "finetunepipelines"
OWNED = "jobs,deployments,services,persistentvolumeclaims"
NOT_RESTORED = (
    *("uid", "resourceVersion", "generation", "creationTimestamp", "generateName"),
    *("deletionTimestamp", "deletionGracePeriodSeconds", "ownerReferences", "selfLink"),
)
"""Metadata that Velero removes from each object (`resetMetadata` in pkg/restore/restore.go)."""
BINDING = ("volumeName", "dataSource")
"""Fields of a claim that Velero removes, so that the claim is bound anew."""


def backup(namespace: KubeNamespace, kind: str) -> list[Object]:
    """Return all objects of a kind, with their statuses."""
    listed = json.loads(namespace.run("get", kind, "-o", "json"))
    return list(listed["items"])


def lose_everything(namespace: KubeNamespace) -> None:
    """Delete all pipelines and what belongs to them, and wait until nothing is left."""
    namespace.run("delete", PIPELINES, "--all", "--wait=false")
    namespace.run("delete", OWNED, "--all", "--wait=false")
    until(
        lambda: not namespace.run("get", f"{PIPELINES},{OWNED},pods", "-o", "name"), 60
    )


def restore(
    namespace: KubeNamespace, objects: list[Object], *, with_status: bool = False
) -> None:
    """Create the objects anew. With the status, write it afterwards, as --status-include-resources does."""
    for saved in objects:
        status = saved.get("status", {})
        restored = _without_identity(saved)
        kind = saved["kind"].lower()
        namespace.create(restored)
        if with_status:
            current = namespace.get(kind, saved["metadata"]["name"])
            text = json.dumps({**current, "status": status})
            namespace.run("replace", "--subresource=status", "-f", "-", given=text)


def _without_identity(saved: Object) -> Object:
    restored = deepcopy(saved)
    restored.pop("status", None)
    for name in NOT_RESTORED:
        restored["metadata"].pop(name, None)
    for name in BINDING:
        restored["spec"].pop(name, None)
    return restored
