"""What changes in the cluster: kopf watches, we write it into the books and queue the pipeline it is about.

kopf's process would end over some answers of an API server (an ERROR event, a minute of 503); here only its watches
do, and they are begun again. Its handlers neither write nor decide anything.
"""

import asyncio
import logging
import random  # noqa: TID251  an edge
from collections.abc import Callable, Collection
from typing import Any

import kopf

from finetune_operator.api.group import GROUP, PLURAL, VERSION
from finetune_operator.cluster.kubernetes import paths
from finetune_operator.cluster.kubernetes.api import Api, Object
from finetune_operator.cluster.kubernetes.books import PIPELINES, Books
from finetune_operator.controller.metrics import WATCHES_RESTARTED
from finetune_operator.controller.queue import WorkQueue
from finetune_operator.controller.signals import Signals
from finetune_operator.errors import ClusterError
from finetune_operator.labels import MANAGED_BY, MANAGER
from finetune_operator.pipeline import Key

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
log = logging.getLogger(__name__)


class Watches:
    """Keep the books, and queue whatever they are about."""

    def __init__(self, api: Api, books: Books, queue: WorkQueue, signals: Signals, namespaces: Collection[str]) -> None:
        self.api, self.books, self.queue, self.signals, self.namespaces = api, books, queue, signals, namespaces
        self.synced_at: float | None = None
        """When the books were last compared with the API server, by the loop's clock."""
        self._comparing = asyncio.Lock()

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
        """Read everything that is ours, sweep the books, and look at every pipeline; one comparison at a time."""
        async with self._comparing:
            self.books.begin()
            lists = {PIPELINES: await self._all(paths.pipelines)}
            for kind, (_, path) in CHILDREN.items():
                lists[kind] = await self._all(path, labelSelector=OURS)
            for key in self.books.sweep(**lists):
                self.queue.add(key)
            self.synced_at = asyncio.get_running_loop().time()

    async def _all(self, path: Callable[[str | None], str], **query: str) -> list[Object]:
        places: Collection[str | None] = self.namespaces or [None]
        return [found for place in places async for found in self.api.list(path(place), **query)]

    async def _watch_once(self) -> None:
        stop = asyncio.Event()
        try:
            scope: dict[str, Any] = {"clusterwide": not self.namespaces, "namespaces": self.namespaces}
            # An identity of its own, or kopf looks for the user's name, and in a container there is none.
            who: dict[str, Any] = {"identity": MANAGER, "standalone": True}
            await kopf.operator(registry=self._registry(), settings=_settings(), stop_flag=stop, **scope, **who)
            self.signals.asked.set()  # it ends without an error only when it was asked to, by a signal meant for us
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
