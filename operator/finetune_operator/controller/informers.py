"""Informers: keep the cache up to date, and queue the pipelines that changed or whose children did.

kopf watches the custom resource (`kopf_watch`). Reflectors watch the children: kopf takes about a millisecond for each
event, and a stage has a dozen.
"""

import asyncio
import gc
import logging
import random  # noqa: TID251  an edge
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from functools import partial
from http import HTTPStatus

from finetune_operator.controller.kopf_watch import KopfWatch
from finetune_operator.controller.metrics import WATCHES_RESTARTED
from finetune_operator.controller.reflector import (
    BASE_RETRY_SECONDS,
    MAX_RETRY_SECONDS,
    Reflector,
    Resource,
    watch_seconds,
)
from finetune_operator.controller.signals import ShutdownSignal
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.core.metadata import MANAGED_BY, MANAGED_BY_VALUE
from finetune_operator.errors import ClusterError
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.cache.cache import (
    CLAIMS,
    DEFAULTS,
    DEPLOYMENTS,
    EVENTS,
    JOBS,
    PIPELINES,
    PODS,
    SERVICES,
    ResourceCache,
)
from finetune_operator.kubernetes.cache.change import Change, Urgency
from finetune_operator.kubernetes.client import KubernetesClient
from finetune_operator.kubernetes.translate.api_errors import ApiError
from finetune_operator.kubernetes.translate.defaults import NAME as DEFAULTS_NAME
from finetune_operator.kubernetes.translate.object import Object

MANAGED_SELECTOR = (("labelSelector", f"{MANAGED_BY}={MANAGED_BY_VALUE}"),)
WARNINGS_SELECTOR = (("fieldSelector", "type=Warning"),)
# RBAC can limit an account to a single name, but then lets it list and watch with this selector
# only.
DEFAULTS_SELECTOR = (("fieldSelector", f"metadata.name={DEFAULTS_NAME}"),)
"""Selector of the ConfigMaps with defaults."""
UNFINISHED_PIPELINES = (("fieldSelector", "status.finishedAt="),)
UNFINISHED_JOBS = (("fieldSelector", "status.successful=0"),)
# Nearly all Jobs and pods have ended, and a reconcile reads them if it needs them.
UNFINISHED_PODS = (("fieldSelector", "status.phase!=Succeeded,status.phase!=Failed"),)
"""Selectors of the first list."""
CHILDREN: dict[str, tuple[Callable[[str | None], str], tuple[tuple[str, str], ...]]] = {
    DEFAULTS: (paths.config_maps, DEFAULTS_SELECTOR),
    # Jobs before pods: a pod is believed only as the pod of a known Job.
    JOBS: (paths.jobs, MANAGED_SELECTOR),
    DEPLOYMENTS: (paths.deployments, MANAGED_SELECTOR),
    SERVICES: (paths.services, MANAGED_SELECTOR),
    CLAIMS: (paths.claims, MANAGED_SELECTOR),
    PODS: (paths.pods, MANAGED_SELECTOR),
    EVENTS: (paths.events, WARNINGS_SELECTOR),
}
FIRST = {JOBS: UNFINISHED_JOBS, PODS: UNFINISHED_PODS}
# They make up for an event that a watch has missed.
RESYNC_SECONDS = 600.0
"""Time between two complete lists."""
# kopf asks for no bookmarks, so only the end of its watch shows that a connection is alive.
MAX_KOPF_WATCH_SECONDS = 60
LISTS_AT_ONCE = 8
"""Namespaces that are listed at the same time."""
# A change that it acts upon usually follows.
LATER_SECONDS = 2.0
"""Delay of a change that the operator does not act upon."""
# Any other error is temporary, and is retried.
ACCESS_LOST = frozenset(
    {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND}
)
"""Status codes of a list in a namespace that the operator may no longer read."""
ListReflector = Callable[[Reflector], Awaitable[None]]
"""`Reflector.list` or `Reflector.list_first`."""
log = logging.getLogger(__name__)


