"""Builders of pipelines and of their Jobs and pods, with a version, in the namespace team."""

from typing import Any

from support.operator.pods import a_job, a_pod
from support.operator.scenario import a_pipeline

from finetune_operator.kubernetes.cache.cache import ResourceCache

Object = dict[str, Any]
PIPELINE_NAME = "finetune.dev/pipeline-name"


def pipeline_object(
    name: str = "demo", *, version: int = 1, claim: str = "", **changes: Any
) -> Object:
    """Return a pipeline; `status` and metadata such as `uid` are changes."""
    status = changes.pop("status", {})
    meta = {
        "namespace": "team",
        "name": name,
        "uid": f"uid-{name}",
        "generation": 1,
        "creationTimestamp": "2030",
    }
    workspace = {"existingClaim": claim} if claim else {}
    spec = a_pipeline(workspace=workspace).model_dump(
        mode="json", by_alias=True, exclude_none=True
    )
    return {
        "metadata": {
            **meta,
            "resourceVersion": str(version),
            **changes,
        },
        "spec": spec,
        "status": status,
    }


def running_status(job: str, stage: str = "train", **attempt: Any) -> Object:
    """Return a status with one attempt, which runs."""
    known = {
        "number": 1,
        "job": job,
        "identity": "i",
        "execution": "e",
        "outcome": "Running",
    }
    return {
        "stages": [
            {
                "name": stage,
                "attempts": [{**known, **attempt}],
            }
        ]
    }


def job_of(
    pipeline: str = "demo",
    stage: str = "train",
    *conditions: Object,
    version: int = 1,
    claim: str = "",
    **meta: Any,
) -> Object:
    """Return a Job of the pipeline's first attempt of a stage, which writes to the claim."""
    name = f"{pipeline}-{stage}-a1"
    known = {
        "uid": f"uid-{name}",
        "annotations": {PIPELINE_NAME: pipeline},
        "ownerReferences": [
            {"kind": "FineTunePipeline", "name": pipeline, "uid": f"uid-{pipeline}"}
        ],
    }
    job = a_job(
        *conditions, name=name, resourceVersion=str(version), **{**known, **meta}
    )
    return {
        **job,
        "spec": {"template": {"spec": pod_volumes(claim or f"{pipeline}-workspace")}},
    }


def pod_of(
    pipeline: str = "demo",
    stage: str = "train",
    state: Object | None = None,
    *conditions: Object,
    version: int = 1,
    claim: str = "",
    **more: Any,
) -> Object:
    """Return the pod of that Job."""
    job = f"{pipeline}-{stage}-a1"
    owner = {"kind": "Job", "name": job, "uid": f"uid-{job}", "controller": True}
    known = {
        "name": f"{job}-xyz",
        "uid": f"uid-of-pod-{job}",
        "annotations": {PIPELINE_NAME: pipeline},
        "labels": {"batch.kubernetes.io/job-name": job},
        "ownerReferences": [owner],
        "resourceVersion": str(version),
    }
    pod = a_pod(state, *conditions, **{**known, **more})
    pod["spec"] |= pod_volumes(claim or f"{pipeline}-workspace")
    return pod


def pod_volumes(claim: str) -> Object:
    """Return a pod's volume with this claim, to be written."""
    return {
        "volumes": [
            {"name": "workspace", "persistentVolumeClaim": {"claimName": claim}}
        ]
    }


def cache_of(**objects: list[Object]) -> ResourceCache:
    """Return a cache with these objects, by kind."""
    cache = ResourceCache()
    for kind, items in objects.items():
        for item in items:
            cache.update(kind, item)
    return cache
