"""Informers: list and watch pipelines and their children, keep the cache up to date, and queue the changed pipelines.

kopf watches. Its handlers only update the cache and add to the work queue. Some responses of an API server (an ERROR
event, a minute of 503) end kopf's operator. Only the watches end with it, and they are restarted.
"""

import asyncio
import logging
import random  # noqa: TID251  an edge
from collections.abc import Callable, Collection
from http import HTTPStatus
from typing import Any

import kopf

from finetune_operator.api.group import GROUP, PLURAL, VERSION
from finetune_operator.controller.metrics import WATCHES_RESTARTED
from finetune_operator.controller.signals import StopSignal
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.core.metadata import MANAGED_BY, MANAGED_BY_VALUE
from finetune_operator.core.pipeline import Key
from finetune_operator.errors import ClusterError
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.cache import PIPELINES, ResourceCache
from finetune_operator.kubernetes.client import KubernetesClient, Object
from finetune_operator.kubernetes.translate.api_errors import ApiError

MANAGED_SELECTOR = f"{MANAGED_BY}={MANAGED_BY_VALUE}"
CHILDREN = {
    "jobs": ("batch", paths.jobs),
    "deployments": ("apps", paths.deployments),
    "services": ("", paths.services),
    "pods": ("", paths.pods),
}
"""The kinds of objects created for pipelines: API group and path."""
RESYNC_SECONDS = 300.0
"""Between two periodic relists."""
RESTART_SECONDS = 2.0
"""Before the watches are restarted."""
BASE_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 15.0
"""Delay before a failed relist is retried; it doubles up to the maximum."""
ACCESS_LOST = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND})
"""Status codes of a list in a namespace that the operator may no longer read. Any other error is retried."""
log = logging.getLogger(__name__)


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
        self.api, self.cache, self.queue, self.signals = api, cache, queue, signals
        self.namespaces: Collection[str | None] = namespaces or [None]
        """Configured namespaces; None: all namespaces of the cluster, in one list."""
        self.watched_namespaces = list(self.namespaces)
        """Namespaces that the last relist could list. kopf would end on any other."""
        self.synced_at: float | None = None
        """When the last relist ended, by the event loop's clock."""
        self._relisting = asyncio.Lock()
        self._stop = asyncio.Event()

    async def watch(self) -> None:
        """Watch forever. Expects a relist before it; the relist after each restart finds the changes in between."""
        while True:
            try:
                await self._watch_once()
            except Exception as error:  # noqa: BLE001  the watches are restarted after any error
                log.warning("the watches ended and are restarted: %s", str(error) or type(error).__name__)
            WATCHES_RESTARTED.inc()
            await asyncio.sleep(RESTART_SECONDS * random.uniform(0.5, 1.5))  # noqa: S311
            await self.relist_with_retry()

    async def resync_periodically(self) -> None:
        """Relist every `RESYNC_SECONDS`, so that an event that a watch missed is made up for."""
        while True:
            await asyncio.sleep(RESYNC_SECONDS * random.uniform(0.9, 1.1))  # noqa: S311
            await self.relist_with_retry()

    async def relist_with_retry(self) -> None:
        """Relist, and retry with backoff after any error."""
        delay = BASE_RETRY_SECONDS
        while True:
            try:
                await self.relist()
            except Exception as error:  # one malformed object of one user must not stop the operator for all users
                bug = None if isinstance(error, ClusterError) else error
                log.warning("the relist failed and is retried in %g s: %s", delay, error, exc_info=bug)
                await asyncio.sleep(delay)
                delay = min(delay * 2, MAX_RETRY_SECONDS)
            else:
                return

    async def relist(self) -> None:
        """List each namespace and bring the cache up to date with it; one relist runs at a time.

        A namespace that the operator may no longer list keeps its part of the cache, and does not affect the others.
        Raises ApiError if no namespace can be listed, or if the API server is only busy.
        """
        async with self._relisting:
            lost = {name: error for name in self.namespaces if (error := await self._try_relist(name))}
            if len(lost) == len(self.namespaces):
                raise next(iter(lost.values()))
            for name, error in lost.items():
                log.warning(
                    "cannot list namespace %s; its pipelines are not reconciled until that works: %s", name, error
                )
            self._watch_in([name for name in self.namespaces if name not in lost])
            self.synced_at = asyncio.get_running_loop().time()

    async def _try_relist(self, namespace: str | None) -> ApiError | None:
        try:
            await self._relist_namespace(namespace)
        except ApiError as error:
            if error.status not in ACCESS_LOST:
                raise
            return error
        return None

    async def _relist_namespace(self, namespace: str | None) -> None:
        """List the operator's objects in the namespace, replace its part of the cache, and queue its pipelines."""
        self.cache.begin_relist()  # before the first list: an event received from here on is newer than the lists
        lists = {PIPELINES: await self._list(paths.pipelines(namespace))}
        for kind, (_, path) in CHILDREN.items():
            lists[kind] = await self._list(path(namespace), labelSelector=MANAGED_SELECTOR)
        for key in self.cache.replace(namespace, **lists):
            self.queue.add(key)

    async def _list(self, path: str, **query: str) -> list[Object]:
        return [item async for item in self.api.list(path, **query)]

    def _watch_in(self, namespaces: list[str | None]) -> None:
        """Restart the watches if the namespaces to watch have changed."""
        if namespaces != self.watched_namespaces:
            self.watched_namespaces = namespaces
            self._stop.set()

    async def _watch_once(self) -> None:
        stop = self._stop = asyncio.Event()
        try:
            clusterwide = None in self.watched_namespaces
            scope: dict[str, Any] = {
                "clusterwide": clusterwide,
                "namespaces": [] if clusterwide else self.watched_namespaces,
            }
            # An explicit identity: kopf's default contains the user's name, and a container's user has none.
            peering: dict[str, Any] = {"identity": MANAGED_BY_VALUE, "standalone": True}
            await kopf.operator(registry=self._registry(), settings=_settings(), stop_flag=stop, **scope, **peering)
            if not stop.is_set():
                # kopf ends without an error when it receives a signal itself; the signal was for the whole process.
                self.signals.requested.set()
        finally:
            stop.set()

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        def watch(*resource: str, update: Callable[..., Key | None], **filters: Any) -> None:
            @kopf.on.event(*resource, registry=registry, **filters)
            async def on_event(event: Any, **_: Any) -> None:
                if key := update(dict(event["object"]), gone=event["type"] == "DELETED"):
                    self.queue.add(key)

        @kopf.on.startup(registry=registry)
        async def reinstall_signal_handlers(**_: Any) -> None:
            self.signals.install()  # kopf has just installed its own

        kopf.on.login(registry=registry)(kopf.login_via_client)
        watch(GROUP, VERSION, PLURAL, update=self.cache.update_pipeline)
        for kind, (group, _) in CHILDREN.items():
            watch(group, "v1", kind, update=self.cache.handlers[kind], labels={MANAGED_BY: MANAGED_BY_VALUE})
        return registry


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.process.ultimate_exiting_timeout = None
    settings.networking.request_timeout = 30.0
    settings.networking.connect_timeout = 10.0
    settings.watching.server_timeout = 240  # an int: the API server rejects timeoutSeconds=240.0
    settings.watching.label_selectors.update(dict.fromkeys(CHILDREN, MANAGED_SELECTOR))
    return settings
