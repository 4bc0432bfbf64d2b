"""Manifests of pipelines whose pods run on the simulated kubelet's node."""

from typing import Any

from support.faults.kubelet import STORAGE_CLASS, TAINT
from support.operator.pipeline_objects import pipeline_manifest
from support.operator.scenario import merged

Object = dict[str, Any]
MODELS = "models"
"""The claim to which pipelines publish."""
STAGES = ("prepare", "train", "evaluate", "push", "deploy")
POD = {"pod": {"tolerations": [{"key": TAINT, "operator": "Exists"}]}}


def manifest(name: str, *, stages: tuple[str, ...] = STAGES, **changes: Any) -> Object:
    """Return a pipeline of these stages; `changes` are merged into the spec."""
    spec: Object = {
        "model": {"uri": "hf://org/base"},
        "datasets": [{"uri": "hf://org/data/train.jsonl"}],
        "workspace": {
            "size": "1Gi",
            "storageClassName": STORAGE_CLASS,
            "whenDeleted": "Delete",
        },
        **{stage: dict(POD) for stage in stages},
    }
    if "evaluate" in stages:
        spec["evaluate"] |= {
            "tasks": [{"name": "exam"}],
            "gates": [{"task": "exam", "value": 0.6}],
        }
    if "push" in stages:
        spec["push"] |= {"targets": [{"uri": f"pvc://{MODELS}/published"}]}
    return pipeline_manifest(name, merged(spec, changes))


def claim(name: str) -> Object:
    """Return a claim whose volume the simulated kubelet provisions."""
    spec = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "1Gi"}},
        "storageClassName": STORAGE_CLASS,
    }
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": spec,
    }
