"""Builders of Jobs and pods as an API server returns them."""

from typing import Any

from finetune_operator.core.observation import ObservedJob
from finetune_operator.kubernetes.translate.job import observe_job

Object = dict[str, Any]
CREATED = "2030-01-01T00:00:00Z"
STARTED = "2030-01-01T00:00:05Z"
ENDED = "2030-01-01T00:10:00Z"
NAMES = {"namespace": "team", "annotations": {"finetune.dev/pipeline-name": "demo"}}


def a_job(*conditions: Object, name: str = "demo-train-a1", **meta: Any) -> Object:
    """Return a Job with these conditions; see job_condition."""
    return {
        "metadata": {
            "name": name,
            "uid": "job-uid",
            "creationTimestamp": CREATED,
            **NAMES,
            **meta,
        },
        "status": {"conditions": list(conditions)},
    }


def job_condition(kind: str, reason: str = "", message: str = "") -> Object:
    """Return a condition of a finished Job: Complete or Failed."""
    return {
        "type": kind,
        "status": "True",
        "reason": reason,
        "message": message,
        "lastTransitionTime": ENDED,
    }


def a_pod(
    state: Object | None = None,
    *conditions: Object,
    phase: str = "Running",
    **more: Any,
) -> Object:
    """Return a pod of a_job(); `state` is its container's, `more` is added to its metadata."""
    meta: Object = {
        "name": "demo-train-a1-xyz",
        "uid": "pod-uid",
        "creationTimestamp": CREATED,
        **NAMES,
    }
    meta["labels"] = {"batch.kubernetes.io/job-name": "demo-train-a1"}
    meta["ownerReferences"] = [controller_reference("Job", "demo-train-a1")]
    status = {"phase": phase, "conditions": list(conditions), **more.pop("status", {})}
    if state is not None:
        status["containerStatuses"] = [{"name": "stage", "state": state}]
    return {
        "metadata": {**meta, **more},
        "spec": {"nodeName": "spot-1", "containers": []},
        "status": status,
    }


def observed_job(*arguments: Any, **options: Any) -> ObservedJob:
    """Return what `observe_job` sees of a Job that exists or has pods."""
    job = observe_job(*arguments, **options)
    assert job
    return job


def controller_reference(kind: str, name: str) -> Object:
    """Return the owner reference to a pod's controller."""
    return {"kind": kind, "name": name, "uid": "job-uid", "controller": True}


def running() -> Object:
    """Return the state of a container whose process runs."""
    return {"running": {"startedAt": STARTED}}


def terminated(code: int, message: str = "", reason: str = "Error") -> Object:
    """Return the state of a container whose process has ended."""
    return {
        "terminated": {
            "exitCode": code,
            "reason": reason,
            "message": message,
            "startedAt": STARTED,
            "finishedAt": ENDED,
        }
    }


def disrupted(reason: str, message: str = "") -> Object:
    """Return the condition DisruptionTarget, which names what evicted a pod."""
    return {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": reason,
        "message": message,
    }


def unschedulable(message: str) -> Object:
    """Return the condition of a pod that no node accepts."""
    return {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": message,
    }


def waiting(reason: str, message: str = "") -> Object:
    """Return the state of a container that has not started."""
    return {"waiting": {"reason": reason, "message": message}}
