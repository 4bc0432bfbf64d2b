"""The pods of a pipeline's attempts."""

from finetune_cli.cluster.session import ClusterSession
from finetune_operator.api.status import AttemptStatus
from finetune_operator.core.metadata import MANAGED_BY, MANAGED_BY_VALUE, SERVER
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.cache import JOB_NAME, ResourceCache
from finetune_operator.kubernetes.translate.pod import Pod


async def list_pods(reach: ClusterSession, job: str | None = None) -> ResourceCache:
    """Look at all pods that the operator has made in the namespace, or at those of one attempt."""
    books = ResourceCache()
    selectors = (f"{JOB_NAME}={job}", f"{SERVER}={job}") if job else (f"{MANAGED_BY}={MANAGED_BY_VALUE}",)
    for selector in selectors:
        async for pod in reach.api.list(paths.pods(reach.context.namespace), labelSelector=selector):
            books.update_pod(pod)
    return books


async def pod_of(reach: ClusterSession, attempt: AttemptStatus) -> Pod | None:
    """Give an attempt's pod, if it is still there."""
    books = await list_pods(reach, attempt.job)
    return next(books.all_pods(), None)
