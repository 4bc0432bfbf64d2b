"""The pipelines of the benchmark, and the volumes that their claims bind to: manifests."""

from typing import Any

from operator_bench.api import NAMESPACE, STAGES

Object = dict[str, Any]
STORAGE_CLASS = "bench"
SIZE = "1Gi"
KWOK_TAINT = {"key": "kwok.x-k8s.io/node", "operator": "Exists"}
PUBLISHED = "models"
"""Claim that the push stage publishes to."""


def pipeline_name(number: int) -> str:
    """Return the name of a pipeline. All names have the same length: a null operator replaces them in JSON texts."""
    return f"bench-{number:06d}"


def claim_name(name: str) -> str:
    """Return the name of the claim that exists before the pipeline does."""
    return f"{name}-data"


def pipeline(name: str, claim: str | None) -> Object:
    """Return a pipeline of the stages prepare, train, evaluate (with a gate) and push.

    Its workspace is the existing claim, or with None a claim that the operator creates.
    """
    stages: Object = {stage: {"pod": {"tolerations": [KWOK_TAINT]}} for stage in STAGES}
    stages["evaluate"] |= {
        "tasks": [{"name": "exam"}],
        "gates": [{"task": "exam", "value": 0.6}],
    }
    stages["push"] |= {"targets": [{"uri": f"pvc://{PUBLISHED}/bench"}]}
    created = {"size": SIZE, "storageClassName": STORAGE_CLASS, "whenDeleted": "Delete"}
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTunePipeline",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "model": {"uri": "hf://org/base"},
            "datasets": [{"uri": "hf://org/data/train.jsonl"}],
            "workspace": {"existingClaim": claim} if claim else created,
            **stages,
        },
    }


def volume(name: str) -> Object:
    """Return a volume that any claim of the class binds to. No provisioner is involved."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": SIZE},
            "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
            "storageClassName": STORAGE_CLASS,
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": f"/var/{name}"},
        },
    }


def claim(name: str) -> Object:
    """Return a claim that binds to any volume of the class."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": STORAGE_CLASS,
            "resources": {"requests": {"storage": SIZE}},
        },
    }


def preparations() -> list[Object]:
    """Return the namespace, the storage class, and the claim that push publishes to."""
    storage_class = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": STORAGE_CLASS},
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "Immediate",
    }
    namespace = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": NAMESPACE},
    }
    return [namespace, storage_class, volume(f"volume-{PUBLISHED}"), claim(PUBLISHED)]


def service_account(name: str) -> list[Object]:
    """Return a service account with every right. The audit log tells the programs of the benchmark apart by it."""
    subject = {"kind": "ServiceAccount", "name": name, "namespace": NAMESPACE}
    role = {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "ClusterRole",
        "name": "cluster-admin",
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": name, "namespace": NAMESPACE},
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": f"{NAMESPACE}-{name}"},
            "roleRef": role,
            "subjects": [subject],
        },
    ]
