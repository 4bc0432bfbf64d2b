"""The pods of a pipeline's attempts."""

from finetune_cli.cluster.session import Reach
from finetune_operator.api.status import AttemptStatus
from finetune_operator.core.metadata import MANAGED_BY, MANAGER, SERVER
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.cache import JOB_NAME, Books
from finetune_operator.kubernetes.translate.pod import Pod


async def books_of(reach: Reach, job: str | None = None) -> Books:
    """Look at all pods that the operator has made in the namespace, or at those of one attempt."""
    books = Books()
    selectors = (f"{JOB_NAME}={job}", f"{SERVER}={job}") if job else (f"{MANAGED_BY}={MANAGER}",)
    for selector in selectors:
        async for pod in reach.api.list(paths.pods(reach.place.namespace), labelSelector=selector):
            books.note_pod(pod)
    return books


async def pod_of(reach: Reach, attempt: AttemptStatus) -> Pod | None:
    """Give an attempt's pod, if it is still there."""
    books = await books_of(reach, attempt.job)
    return next(books.all_pods(), None)
