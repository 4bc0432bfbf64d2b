"""Informers: keep the cache up to date, and queue the pipelines that changed or whose children did.

kopf watches the custom resource. Some responses of an API server (an ERROR event, a minute of 503) end kopf's operator:
only that watch ends with it, and it is restarted. Reflectors watch the children: kopf takes about a millisecond for
each event, and a stage has a dozen.
"""

import asyncio
import gc
import logging
import os
import random  # noqa: TID251  an edge
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any

import kopf
from typing_extensions import override

from finetune_operator.api.group import GROUP, PLURAL, VERSION
from finetune_operator.controller.metrics import WATCHES_RESTARTED
from finetune_operator.controller.reflector import (
    BASE_RETRY_SECONDS,
    MAX_RETRY_SECONDS,
    WATCH_SECONDS,
    Reflector,
    Resource,
)
from finetune_operator.controller.signals import StopSignal
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.core.metadata import MANAGED_BY, MANAGED_BY_VALUE
from finetune_operator.core.pipeline import Key
from finetune_operator.errors import ClusterError
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.cache import (
    CLAIMS,
    DEFAULTS,
    DEPLOYMENTS,
    EVENTS,
    JOBS,
    PIPELINES,
    PODS,
    SERVICES,
    Change,
    ResourceCache,
    Urgency,
)
from finetune_operator.kubernetes.client import PAGE, WATCH_GRACE_SECONDS, KubernetesClient
from finetune_operator.kubernetes.translate.api_errors import ApiError
from finetune_operator.kubernetes.translate.defaults import NAME as DEFAULTS_NAME

MANAGED_SELECTOR = (("labelSelector", f"{MANAGED_BY}={MANAGED_BY_VALUE}"),)
WARNINGS_SELECTOR = (("fieldSelector", "type=Warning"),)
DEFAULTS_SELECTOR = (("fieldSelector", f"metadata.name={DEFAULTS_NAME}"),)
"""RBAC lets an account list and watch objects of one name only with this selector."""
UNFINISHED_JOBS = (("fieldSelector", "status.successful=0"),)
UNFINISHED_PODS = (("fieldSelector", "status.phase!=Succeeded,status.phase!=Failed"),)
"""What is listed first. Nearly all Jobs and pods have ended, and a reconcile reads those that it misses."""
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
KOPF_EXIT_SECONDS = 5.0
"""Time that kopf gets to end before it is started again."""
RESYNC_SECONDS = 600.0
"""Between two complete lists, which make up for an event that a watch has missed."""
LATER_SECONDS = 2.0
"""Delay of a change that the operator does not act upon; it is usually followed by one that it does."""
ACCESS_LOST = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND})
"""Status codes of a list in a namespace that the operator may no longer read. Any other error is retried."""
ListOne = Callable[[Reflector], Awaitable[None]]
log = logging.getLogger(__name__)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Collect no garbage in the block, and nothing of what it leaves behind afterwards.

    A list creates millions of objects without cycles. The collector would look at all of them, and at the cache, again
    and again: half of the time of a list.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


