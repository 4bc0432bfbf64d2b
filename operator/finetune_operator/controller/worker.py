"""Workers, which call `reconcile`. An error in one pipeline does not affect the others."""

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Protocol

from finetune_operator.cluster import Cluster
from finetune_operator.controller.logging_format import pipeline_context
from finetune_operator.controller.metrics import RECONCILE_SECONDS, RECONCILED
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.core.pipeline import Key
from finetune_operator.core.settings import Settings
from finetune_operator.errors import ClusterError, Conflict, InvalidObject
from finetune_operator.kubernetes.translate.api_errors import ApiError
from finetune_operator.reconcile import reconcile

RECONCILE_TIMEOUT_SECONDS = 120.0
"""For one reconcile; each of its requests has a time limit of its own."""
CONFLICT_DELAY_SECONDS = 0.05
log = logging.getLogger(__name__)


class SharedCluster(Cluster, Protocol):
    """The cluster as several workers use it."""

    def claim_lock(self, key: Key) -> asyncio.Lock:
        """Return the lock of the pipelines that share a claim with this one."""

    async def mark_invalid(self, key: Key, error: InvalidObject) -> None:
        """Write to the status why the pipeline cannot be read."""

    def report_forbidden(self, key: Key, error: ClusterError) -> None:
        """Create an Event about a request for this pipeline that the API server forbids."""


async def run_worker(
    queue: WorkQueue, cluster: SharedCluster, settings: Callable[[], Settings]
) -> None:
    """Process one pipeline of the queue after the other, forever, each with the settings of that moment."""
    while True:
        key = await queue.get()
        began = time.monotonic()
        try:
            with pipeline_context(key):
                outcome = await process(key, queue, cluster, settings())
        finally:
            queue.done(key)
        RECONCILED.labels(outcome).inc()
        RECONCILE_SECONDS.labels(outcome).observe(time.monotonic() - began)
        # A reconcile without a request never waits. Thousands of them in a row would hold up the Lease.
        await asyncio.sleep(0)


async def process(
    key: Key, queue: WorkQueue, cluster: SharedCluster, settings: Settings
) -> str:
    """Reconcile one pipeline and return the outcome, a label of the metric `finetune_reconcile`.

    Raises nothing but the worker's own cancellation: any error concerns this pipeline only, and it is retried.
    """
    try:
        return await _reconcile(key, queue, cluster, settings)
    except asyncio.CancelledError:
        # Only a cancelled worker ends. The error is also raised when something that the reconcile awaits is cancelled.
        task = asyncio.current_task()
        if task and task.cancelling():
            raise
        log.exception(
            "cannot reconcile %s, retrying in %.1f s: an awaited task was cancelled",
            key,
            queue.add_rate_limited(key),
        )
    except Exception:
        log.exception(
            "cannot reconcile %s, retrying in %.1f s: unexpected error, a bug in the operator",
            key,
            queue.add_rate_limited(key),
        )
    return "bug"


async def _reconcile(
    key: Key, queue: WorkQueue, cluster: SharedCluster, settings: Settings
) -> str:
    lock = cluster.claim_lock(key)
    # Another pipeline with the claim is reconciled: the worker takes other work meanwhile.
    if lock.locked():
        queue.add_after(key, CONFLICT_DELAY_SECONDS)
        return "done"
    try:
        async with asyncio.timeout(RECONCILE_TIMEOUT_SECONDS), lock:
            result = await reconcile(key, cluster, settings, datetime.now(UTC))  # noqa: TID251  an edge
    except Conflict:
        # Another writer changed the object. Once is no failure: read it again soon.
        queue.add_rate_limited(key, CONFLICT_DELAY_SECONDS)
        return "conflict"
    except InvalidObject as error:
        log.warning("cannot reconcile %s until it is changed: %s", key, error)
        return await _mark_invalid(key, queue, cluster, error)
    except (ClusterError, TimeoutError) as error:
        if isinstance(error, ApiError) and error.status == HTTPStatus.FORBIDDEN:
            cluster.report_forbidden(key, error)
        message = str(error) or f"timed out (limit: {RECONCILE_TIMEOUT_SECONDS:g} s)"
        log.warning(
            "cannot reconcile %s, retrying in %.1f s: %s",
            key,
            queue.add_rate_limited(key),
            message,
        )
        return "error"
    if result.refusals:
        delay = queue.add_rate_limited(key)
        log.warning(
            "%s: refused, retrying in %.1f s: %s",
            key,
            delay,
            "; ".join(result.refusals),
        )
        return "refused"
    queue.forget(key)
    # A dirty key: a pipeline of the same name may exist by now.
    if result.gone and not queue.is_dirty(key):
        queue.remove(key)
    elif result.requeue_after is not None:
        queue.add_after(key, result.requeue_after.total_seconds())
    return "done"


async def _mark_invalid(
    key: Key, queue: WorkQueue, cluster: SharedCluster, problem: InvalidObject
) -> str:
    """Write the reason to the status. The pipeline is reconciled again when it changes."""
    try:
        await cluster.mark_invalid(key, problem)
    except ClusterError as error:
        delay = queue.add_rate_limited(key)
        log.warning(
            "cannot write the status of %s, retrying in %.1f s: %s", key, delay, error
        )
    return "invalid"
