"""A cache with a pipeline that trains."""

from support.operator.cluster_objects import (
    cache_of,
    job_of,
    pipeline_object,
    pod_of,
    running_status,
)
from support.operator.pods import (
    running,
)

from finetune_operator.core.pipeline import Key
from finetune_operator.kubernetes.cache.cache import (
    PIPELINES,
)
from finetune_operator.kubernetes.cache.change import Change, Urgency

DEMO = Key("team", "demo")
OTHER = Key("team", "other")
JOB = "demo-train-a1"
SAVED = '{"interruption": {"step": 40, "savedStep": 40}}'
NOW = Change((DEMO,), Urgency.NOW)
LATER = Change((DEMO,), Urgency.LATER)


def training(**status):
    """Return a cache with a pipeline whose attempt of train runs, its Job and its running pod."""
    pipeline = pipeline_object(version=1, status=running_status(JOB) | status)
    return cache_of(
        finetunepipelines=[pipeline],
        jobs=[job_of(version=2)],
        pods=[pod_of(state=running(), version=3)],
    )


def sharing():
    """Return such a cache with an older pipeline, which waits for the same claim."""
    cache = training()
    older = pipeline_object(
        "other", version=1, claim="demo-workspace", creationTimestamp="2029"
    )
    cache.update(PIPELINES, older)
    return cache


def end_attempt(cache, version=20):
    """Write to the status that the attempt has ended."""
    return cache.update(
        PIPELINES,
        pipeline_object(version=version, status=running_status(JOB, outcome="Failed")),
    )


def pod_status(pod, phase):
    pod["metadata"].pop("phase", None)
    pod["status"]["phase"] = phase
    return pod