class Informers:
    """Keep the cache up to date, and queue every pipeline that changed or whose children changed."""

    def __init__(
        self,
        api: KubernetesClient,
        cache: ResourceCache,
        queue: WorkQueue,
        signals: StopSignal,
        namespaces: Collection[str],
    ) -> None:
        self.cache, self.queue, self.signals = cache, queue, signals
        for kind in (PIPELINES, *CHILDREN):
            WATCHES_RESTARTED.labels(
                kind
            )  # creates the series, so that the first restart is an increase
        scopes: Collection[str | None] = namespaces or [None]
        self.reflectors = {
            namespace: [
                Reflector(api, cache, resource, self._enqueue, self._enqueue_listed)
                for resource in _resources(namespace)
            ]
            for namespace in scopes
        }
        """Namespace, None for all of the cluster -> its reflectors; the first is that of the pipelines."""
        self.watched_namespaces = list(self.reflectors)
        """Namespaces that the last list could read. kopf would end on any other."""
        self.synced_at: float | None = None
        """When the last list ended, by the event loop's clock; None: none has since this replica became the leader."""
        self._is_complete = False
        """Whether everything has been listed since this replica became the leader."""
        self._stop = asyncio.Event()
        self._pipelines_lost_at: float | None = None
        """When the watch of pipelines ended, if they could not be listed since, by the event loop's clock."""

    async def list_first(self) -> None:
        """List what a new leader needs to act; the watches list the rest. Retry with backoff after any error."""
        self._is_complete, self.synced_at = False, None
        with _without_garbage_collection():
            await self._retry(partial(self._list, Reflector.list_first))

    async def list_with_retry(self) -> None:
        """List everything, and retry with backoff after any error."""
        await self._retry(self.list)

    async def _retry(self, attempt: Callable[[], Awaitable[None]]) -> None:
        delay = BASE_RETRY_SECONDS
        while True:
            try:
                await attempt()
            except (
                Exception
            ) as error:  # one malformed object of one user must not stop the operator for all users
                bug = None if isinstance(error, ClusterError) else error
                log.warning(
                    "the list failed and is retried in %g s: %s", delay, error, exc_info=bug
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
        with _without_garbage_collection():
            await self._list(Reflector.list)

    async def _list(self, list_one: ListOne) -> None:
        lost = {
            name: error
            for name in self.reflectors
            if (error := await self._try_list(name, list_one))
        }
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
            self._stop.set()  # restarts the watches
        self.synced_at = asyncio.get_running_loop().time()

    async def _try_list(self, namespace: str | None, list_one: ListOne) -> ApiError | None:
        try:
            for reflector in self.reflectors[namespace]:
                await list_one(reflector)
        except ApiError as error:
            if error.status not in ACCESS_LOST:
                raise
            return error
        return None

    async def watch(self) -> None:
        """Watch forever; expects a list before it."""
        while True:
            stop = self._stop = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._watch_pipelines(stop))]
                for namespace in self.watched_namespaces:
                    children = self.reflectors[namespace][1:]
                    tasks += [group.create_task(reflector.watch()) for reflector in children]
                await stop.wait()
                for task in tasks:
                    task.cancel()

    async def resync_periodically(self) -> None:
        """List everything every `RESYNC_SECONDS`; only differences are queued."""
        while True:
            await asyncio.sleep(RESYNC_SECONDS * random.uniform(0.9, 1.1))  # noqa: S311
            await self.list_with_retry()

    def silent_watch(self, seconds: float) -> str:
        """Return a kind whose watch has only failed for so long, or an empty string."""
        now = asyncio.get_running_loop().time()
        if self._pipelines_lost_at is not None and now - self._pipelines_lost_at > seconds:
            return PIPELINES
        watched = (one for name in self.watched_namespaces for one in self.reflectors[name][1:])
        return next(
            (one.resource.kind for one in watched if now - (one.answered_at or now) > seconds), ""
        )

    async def requeue_all(self) -> None:
        """Queue all pipelines, which this replica has not reconciled yet: the finished ones when all is listed."""
        finished = []
        for entry in self.cache.pipelines.entries.values():
            if entry.value.finished:
                finished.append(entry.value.key)
            else:
                self.queue.add(entry.value.key)
        for name in self.watched_namespaces:
            for reflector in self.reflectors[name]:
                await reflector.listed.wait()
        self._is_complete = True
        for key in finished:
            self.queue.add(key, low=True)

    def _enqueue_listed(self, change: Change) -> None:
        """Queue the pipelines of a difference that a list shows; finished ones wait for the rest and have low priority.

        After a start, nearly all pipelines are finished, and a list shows all of them as new.
        """
        for key in change.keys:
            if not self._is_finished(key):
                self._enqueue(replace(change, keys=(key,)))
            elif self._is_complete and change.urgency is Urgency.NOW:
                self.queue.add(key, low=True)

    def _enqueue(self, change: Change) -> None:
        """Queue the pipelines of a change; `Urgency.NEVER` with a pipeline is a change of its status only."""
        for key in change.keys:
            if change.urgency is Urgency.NOW:
                self.queue.add(key)
            # Only the status has changed. If no worker is writing it, another program has: it is written anew.
            elif change.urgency is Urgency.LATER or not self.queue.is_processing(key):
                self.queue.add_after(key, LATER_SECONDS)

    def _is_finished(self, key: Key) -> bool:
        pipeline = self.cache.pipelines.get((key.namespace, key.name))
        return pipeline is not None and pipeline.finished

    # The custom resource.

    async def _watch_pipelines(self, stop: asyncio.Event) -> None:
        ended, self._pipelines_lost_at = False, None
        while not stop.is_set():
            try:
                for namespace in (
                    self.watched_namespaces if ended else ()
                ):  # what has changed since kopf ended
                    await self.reflectors[namespace][0].list()
                self._pipelines_lost_at = None
                await self._run_kopf(stop)
            except Exception as error:  # noqa: BLE001  the watch is restarted after any error
                log.warning("kopf ended and is restarted: %s", str(error) or type(error).__name__)
            ended = True
            self._pipelines_lost_at = self._pipelines_lost_at or asyncio.get_running_loop().time()
            WATCHES_RESTARTED.labels(PIPELINES).inc()
            await asyncio.sleep(BASE_RETRY_SECONDS * random.uniform(0.5, 1.5))  # noqa: S311

    async def _run_kopf(self, stop: asyncio.Event) -> None:
        """Run kopf until `stop` is set, or until it ends or hangs."""
        hung = asyncio.Event()
        asyncio.get_running_loop().set_exception_handler(partial(_notice_hang, hung))
        clusterwide = None in self.watched_namespaces
        scope: dict[str, Any] = {
            "clusterwide": clusterwide,
            "namespaces": [] if clusterwide else self.watched_namespaces,
        }
        # An explicit identity: kopf's default contains the user's name, and a container's user has none.
        peering: dict[str, Any] = {"identity": MANAGED_BY_VALUE, "standalone": True}
        operator = kopf.operator(
            registry=self._registry(), settings=_settings(), **scope, **peering
        )
        tasks = [asyncio.create_task(wait) for wait in (operator, stop.wait(), hung.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done() and not tasks[0].exception():
                # kopf ends without an error when it receives a signal itself; the signal was for the whole process.
                self.signals.requested.set()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=KOPF_EXIT_SECONDS)
        if tasks[0].done() and not tasks[0].cancelled() and (error := tasks[0].exception()):
            raise error

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
        async def on_event(event: Any, **_: Any) -> None:
            found = dict(event["object"])
            update = self.cache.remove if event["type"] == "DELETED" else self.cache.update
            self._enqueue(update(PIPELINES, found))

        @kopf.on.startup(registry=registry)
        async def reinstall_signal_handlers(**_: Any) -> None:
            self.signals.install()  # kopf has just installed its own

        kopf.on.login(registry=registry)(kopf.login_via_client)
        return registry


def _notice_hang(
    hung: asyncio.Event, loop: asyncio.AbstractEventLoop, context: dict[str, Any]
) -> None:
    """Log an error that no task has raised; one in kopf's code leaves its watch without an end."""
    loop.default_exception_handler(context)
    error = context.get("exception")
    frames = traceback.extract_tb(error.__traceback__) if error else []
    if any(f"{os.sep}kopf{os.sep}" in frame.filename for frame in frames):
        hung.set()


def _resources(namespace: str | None) -> list[Resource]:
    return [
        Resource(PIPELINES, paths.pipelines(namespace), namespace=namespace),
        *(
            Resource(kind, path(namespace), query, FIRST.get(kind, ()), namespace)
            for kind, (path, query) in CHILDREN.items()
        ),
    ]


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.process.ultimate_exiting_timeout = None
    settings.networking.request_timeout = 30.0
    settings.networking.connect_timeout = 10.0
    settings.watching.server_timeout = (
        WATCH_SECONDS  # an int: the API server rejects timeoutSeconds=20.0
    )
    settings.watching.inactivity_timeout = WATCH_SECONDS + WATCH_GRACE_SECONDS
    settings.watching.chunk_size = PAGE
    settings.persistence.diffbase_storage = NoDiff()
    return settings


class NoDiff(kopf.DiffBaseStorage):
    """No difference between two states of an object: kopf would copy each object to find one, and no handler asks."""

    @override
    def build(self, **_: Any) -> kopf.BodyEssence:
        return {}

    @override
    def fetch(self, **_: Any) -> None:
        return None

    @override
    def store(self, **_: Any) -> None:
        return None
