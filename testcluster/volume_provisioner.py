"""Volumes for tests: a folder of this host for each claim, seen by every node.

`python -m testcluster.volume_provisioner --kubeconfig K --folder HERE --path THERE` serves two StorageClasses:
`shared`, the
default, whose volumes follow a pod to any node; and `strict`, which takes ReadWriteOncePod claims only, so that the
scheduler lets one pod at a time have it. Folders are writable for everybody, so that pods that are not root can write.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import time
from http import HTTPStatus
from pathlib import Path
from typing import Any

from kubernetes import client, config, watch
from kubernetes.client.exceptions import ApiException

PROVISIONER = "finetune.dev/folders"
SHARED, STRICT = "shared", "strict"
ON_NODES = "/var/finetune-volumes"
"""Where nodes see the folders."""
_OWNER = "pv.kubernetes.io/provisioned-by"
log = logging.getLogger("storage")


def classes() -> list[dict[str, Any]]:
    """Give both StorageClasses as manifests."""

    def storage_class(name: str, *, default: bool) -> dict[str, Any]:
        return {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {
                "name": name,
                "annotations": {"storageclass.kubernetes.io/is-default-class": str(default).lower()},
            },
            "provisioner": PROVISIONER,
            "reclaimPolicy": "Delete",
            "volumeBindingMode": "WaitForFirstConsumer",
        }

    return [storage_class(SHARED, default=True), storage_class(STRICT, default=False)]


class Provisioner:
    """Makes a folder and a volume for each claim that has a pod, and takes both away with the claim."""

    def __init__(self, folder: Path, path: str) -> None:
        # Its own types say of every field that it may be absent; what the API server sends is complete.
        self.core: Any = client.CoreV1Api()
        self.folder = folder
        self.path = path

    def serve(self) -> None:
        """Look at all claims and volumes whenever one changes, and every 10 s."""
        while True:
            try:
                self.sweep()
                claims = self.core.list_persistent_volume_claim_for_all_namespaces
                for _ in watch.Watch().stream(claims, timeout_seconds=10):
                    self.sweep()
            except Exception as problem:  # noqa: BLE001 -- the API server may be away; this process outlives it
                log.warning("the API does not answer: %s", str(problem).splitlines()[0][:200])
                time.sleep(0.5)

    def sweep(self) -> None:
        """Provide what is asked for, remove what is released."""
        for claim in self.core.list_persistent_volume_claim_for_all_namespaces().items:
            if (
                claim.status.phase == "Pending"
                and not claim.spec.volume_name
                and claim.spec.storage_class_name in (SHARED, STRICT)
            ):
                self.provide(claim)
        for volume in self.core.list_persistent_volume().items:
            if volume.status.phase == "Released" and (volume.metadata.annotations or {}).get(_OWNER) == PROVISIONER:
                self.core.delete_persistent_volume(volume.metadata.name)
                shutil.rmtree(self.folder / volume.metadata.name, ignore_errors=True)

    def provide(self, claim: Any) -> None:
        """Make folder and volume once a pod waits for the claim."""
        annotations = claim.metadata.annotations or {}
        strict = claim.spec.storage_class_name == STRICT
        if strict and claim.spec.access_modes != ["ReadWriteOncePod"]:
            self.refuse(
                claim, f"class {STRICT} serves accessModes: [ReadWriteOncePod] only; class {SHARED} serves others"
            )
            return
        if "volume.kubernetes.io/selected-node" not in annotations:
            return
        name = f"pvc-{claim.metadata.uid}"
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        # Pods are not root, and nobody knows which user they will be.
        folder.chmod(0o777)
        try:
            self.core.create_persistent_volume(self.volume(name, claim))
        except ApiException as problem:
            if problem.status != HTTPStatus.CONFLICT:
                raise

    def volume(self, name: str, claim: Any) -> dict[str, Any]:
        """Describe the volume for a claim."""
        return {
            "metadata": {"name": name, "annotations": {_OWNER: PROVISIONER}},
            "spec": {
                "capacity": {"storage": claim.spec.resources.requests["storage"]},
                "accessModes": claim.spec.access_modes,
                "volumeMode": "Filesystem",
                "storageClassName": claim.spec.storage_class_name,
                "persistentVolumeReclaimPolicy": "Delete",
                "hostPath": {"path": f"{self.path}/{name}", "type": "Directory"},
                "claimRef": {
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                    "namespace": claim.metadata.namespace,
                    "name": claim.metadata.name,
                    "uid": claim.metadata.uid,
                },
            },
        }

    def refuse(self, claim: Any, why: str) -> None:
        """Say in an event of the claim why it stays pending, once."""
        event = {
            "metadata": {"name": f"{claim.metadata.name}.refused", "namespace": claim.metadata.namespace},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": claim.metadata.namespace,
                "name": claim.metadata.name,
                "uid": claim.metadata.uid,
            },
            "reason": "ProvisioningFailed",
            "message": why,
            "type": "Warning",
            "source": {"component": PROVISIONER},
        }
        try:
            self.core.create_namespaced_event(claim.metadata.namespace, event)
        except ApiException as problem:
            if problem.status != HTTPStatus.CONFLICT:
                raise


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kubeconfig", required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where the folders are made on this host")
    parser.add_argument("--path", default=ON_NODES, help="where every node sees that folder")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    config.load_kube_config(arguments.kubeconfig)
    Provisioner(arguments.folder, arguments.path).serve()


if __name__ == "__main__":
    main()
