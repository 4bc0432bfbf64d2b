"""The hands that call `reconcile`: whatever happens to one pipeline, the others go on."""

import asyncio
import logging
import time
from datetime import UTC, datetime

from finetune_operator.controller.metrics import RECONCILED, SECONDS
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.core.pipeline import Key
from finetune_operator.core.settings import Settings
from finetune_operator.errors import ClusterError, Conflict, Unusable
from finetune_operator.kubernetes.cluster import KubernetesCluster
from finetune_operator.reconcile import reconcile

PATIENCE_SECONDS = 120.0
"""For one reconcile; each request has a limit of its own."""
log = logging.getLogger(__name__)


async def work(queue: WorkQueue, cluster: KubernetesCluster, settings: Settings) -> None:
    """Reconcile whoever comes next, for ever."""
    while True:
        key = await queue.get()
        began = time.monotonic()
        try:
            outcome = await once(key, queue, cluster, settings)
        finally:
            queue.done(key)
        RECONCILED.labels(outcome).inc()
        SECONDS.observe(time.monotonic() - began)


async def once(key: Key, queue: WorkQueue, cluster: KubernetesCluster, settings: Settings) -> str:
    """Reconcile one pipeline and say in one word how that went; whatever is raised concerns this one only."""
    try:
        return await _once(key, queue, cluster, settings)
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) and task.cancelling():
            raise
        log.exception("%s is tried again in %.1f s: what it waited for was called off", key, queue.retry(key))
    except Exception:
        log.exception("%s is tried again in %.1f s: this is a bug", key, queue.retry(key))
    return "bug"


async def _once(key: Key, queue: WorkQueue, cluster: KubernetesCluster, settings: Settings) -> str:
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            look = await reconcile(key, cluster, settings, datetime.now(UTC))  # noqa: TID251  an edge
    except Conflict:
        queue.add_after(key, 0.05)  # somebody was faster: read it again
        return "conflict"
    except Unusable as error:
        log.warning("%s cannot be used: %s", key, error)
        return await _refused(key, queue, cluster, str(error))
    except (ClusterError, TimeoutError) as error:
        log.warning("%s is tried again in %.1f s: %s", key, queue.retry(key), str(error) or "it took too long")
        return "error"
    queue.succeeded(key)
    if look.gone and not queue.heard_of(key):  # else another of the same name has been made meanwhile
        queue.forget(key)
        cluster.forget(key)
    elif look.after is not None:
        queue.add_after(key, look.after.total_seconds())
    return "done"


async def _refused(key: Key, queue: WorkQueue, cluster: KubernetesCluster, why: str) -> str:
    """Say so in the status; it is looked at again when it changes."""
    try:
        await cluster.refuse(key, why)
    except ClusterError as error:
        log.warning("%s: its status was not written, again in %.1f s: %s", key, queue.retry(key), error)
    return "refused"
