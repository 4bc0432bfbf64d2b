"""The pods of a pipeline's attempts."""

from finetune_cli.cluster.session import ClusterSession
from finetune_operator.api.status import AttemptStatus
from finetune_operator.core.metadata import MANAGED_BY, MANAGED_BY_VALUE, SERVER
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.cache import JOB_NAME, ResourceCache
from finetune_operator.kubernetes.translate.pod import Pod


async def list_pods(session: ClusterSession, job: str | None = None) -> ResourceCache:
    """Return the pods of one attempt's Job or server; without `job`, all pods of the operator in the namespace."""
    cache = ResourceCache()
    selectors = (f"{JOB_NAME}={job}", f"{SERVER}={job}") if job else (f"{MANAGED_BY}={MANAGED_BY_VALUE}",)
    for selector in selectors:
        async for pod in session.api.list(paths.pods(session.context.namespace), labelSelector=selector):
            cache.update_pod(pod)
    return cache


async def pod_of(session: ClusterSession, attempt: AttemptStatus) -> Pod | None:
    """Return the pod of an attempt, or None where it no longer exists."""
    cache = await list_pods(session, attempt.job)
    return next(cache.all_pods(), None)
