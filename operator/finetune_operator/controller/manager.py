"""The whole process: lead, watch, work; and begin again when the Lease is lost."""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from finetune_operator.controller.health import Health, served
from finetune_operator.controller.informers import Watches
from finetune_operator.controller.leader_election import Leadership
from finetune_operator.controller.metrics import REQUESTS
from finetune_operator.controller.signals import Signals
from finetune_operator.controller.worker import work
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.core.settings import Settings
from finetune_operator.kubernetes.cache import Books
from finetune_operator.kubernetes.client import Api, configured, connected
from finetune_operator.kubernetes.cluster import KubernetesCluster
from finetune_operator.kubernetes.pods.probe import Answers
from finetune_operator.kubernetes.pods.progress import ProgressPages

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """How this replica runs."""

    identity: str
    """Its name in the Lease: the pod's."""
    lease_namespace: str
    lease_name: str = "finetune-operator"
    namespaces: tuple[str, ...] = ()
    """Where pipelines are looked after; empty: everywhere."""
    port: int = 8080
    """/livez, /readyz, /metrics."""
    workers: int = 10
    settings: Settings = field(default_factory=Settings)


async def run(options: Options) -> None:
    """Run until SIGTERM or SIGINT."""
    signals = Signals()
    signals.listen()
    told = lambda verb, status: REQUESTS.labels(verb, str(status)).inc()  # noqa: E731
    async with connected(await configured(), told=told) as election, aiohttp.ClientSession() as session:
        leadership = Leadership(election, options.lease_namespace, options.lease_name, options.identity)
        async with connected(await configured(), may_write=lambda: leadership.held, told=told) as api:
            replica = Replica.made(options, api, leadership, signals, session)
            async with served(Health(leadership, replica.watches, replica.queue), options.port):
                try:
                    await _until(signals.asked, replica.live(), leadership)
                finally:
                    await replica.cluster.close()


@dataclass
class Replica:
    """One replica's parts."""

    options: Options
    leadership: Leadership
    queue: WorkQueue
    watches: Watches
    cluster: KubernetesCluster

    @classmethod
    def made(
        cls, options: Options, api: Api, leadership: Leadership, signals: Signals, session: aiohttp.ClientSession
    ) -> "Replica":
        """Put them together."""
        books, queue = Books(), WorkQueue()
        cluster = KubernetesCluster(api, books, ProgressPages(session, queue.add), Answers(session, queue.add))
        watches = Watches(api, books, queue, signals, options.namespaces)
        return cls(options, leadership, queue, watches, cluster)

    async def live(self) -> None:
        """Lead whenever that is possible, for ever."""
        while True:
            await self.leadership.acquire()
            lead = asyncio.create_task(self._lead())
            keep = asyncio.create_task(self.leadership.keep())
            await _first_of(lead, keep)

    async def _lead(self) -> None:
        await self.watches.compare_until_done()  # what was known when we led last is not true any more
        async with asyncio.TaskGroup() as group:
            group.create_task(self.watches.watch())
            group.create_task(self.watches.compare_now_and_then())
            for _ in range(self.options.workers):
                group.create_task(work(self.queue, self.cluster, self.options.settings))


async def _first_of(*tasks: asyncio.Task[Any]) -> None:
    """Wait for the first to end, end the others, and raise what went wrong."""
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


async def _until(asked: asyncio.Event, life: Coroutine[Any, Any, None], leadership: Leadership) -> None:
    """Live until asked to stop; then let another take over first, for kopf takes seconds to end."""
    living, waiting = asyncio.create_task(life), asyncio.create_task(asked.wait())
    await asyncio.wait([living, waiting], return_when=asyncio.FIRST_COMPLETED)
    log.info("asked to stop" if asked.is_set() else "ending")
    await leadership.give_back()
    await _first_of(living, waiting)