class Informers:
    """Keep the cache up to date, and queue every pipeline that changed or whose children changed."""

    def __init__(
        self,
        api: KubernetesClient,
        cache: ResourceCache,
        queue: WorkQueue,
        signals: ShutdownSignal,
        namespaces: Collection[str],
    ) -> None:
        self.cache = cache
        self.queue = queue
        self.kopf_watch = KopfWatch(
            signals,
            self._list_pipelines,
            self._on_pipeline_event,
            self._version_to_watch,
            min(watch_seconds(len(namespaces) or 1), MAX_KOPF_WATCH_SECONDS),
        )
        for kind in (PIPELINES, *CHILDREN):
            # Creates the series, so that the first restart is an increase.
            WATCHES_RESTARTED.labels(kind)
        scopes: Collection[str | None] = namespaces or [None]
        self.reflectors = {
            namespace: [
                Reflector(api, cache, resource, self._enqueue, self._enqueue_listed)
                for resource in _resources(namespace, watch_seconds(len(scopes)))
            ]
            for namespace in scopes
        }
        """Namespace, None for all of the cluster -> its reflectors; the first lists the pipelines."""
        self.on_error: Callable[[str, str | None, Exception], None] | None = None
        """Called with the kind and the namespace that a list or a watch could not read, and the error."""
        for reflectors in self.reflectors.values():
            for reflector in reflectors:
                reflector.on_error = self._report_error
        self.watched_namespaces = list(self.reflectors)
        """Namespaces that the last list could read. kopf would end on any other."""
        self.synced_at: float | None = None
        """When the last list ended, by the event loop's clock; None: none has since this replica became the leader."""
        self._is_complete = False
        """Whether everything has been listed since this replica became the leader."""
        self._stop = asyncio.Event()

    async def list_first(self) -> None:
        """List what a new leader needs to act; the watches list the rest. Retry with backoff after any error."""
        self._is_complete = False
        self.synced_at = None
        self.cache.has_all_claims = False
        # Of an earlier time as the leader. Some have finished since, and the first list does not show them.
        self.cache.pipelines.clear()
        await self._retry(partial(self._list, Reflector.list_first))

    async def list_with_retry(self) -> None:
        """List everything, and retry with backoff after any error."""
        await self._retry(self.list)

    async def _retry(self, attempt: Callable[[], Awaitable[None]]) -> None:
        delay = BASE_RETRY_SECONDS
        while True:
            try:
                await attempt()
            # Any error: one malformed object of one user must not stop the operator for all users.
            except Exception as error:
                bug = None if isinstance(error, ClusterError) else error
                log.warning(
                    "the list failed and is retried in %g s: %s",
                    delay,
                    error,
                    exc_info=bug,
                )
                await asyncio.sleep(delay)
                delay = min(delay * 2, MAX_RETRY_SECONDS)
            else:
                return

    async def list(self) -> None:
        """List each namespace and queue what is new.

        A namespace that the operator may no longer list keeps its part of the cache, and does not affect the others.
        Raises ApiError if no namespace can be listed, or if the API server is only busy.
        """
        await self._list(Reflector.list)

    async def _list(self, list_reflector: ListReflector) -> None:
        lost: dict[str | None, ApiError] = {}
        turns = asyncio.Semaphore(LISTS_AT_ONCE)

        async def list_one(name: str | None) -> None:
            async with turns:
                error = await self._try_list(name, list_reflector)
            if error:
                lost[name] = error

        try:
            async with asyncio.TaskGroup() as group:
                for name in self.reflectors:
                    group.create_task(list_one(name))
        except ExceptionGroup as errors:
            # The first error that is not about one namespace has ended all lists.
            raise errors.exceptions[0] from None
        if len(lost) == len(self.reflectors):
            raise next(iter(lost.values()))
        for name, error in lost.items():
            log.warning(
                "cannot list namespace %s; its pipelines are not reconciled until that works: %s",
                name,
                error,
            )
        readable = [name for name in self.reflectors if name not in lost]
        if readable != self.watched_namespaces:
            self.watched_namespaces = readable
            # Restarts the watches with these namespaces only: kopf ends on a namespace that it cannot watch.
            self._stop.set()
        self.synced_at = asyncio.get_running_loop().time()

    async def _try_list(
        self, namespace: str | None, list_reflector: ListReflector
    ) -> ApiError | None:
        try:
            for reflector in self.reflectors[namespace]:
                resource = reflector.resource
                await list_reflector(reflector)
        except ApiError as error:
            self._report_error(resource, error)
            if error.status not in ACCESS_LOST:
                raise
            return error
        return None

    def _report_error(self, resource: Resource, error: Exception) -> None:
        if self.on_error:
            self.on_error(resource.kind, resource.namespace, error)

    async def watch(self) -> None:
        """Watch forever; expects a list before it."""
        while True:
            stop = self._stop = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(
                        self.kopf_watch.run(self.watched_namespaces, stop)
                    )
                ]
                for namespace in self.watched_namespaces:
                    pipelines, *children = self.reflectors[namespace]
                    if not pipelines.listed.is_set():
                        rest = self._retry(pipelines.list)
                        tasks.append(group.create_task(rest))
                    tasks += [
                        group.create_task(reflector.watch()) for reflector in children
                    ]
                await stop.wait()
                for task in tasks:
                    task.cancel()

    async def resync_periodically(self) -> None:
        """List everything every `RESYNC_SECONDS`; only differences are queued."""
        while True:
            await asyncio.sleep(RESYNC_SECONDS * random.uniform(0.9, 1.1))  # noqa: S311
            await self.list_with_retry()

    def silent_watch(self, seconds: float) -> str:
        """Return a kind whose watch has only failed for this many seconds, or an empty string."""
        now = asyncio.get_running_loop().time()
        lost_at = self.kopf_watch.lost_at
        if lost_at is not None and now - lost_at > seconds:
            return PIPELINES
        for namespace in self.watched_namespaces:
            for reflector in self.reflectors[namespace][1:]:
                if now - (reflector.answered_at or now) > seconds:
                    return reflector.resource.kind
        return ""

    async def requeue_all(self) -> None:
        """Queue all pipelines, which this replica has not reconciled yet; the finished pipelines come last."""
        for entry in self.cache.pipelines.entries.values():
            if not entry.value.finished:
                self.queue.add(entry.value.key)
        # Only now does the cache have everything that a finished pipeline's reconcile reads.
        for name in self.watched_namespaces:
            for reflector in self.reflectors[name]:
                await reflector.listed.wait()
        self.cache.has_all_claims = True
        self._is_complete = True
        for entry in self.cache.pipelines.entries.values():
            if entry.value.finished:
                self.queue.add(entry.value.key, low=True)
        # Most of what there is now stays. The collector looks only at what comes later.
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    def _enqueue_listed(self, change: Change) -> None:
        """Queue the pipelines of a difference that a list shows; finished pipelines come last, with low priority.

        After a start, nearly all pipelines are finished, and a list shows all of them as new. Their children may be
        listed before them: then the cache does not have the pipeline yet.
        """
        for key in change.keys:
            pipeline = self.cache.pipelines.get((key.namespace, key.name))
            if pipeline and pipeline.finished:
                if self._is_complete and change.urgency is Urgency.NOW:
                    self.queue.add(key, low=True)
            elif pipeline or self._is_complete:
                self._enqueue(replace(change, keys=(key,)))

    def _enqueue(self, change: Change) -> None:
        """Queue the pipelines of a change; `Urgency.NEVER` with a pipeline is a change of its status only."""
        for key in change.keys:
            if change.urgency is Urgency.NOW:
                self.queue.add(key)
            # Only the status has changed. If no worker is writing it, another program has: it is written anew.
            elif change.urgency is Urgency.LATER or not self.queue.is_processing(key):
                self.queue.add_after(key, LATER_SECONDS)

    async def _list_pipelines(self) -> None:
        for namespace in self.watched_namespaces:
            await self.reflectors[namespace][0].list()

    def _on_pipeline_event(self, kind_of_event: str, pipeline: Object) -> None:
        if kind_of_event == "DELETED":
            change = self.cache.remove(PIPELINES, pipeline)
        else:
            change = self.cache.update(PIPELINES, pipeline)
        self._enqueue(change)

    async def _version_to_watch(self, namespace: str | None) -> str:
        """Return the version of the last list of pipelines; list them if a watch has begun there before."""
        reflector = self.reflectors[namespace][0]
        if not reflector.watch_from:
            await reflector.list()
        version = reflector.watch_from
        reflector.watch_from = ""
        return version


def _resources(namespace: str | None, seconds: int) -> list[Resource]:
    children = (
        Resource(
            kind,
            path(namespace),
            query,
            FIRST.get(kind, ()),
            namespace,
            seconds,
            later=kind == CLAIMS,
        )
        for kind, (path, query) in CHILDREN.items()
    )
    pipelines = Resource(
        PIPELINES,
        paths.pipelines(namespace),
        first=UNFINISHED_PIPELINES,
        namespace=namespace,
    )
    return [pipelines, *children]
