"""What changes in the cluster: kopf watches, we write it into the books and queue the pipeline it is about.

kopf's process would end over some answers of an API server (an ERROR event, a minute of 503); here only its watches
do, and they are begun again. Its handlers neither write nor decide anything.
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
from finetune_operator.kubernetes.client import ApiError, KubernetesClient, Object

MANAGED_SELECTOR = f"{MANAGED_BY}={MANAGED_BY_VALUE}"
CHILDREN = {
    "jobs": ("batch", paths.jobs),
    "deployments": ("apps", paths.deployments),
    "services": ("", paths.services),
    "pods": ("", paths.pods),
}
"""What is made for pipelines: the group of its API, and where it is."""
RESYNC_SECONDS = 300.0
"""Between two comparisons of the books with the whole lists."""
RESTART_SECONDS = 2.0
BASE_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 15.0
"""Between two tries of a comparison that goes wrong, in seconds."""
ACCESS_LOST = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND})
"""What a list answers for ever in a namespace that was taken from us; anything else is waited for."""
log = logging.getLogger(__name__)


class Informers:
    """Keep the books, and queue whatever they are about."""

    def __init__(
        self,
        api: KubernetesClient,
        books: ResourceCache,
        queue: WorkQueue,
        signals: StopSignal,
        namespaces: Collection[str],
    ) -> None:
        self.api, self.cache, self.queue, self.signals = api, books, queue, signals
        self.namespaces: Collection[str | None] = namespaces or [None]
        """Namespaces; None: all there are, in one list."""
        self.watched_namespaces = list(self.namespaces)
        """Those that could be listed when that was last tried: kopf would end over any other."""
        self.synced_at: float | None = None
        """When the books were last compared with the API server, by the loop's clock."""
        self._relisting = asyncio.Lock()
        self._stop = asyncio.Event()

    async def watch(self) -> None:
        """Watch for ever, after a comparison; what was missed between two watches is found by another."""
        while True:
            try:
                await self._watch_once()
            except Exception as error:  # noqa: BLE001  whatever it is: a watch that ends is begun again
                log.warning("watching is begun again: %s", str(error) or type(error).__name__)
            WATCHES_RESTARTED.inc()
            await asyncio.sleep(RESTART_SECONDS * random.uniform(0.5, 1.5))  # noqa: S311
            await self.relist_with_retry()

    async def resync_periodically(self) -> None:
        """Compare every few minutes, so that nothing that a watch missed stays wrong for long."""
        while True:
            await asyncio.sleep(RESYNC_SECONDS * random.uniform(0.9, 1.1))  # noqa: S311
            await self.relist_with_retry()

    async def relist_with_retry(self) -> None:
        """Compare, and try again for as long as that goes wrong, whatever the reason: it ends nothing else."""
        wait = BASE_RETRY_SECONDS
        while True:
            try:
                await self.relist()
            except Exception as error:  # one object of one user must not end it for all
                bug = None if isinstance(error, ClusterError) else error
                log.warning("the books are compared again in %g s: %s", wait, error, exc_info=bug)
                await asyncio.sleep(wait)
                wait = min(wait * 2, MAX_RETRY_SECONDS)
            else:
                return

    async def relist(self) -> None:
        """Compare each namespace by itself; what was known of one that is lost stays, and the others go on.

        Raises where none can be listed, and where the API server is merely busy. One comparison at a time.
        """
        async with self._relisting:
            lost = {place: error for place in self.namespaces if (error := await self._try_relist(place))}
            if len(lost) == len(self.namespaces):
                raise next(iter(lost.values()))
            for place, error in lost.items():
                log.warning("the namespace %s is not looked after until it can be listed again: %s", place, error)
            self._watch_in([place for place in self.namespaces if place not in lost])
            self.synced_at = asyncio.get_running_loop().time()

    async def _try_relist(self, place: str | None) -> ApiError | None:
        try:
            await self._relist_resource(place)
        except ApiError as error:
            if error.status not in ACCESS_LOST:
                raise
            return error
        return None

    async def _relist_resource(self, place: str | None) -> None:
        """Read everything that is ours there, sweep the books, and look at every pipeline."""
        self.cache.begin_relist()
        lists = {PIPELINES: await self._all(paths.pipelines(place))}
        for kind, (_, path) in CHILDREN.items():
            lists[kind] = await self._all(path(place), labelSelector=MANAGED_SELECTOR)
        for key in self.cache.replace(place, **lists):
            self.queue.add(key)

    async def _all(self, path: str, **query: str) -> list[Object]:
        return [found async for found in self.api.list(path, **query)]

    def _watch_in(self, places: list[str | None]) -> None:
        """Watch there from now on."""
        if places != self.watched_namespaces:
            self.watched_namespaces = places
            self._stop.set()

    async def _watch_once(self) -> None:
        stop = self._stop = asyncio.Event()
        try:
            everywhere = None in self.watched_namespaces
            scope: dict[str, Any] = {
                "clusterwide": everywhere,
                "namespaces": [] if everywhere else self.watched_namespaces,
            }
            # An identity of its own, or kopf looks for the user's name, and in a container there is none.
            who: dict[str, Any] = {"identity": MANAGED_BY_VALUE, "standalone": True}
            await kopf.operator(registry=self._registry(), settings=_settings(), stop_flag=stop, **scope, **who)
            if not stop.is_set():
                self.signals.requested.set()  # it ended without an error, as it does when it takes a signal meant for us
        finally:
            stop.set()

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        def watch(*resource: str, note: Callable[..., Key | None], **only: Any) -> None:
            @kopf.on.event(*resource, registry=registry, **only)
            async def told(event: Any, **_: Any) -> None:
                if key := note(dict(event["object"]), gone=event["type"] == "DELETED"):
                    self.queue.add(key)

        @kopf.on.startup(registry=registry)
        async def take_the_signals_back(**_: Any) -> None:
            self.signals.install()

        kopf.on.login(registry=registry)(kopf.login_via_client)
        watch(GROUP, VERSION, PLURAL, note=self.cache.update_pipeline)
        for kind, (group, _) in CHILDREN.items():
            watch(group, "v1", kind, note=self.cache.handlers[kind], labels={MANAGED_BY: MANAGED_BY_VALUE})
        return registry


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.process.ultimate_exiting_timeout = None
    settings.networking.request_timeout = 30.0
    settings.networking.connect_timeout = 10.0
    settings.watching.server_timeout = 240  # an int: the API server takes no other
    settings.watching.label_selectors.update(dict.fromkeys(CHILDREN, MANAGED_SELECTOR))
    return settings
