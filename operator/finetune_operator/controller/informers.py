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
from finetune_operator.controller.signals import Signals
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.core.metadata import MANAGED_BY, MANAGER
from finetune_operator.core.pipeline import Key
from finetune_operator.errors import ClusterError
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.cache import PIPELINES, Books
from finetune_operator.kubernetes.client import Api, ApiError, Object

OURS = f"{MANAGED_BY}={MANAGER}"
CHILDREN = {
    "jobs": ("batch", paths.jobs),
    "deployments": ("apps", paths.deployments),
    "services": ("", paths.services),
    "pods": ("", paths.pods),
}
"""What is made for pipelines: the group of its API, and where it is."""
EVERYTHING_SECONDS = 300.0
"""Between two comparisons of the books with the whole lists."""
RESTART_SECONDS = 2.0
FIRST_WAIT, LONGEST_WAIT = 1.0, 15.0
"""Between two tries of a comparison that goes wrong, in seconds."""
LOST = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND})
"""What a list answers for ever in a namespace that was taken from us; anything else is waited for."""
log = logging.getLogger(__name__)


class Watches:
    """Keep the books, and queue whatever they are about."""

    def __init__(self, api: Api, books: Books, queue: WorkQueue, signals: Signals, namespaces: Collection[str]) -> None:
        self.api, self.books, self.queue, self.signals = api, books, queue, signals
        self.places: Collection[str | None] = namespaces or [None]
        """Namespaces; None: all there are, in one list."""
        self.listed = list(self.places)
        """Those that could be listed when that was last tried: kopf would end over any other."""
        self.synced_at: float | None = None
        """When the books were last compared with the API server, by the loop's clock."""
        self._comparing = asyncio.Lock()
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
            await self.compare_until_done()

    async def compare_now_and_then(self) -> None:
        """Compare every few minutes, so that nothing that a watch missed stays wrong for long."""
        while True:
            await asyncio.sleep(EVERYTHING_SECONDS * random.uniform(0.9, 1.1))  # noqa: S311
            await self.compare_until_done()

    async def compare_until_done(self) -> None:
        """Compare, and try again for as long as that goes wrong, whatever the reason: it ends nothing else."""
        wait = FIRST_WAIT
        while True:
            try:
                await self.compare()
            except Exception as error:  # one object of one user must not end it for all
                bug = None if isinstance(error, ClusterError) else error
                log.warning("the books are compared again in %g s: %s", wait, error, exc_info=bug)
                await asyncio.sleep(wait)
                wait = min(wait * 2, LONGEST_WAIT)
            else:
                return

    async def compare(self) -> None:
        """Compare each namespace by itself; what was known of one that is lost stays, and the others go on.

        Raises where none can be listed, and where the API server is merely busy. One comparison at a time.
        """
        async with self._comparing:
            lost = {place: error for place in self.places if (error := await self._refusal(place))}
            if len(lost) == len(self.places):
                raise next(iter(lost.values()))
            for place, error in lost.items():
                log.warning("the namespace %s is not looked after until it can be listed again: %s", place, error)
            self._watch_in([place for place in self.places if place not in lost])
            self.synced_at = asyncio.get_running_loop().time()

    async def _refusal(self, place: str | None) -> ApiError | None:
        try:
            await self._compare(place)
        except ApiError as error:
            if error.status not in LOST:
                raise
            return error
        return None

    async def _compare(self, place: str | None) -> None:
        """Read everything that is ours there, sweep the books, and look at every pipeline."""
        self.books.begin()
        lists = {PIPELINES: await self._all(paths.pipelines(place))}
        for kind, (_, path) in CHILDREN.items():
            lists[kind] = await self._all(path(place), labelSelector=OURS)
        for key in self.books.sweep(place, **lists):
            self.queue.add(key)

    async def _all(self, path: str, **query: str) -> list[Object]:
        return [found async for found in self.api.list(path, **query)]

    def _watch_in(self, places: list[str | None]) -> None:
        """Watch there from now on."""
        if places != self.listed:
            self.listed = places
            self._stop.set()

    async def _watch_once(self) -> None:
        stop = self._stop = asyncio.Event()
        try:
            everywhere = None in self.listed
            scope: dict[str, Any] = {"clusterwide": everywhere, "namespaces": [] if everywhere else self.listed}
            # An identity of its own, or kopf looks for the user's name, and in a container there is none.
            who: dict[str, Any] = {"identity": MANAGER, "standalone": True}
            await kopf.operator(registry=self._registry(), settings=_settings(), stop_flag=stop, **scope, **who)
            if not stop.is_set():
                self.signals.asked.set()  # it ended without an error, as it does when it takes a signal meant for us
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
            self.signals.listen()

        kopf.on.login(registry=registry)(kopf.login_via_client)
        watch(GROUP, VERSION, PLURAL, note=self.books.note_pipeline)
        for kind, (group, _) in CHILDREN.items():
            watch(group, "v1", kind, note=self.books.note[kind], labels={MANAGED_BY: MANAGER})
        return registry


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.process.ultimate_exiting_timeout = None
    settings.networking.request_timeout = 30.0
    settings.networking.connect_timeout = 10.0
    settings.watching.server_timeout = 240  # an int: the API server takes no other
    settings.watching.label_selectors.update(dict.fromkeys(CHILDREN, OURS))
    return settings
