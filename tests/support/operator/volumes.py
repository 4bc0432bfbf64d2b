"""Volumes that can grow, on a control plane without nodes: no pod is needed to bind them."""

from typing import Any

from testcluster.kube import Kube
from testcluster.kube_namespace import KubeNamespace, until

Object = dict[str, Any]
GROWING = "growing"
"""A StorageClass whose claims may grow."""


def create_growing_class(kube: Kube) -> None:
    """Create the StorageClass GROWING."""
    meta = {"name": GROWING}
    fields = {
        "provisioner": "kubernetes.io/no-provisioner",
        "allowVolumeExpansion": True,
    }
    kube.apply(
        [
            {
                "apiVersion": "storage.k8s.io/v1",
                "kind": "StorageClass",
                "metadata": meta,
                **fields,
            }
        ]
    )


def create_volume(namespace: KubeNamespace, claim: str) -> None:
    """Create a volume of 1 Gi for a claim of the class GROWING.

    A claim that is created later is bound at once; an existing claim may wait for 15 seconds.
    """
    spec: Object = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
        "storageClassName": GROWING,
        "hostPath": {"path": "/nowhere"},
        "claimRef": {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "namespace": namespace.name,
            "name": claim,
        },
    }
    meta = {"name": f"{namespace.name}-{claim}"}
    namespace.kube.apply(
        [
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": meta,
                "spec": spec,
            }
        ]
    )


def wait_bound(namespace: KubeNamespace, claim: str) -> None:
    """Wait until the claim is bound to its volume."""
    until(
        lambda: namespace.get("pvc", claim).get("status", {}).get("phase") == "Bound",
        30,
    )
