"""The objects of a pipeline in the cluster, read once."""

from finetune_cli.cluster.session import ClusterSession
from finetune_operator.api.status import AttemptStatus, Outcome
from finetune_operator.core.metadata import MANAGED_BY, MANAGED_BY_VALUE, SERVER, service_name
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.cache import (
    DEPLOYMENTS,
    JOBS,
    PIPELINES,
    PODS,
    SERVICES,
    ResourceCache,
)
from finetune_operator.kubernetes.store import Object
from finetune_operator.kubernetes.translate.pod import Pod
from finetune_operator.kubernetes.trim import JOB_NAME

MANAGED_SELECTOR = f"{MANAGED_BY}={MANAGED_BY_VALUE}"


async def list_pods(session: ClusterSession, job: str | None = None) -> dict[str, Pod]:
    """Return the youngest pod of each attempt, by its Job or server; without `job`, of all in the namespace.

    Of several pods of an attempt, it is the first: that with index 0 has the progress and the result.
    """
    selectors = (f"{JOB_NAME}={job}", f"{SERVER}={job}") if job else (MANAGED_SELECTOR,)
    found: list[Object] = []
    for selector in selectors:
        found += [
            pod
            async for pod in session.api.list(
                paths.pods(session.context.namespace), labelSelector=selector
            )
        ]
    by_age = sorted(
        found, key=lambda pod: (-Pod(pod).index, str(pod["metadata"].get("creationTimestamp")))
    )
    labels = ((pod["metadata"].get("labels") or {}, pod) for pod in by_age)
    return {of[SERVER] if SERVER in of else of.get(JOB_NAME, ""): Pod(pod) for of, pod in labels}


async def pod_of(session: ClusterSession, attempt: AttemptStatus) -> Pod | None:
    """Return the pod of an attempt, or None where it no longer exists."""
    return (await list_pods(session, attempt.job)).get(attempt.job)


async def read_cache(session: ClusterSession, found: Object, pipeline: Pipeline) -> ResourceCache:
    """Return a cache with the pipeline and what its running attempts and its server consist of."""
    cache, namespace = ResourceCache(), pipeline.key.namespace
    cache.update(PIPELINES, found)
    last = (stage.last_attempt for stage in pipeline.status.stages.values())
    jobs = [
        attempt.job
        for attempt in last
        if attempt and attempt.outcome in {Outcome.RUNNING, Outcome.SUCCEEDED}
    ]
    wanted = {
        JOBS: [paths.jobs(namespace, job) for job in jobs],
        DEPLOYMENTS: [paths.deployments(namespace, job) for job in jobs],
        SERVICES: [paths.services(namespace, service_name(pipeline.key.name))],
    }
    for kind, found_at in wanted.items():
        for path in found_at:
            if one := await session.api.get(path):
                cache.update(kind, one)
    async for pod in session.api.list(paths.pods(namespace), labelSelector=MANAGED_SELECTOR):
        cache.update(PODS, pod)
    return cache
