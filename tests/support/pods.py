"""Jobs and pods as an API server gives them, in short words."""

from typing import Any

Object = dict[str, Any]
CREATED = "2030-01-01T00:00:00Z"
STARTED = "2030-01-01T00:00:05Z"
ENDED = "2030-01-01T00:10:00Z"
NAMES = {"namespace": "team", "annotations": {"finetune.dev/pipeline-name": "demo"}}


def a_job(*conditions: Object, name: str = "demo-train-a1", **meta: Any) -> Object:
    """Give a Job; conditions as over(…) writes them."""
    return {
        "metadata": {"name": name, "uid": "job-uid", "creationTimestamp": CREATED, **NAMES, **meta},
        "status": {"conditions": list(conditions)},
    }


def over(kind: str, reason: str = "", message: str = "") -> Object:
    """Give a Job's condition that says that it is over."""
    return {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": ENDED}


def a_pod(state: Object | None = None, *conditions: Object, phase: str = "Running", **more: Any) -> Object:
    """Give a pod of that Job; state is its container's."""
    meta = {"name": "demo-train-a1-xyz", "uid": "pod-uid", "creationTimestamp": CREATED, **NAMES}
    meta["labels"] = {"batch.kubernetes.io/job-name": "demo-train-a1"}
    meta["ownerReferences"] = [made_by("Job", "demo-train-a1")]
    status = {"phase": phase, "conditions": list(conditions), **more.pop("status", {})}
    if state is not None:
        status["containerStatuses"] = [{"name": "stage", "state": state}]
    return {"metadata": {**meta, **more}, "spec": {"nodeName": "spot-1", "containers": []}, "status": status}


def made_by(kind: str, name: str) -> Object:
    """Give the reference to a pod's maker."""
    return {"kind": kind, "name": name, "uid": "maker", "controller": True}


def running() -> Object:
    """Give the state of a container whose process runs."""
    return {"running": {"startedAt": STARTED}}


def ended(code: int, message: str = "", reason: str = "Error") -> Object:
    """Give the state of a container whose process has ended."""
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
    """Give the condition that tells who took a pod's right to run."""
    return {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}


def unschedulable(message: str) -> Object:
    """Give the condition of a pod that no node takes."""
    return {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}


def waiting(reason: str, message: str = "") -> Object:
    """Give the state of a container that has not started."""
    return {"waiting": {"reason": reason, "message": message}}
