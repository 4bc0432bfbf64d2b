"""Builders of Jobs and pods as an API server returns them."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from finetune_operator.api.status import AttemptStatus
from finetune_operator.core.observation import ObservedJob
from finetune_operator.kubernetes.translate.job import observe_job
from finetune_operator.kubernetes.translate.pod import DELETION_SEEN_AT, time_of

Object = dict[str, Any]
CREATED = "2030-01-01T00:00:00Z"
STARTED = "2030-01-01T00:00:05Z"
ENDED = "2030-01-01T00:10:00Z"
NOW = datetime(2030, 1, 1, 0, 20, tzinfo=UTC)
"""When the tests look at the Job, after its end."""
JOB = "demo-train-a1"
ATTEMPT = AttemptStatus(number=1, job=JOB, identity="i", execution="e")
"""The attempt of a_job()."""
DELETED = {"deletionTimestamp": "2030-01-01T00:10:30Z"}
"""Metadata of a pod that was deleted after its process had ended."""
RESULT = {
    "stage": "train",
    "identity": "i",
    "digest": "d",
    "steps": 9,
    "loss": 1.0,
    "bestStep": 9,
    "tokens": 7,
}
"""What the process of the attempt writes when it has trained."""
NAMES = {"namespace": "team", "annotations": {"finetune.dev/pipeline-name": "demo"}}


def a_job(*conditions: Object, name: str = JOB, **meta: Any) -> Object:
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
    """Return a pod of a_job(); `state` is its container's, `more` is added to its metadata.

    The operator has seen its deletion when it happened, by a clock that agrees with the API server's.
    """
    meta: Object = {
        "name": f"{JOB}-xyz",
        "uid": "pod-uid",
        "creationTimestamp": CREATED,
        **NAMES,
    }
    meta["labels"] = {"batch.kubernetes.io/job-name": JOB}
    meta["ownerReferences"] = [controller_reference("Job", JOB)]
    status = {
        "phase": phase,
        "conditions": list(conditions),
        **more.pop("status", {}),
    }
    if state is not None:
        status["containerStatuses"] = [{"name": "stage", "state": state}]
    pod: Object = {
        "metadata": {**meta, **more},
        "spec": {"nodeName": "spot-1", "containers": []},
        "status": status,
    }
    deletion = time_of(more.get("deletionTimestamp"))
    if deletion:
        grace = timedelta(seconds=more.get("deletionGracePeriodSeconds", 0))
        pod[DELETION_SEEN_AT] = deletion - grace
    return pod


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


def completed() -> Object:
    """Return the state of a container whose process has written its result."""
    return terminated(0, json.dumps({"result": RESULT}), "Completed")


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
