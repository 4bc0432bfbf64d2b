"""The hands that call `reconcile`: whatever happens to one pipeline, the others go on."""

import asyncio
import logging
import time
from datetime import UTC, datetime

from finetune_operator.controller.metrics import RECONCILE_SECONDS, RECONCILED
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.core.pipeline import Key
from finetune_operator.core.settings import Settings
from finetune_operator.errors import ClusterError, Conflict, InvalidObject
from finetune_operator.kubernetes.cluster import KubernetesCluster
from finetune_operator.reconcile import reconcile

RECONCILE_TIMEOUT_SECONDS = 120.0
"""For one reconcile; each request has a limit of its own."""
log = logging.getLogger(__name__)


async def run_worker(queue: WorkQueue, cluster: KubernetesCluster, settings: Settings) -> None:
    """Reconcile whoever comes next, for ever."""
    while True:
        key = await queue.get()
        began = time.monotonic()
        try:
            outcome = await process(key, queue, cluster, settings)
        finally:
            queue.done(key)
        RECONCILED.labels(outcome).inc()
        RECONCILE_SECONDS.observe(time.monotonic() - began)


async def process(key: Key, queue: WorkQueue, cluster: KubernetesCluster, settings: Settings) -> str:
    """Reconcile one pipeline and say in one word how that went; whatever is raised concerns this one only."""
    try:
        return await _reconcile(key, queue, cluster, settings)
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) and task.cancelling():
            raise
        log.exception(
            "%s is tried again in %.1f s: what it waited for was called off", key, queue.add_rate_limited(key)
        )
    except Exception:
        log.exception("%s is tried again in %.1f s: this is a bug", key, queue.add_rate_limited(key))
    return "bug"


async def _reconcile(key: Key, queue: WorkQueue, cluster: KubernetesCluster, settings: Settings) -> str:
    try:
        async with asyncio.timeout(RECONCILE_TIMEOUT_SECONDS):
            look = await reconcile(key, cluster, settings, datetime.now(UTC))  # noqa: TID251  an edge
    except Conflict:
        queue.add_after(key, 0.05)  # somebody was faster: read it again
        return "conflict"
    except InvalidObject as error:
        log.warning("%s cannot be used: %s", key, error)
        return await _mark_invalid(key, queue, cluster, str(error))
    except (ClusterError, TimeoutError) as error:
        log.warning(
            "%s is tried again in %.1f s: %s", key, queue.add_rate_limited(key), str(error) or "it took too long"
        )
        return "error"
    queue.forget(key)
    if look.gone and not queue.is_dirty(key):  # else another of the same name has been made meanwhile
        queue.remove(key)
        cluster.forget(key)
    elif look.requeue_after is not None:
        queue.add_after(key, look.requeue_after.total_seconds())
    return "done"


async def _mark_invalid(key: Key, queue: WorkQueue, cluster: KubernetesCluster, why: str) -> str:
    """Say so in the status; it is looked at again when it changes."""
    try:
        await cluster.mark_invalid(key, why)
    except ClusterError as error:
        log.warning("%s: its status was not written, again in %.1f s: %s", key, queue.add_rate_limited(key), error)
    return "refused"
