"""The objects of a pipeline in the cluster, read once."""

from finetune_cli.cluster.session import ClusterSession, Object
from finetune_operator.api.status import AttemptStatus, Outcome
from finetune_operator.core.metadata import (
    MANAGED_BY,
    MANAGED_BY_VALUE,
    SERVER,
    service_name,
)
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.cache.cache import (
    DEPLOYMENTS,
    JOBS,
    PIPELINES,
    PODS,
    SERVICES,
    ResourceCache,
)
from finetune_operator.kubernetes.cache.trim import JOB_NAME
from finetune_operator.kubernetes.translate.pod import ObservedPod

MANAGED_SELECTOR = f"{MANAGED_BY}={MANAGED_BY_VALUE}"


async def list_pods(
    session: ClusterSession, job: str | None = None
) -> dict[str, ObservedPod]:
    """Return the youngest pod of each attempt, by its Job or server; without `job`, of all in the namespace.

    Of several pods of an attempt, it is the first: the pod with index 0 has the progress and the result.
    """
    selectors = [MANAGED_SELECTOR]
    if job:
        # A Job's pods and a server's pods have different labels.
        selectors = [f"{JOB_NAME}={job}", f"{SERVER}={job}"]
    path = paths.pods(session.context.namespace)
    pods: list[Object] = []
    for selector in selectors:
        pods += [pod async for pod in session.api.list(path, labelSelector=selector)]
    youngest: dict[str, ObservedPod] = {}
    # In this order, the youngest pod with the lowest index is the last of an attempt, and stays in the dict.
    for pod in sorted(pods, key=_index_and_age):
        labels = pod["metadata"].get("labels") or {}
        name = labels.get(SERVER, labels.get(JOB_NAME, ""))
        youngest[name] = ObservedPod(pod)
    return youngest


def _index_and_age(pod: Object) -> tuple[int, str]:
    return (-ObservedPod(pod).index, str(pod["metadata"].get("creationTimestamp")))


async def pod_of(session: ClusterSession, attempt: AttemptStatus) -> ObservedPod | None:
    """Return the pod of an attempt, or None if it no longer exists."""
    pods = await list_pods(session, attempt.job)
    return pods.get(attempt.job)


async def read_cache(
    session: ClusterSession, live: Object, pipeline: Pipeline
) -> ResourceCache:
    """Return a cache with the pipeline and the objects of its running attempts and its server."""
    cache = ResourceCache()
    cache.update(PIPELINES, live)
    namespace = pipeline.key.namespace
    attempts = [stage.last_attempt for stage in pipeline.status.stages.values()]
    jobs = [
        attempt.job
        for attempt in attempts
        # A server runs on after its attempt has succeeded.
        if attempt and attempt.outcome in {Outcome.RUNNING, Outcome.SUCCEEDED}
    ]
    # By their names: the namespace may have thousands of other Jobs.
    wanted = {
        JOBS: [paths.jobs(namespace, job) for job in jobs],
        DEPLOYMENTS: [paths.deployments(namespace, job) for job in jobs],
        SERVICES: [paths.services(namespace, service_name(pipeline.key.name))],
    }
    for kind, object_paths in wanted.items():
        for path in object_paths:
            resource = await session.api.get(path)
            if resource:
                cache.update(kind, resource)
    async for pod in session.api.list(
        paths.pods(namespace), labelSelector=MANAGED_SELECTOR
    ):
        cache.update(PODS, pod)
    return cache
