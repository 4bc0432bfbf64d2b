"""A volume provisioner for tests: each claim gets a folder of this host, mounted on every node.

`python -m testcluster.volume_provisioner --kubeconfig K --folder HOST_FOLDER --path NODE_FOLDER` serves two
StorageClasses. `shared` is the default; its volumes follow a pod to any node. `strict` accepts ReadWriteOncePod claims
only, so the scheduler lets one pod at a time use the volume. Folders are world-writable, so that pods that do not run
as root can write.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import time
from http import HTTPStatus
from pathlib import Path
from typing import Any

from kubernetes import client, config, watch
from kubernetes.client.exceptions import ApiException

from testcluster.service import Service

PROVISIONER = "finetune.dev/folders"
SHARED = "shared"
STRICT = "strict"
NODE_FOLDER = "/var/finetune-volumes"
"""Where the host's folder of volumes is mounted on every node."""
_OWNER = "pv.kubernetes.io/provisioned-by"
log = logging.getLogger("storage")


def storage_classes() -> list[dict[str, Any]]:
    """Return the manifests of both StorageClasses."""

    def storage_class(name: str, *, default: bool) -> dict[str, Any]:
        return {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {
                "name": name,
                "annotations": {
                    "storageclass.kubernetes.io/is-default-class": str(default).lower()
                },
            },
            "provisioner": PROVISIONER,
            "reclaimPolicy": "Delete",
            "volumeBindingMode": "WaitForFirstConsumer",
        }

    return [storage_class(SHARED, default=True), storage_class(STRICT, default=False)]


def service(kubeconfig: Path, folder: Path) -> Service:
    """Return the service that runs the provisioner; `folder` is the host's folder of volumes."""
    serve = [
        "-m",
        "testcluster.volume_provisioner",
        f"--kubeconfig={kubeconfig}",
        f"--folder={folder}",
    ]
    root = str(Path(__file__).parents[1])
    return Service("storage", [sys.executable, *serve], {"PYTHONPATH": root})


class Provisioner:
    """Creates a folder and a volume for each claim that has a pod, and deletes both with the claim."""

    def __init__(self, folder: Path, path: str) -> None:
        # Any, because the client's types declare every field optional; the API server sends complete objects.
        self.core: Any = client.CoreV1Api()
        self.folder = folder
        self.path = path

    def serve(self) -> None:
        """Check all claims and volumes after every change of a claim, and every 10 s."""
        while True:
            try:
                self.sweep()
                claims = self.core.list_persistent_volume_claim_for_all_namespaces
                for _ in watch.Watch().stream(claims, timeout_seconds=10):
                    self.sweep()
            except Exception as problem:  # noqa: BLE001 -- the API server may be down; this process keeps running
                log.warning(
                    "the API request failed, retrying: %s",
                    str(problem).splitlines()[0][:200],
                )
                time.sleep(0.5)

    def sweep(self) -> None:
        """Provision pending claims and delete released volumes."""
        for claim in self.core.list_persistent_volume_claim_for_all_namespaces().items:
            if (
                claim.status.phase == "Pending"
                and not claim.spec.volume_name
                and claim.spec.storage_class_name in (SHARED, STRICT)
            ):
                self.provide(claim)
        for volume in self.core.list_persistent_volume().items:
            if (
                volume.status.phase == "Released"
                and (volume.metadata.annotations or {}).get(_OWNER) == PROVISIONER
            ):
                self.core.delete_persistent_volume(volume.metadata.name)
                shutil.rmtree(self.folder / volume.metadata.name, ignore_errors=True)

    def provide(self, claim: Any) -> None:
        """Create folder and volume once the scheduler has selected a node for a pod with the claim."""
        annotations = claim.metadata.annotations or {}
        strict = claim.spec.storage_class_name == STRICT
        if strict and claim.spec.access_modes != ["ReadWriteOncePod"]:
            self.record_failure(
                claim,
                f"class {STRICT} serves accessModes: [ReadWriteOncePod] only; use class {SHARED} for others",
            )
            return
        if "volume.kubernetes.io/selected-node" not in annotations:
            return
        name = f"pvc-{claim.metadata.uid}"
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        # Pods do not run as root, and their user is not known here.
        folder.chmod(0o777)
        try:
            self.core.create_persistent_volume(self.volume(name, claim))
        except ApiException as problem:
            if problem.status != HTTPStatus.CONFLICT:
                raise

    def volume(self, name: str, claim: Any) -> dict[str, Any]:
        """Return the PersistentVolume for a claim."""
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

    def record_failure(self, claim: Any, message: str) -> None:
        """Create an event, once for each claim, with the reason why the claim stays pending."""
        event = {
            "metadata": {
                "name": f"{claim.metadata.name}.refused",
                "namespace": claim.metadata.namespace,
            },
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": claim.metadata.namespace,
                "name": claim.metadata.name,
                "uid": claim.metadata.uid,
            },
            "reason": "ProvisioningFailed",
            "message": message,
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
    parser.add_argument(
        "--folder",
        type=Path,
        required=True,
        help="where volumes are created on this host",
    )
    parser.add_argument(
        "--path", default=NODE_FOLDER, help="where that folder is mounted on every node"
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    config.load_kube_config(arguments.kubeconfig)
    Provisioner(arguments.folder, arguments.path).serve()


if __name__ == "__main__":
    main()
