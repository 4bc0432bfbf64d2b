"""The whole process: lead, watch, work; and begin again when the Lease is lost."""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from finetune_operator.controller.health import Health, serve_health
from finetune_operator.controller.informers import Informers
from finetune_operator.controller.leader_election import LeaderElector
from finetune_operator.controller.metrics import REQUESTS
from finetune_operator.controller.signals import StopSignal
from finetune_operator.controller.worker import run_worker
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.core.settings import Settings
from finetune_operator.kubernetes.cache import ResourceCache
from finetune_operator.kubernetes.client import KubernetesClient, load_configuration, open_client
from finetune_operator.kubernetes.cluster import KubernetesCluster
from finetune_operator.kubernetes.pods.probe import ServerProbe
from finetune_operator.kubernetes.pods.progress import ProgressPoller

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
    signals = StopSignal()
    signals.install()
    told = lambda verb, status: REQUESTS.labels(verb, str(status)).inc()  # noqa: E731
    async with open_client(await load_configuration(), told=told) as election, aiohttp.ClientSession() as session:
        leadership = LeaderElector(election, options.lease_namespace, options.lease_name, options.identity)
        async with open_client(await load_configuration(), may_write=lambda: leadership.is_leader, told=told) as api:
            replica = Manager.create(options, api, leadership, signals, session)
            async with serve_health(Health(leadership, replica.informers, replica.queue), options.port):
                try:
                    await _run_until_stopped(signals.requested, replica.run(), leadership)
                finally:
                    await replica.cluster.close()


@dataclass
class Manager:
    """One replica's parts."""

    options: Options
    leader_elector: LeaderElector
    queue: WorkQueue
    informers: Informers
    cluster: KubernetesCluster

    @classmethod
    def create(
        cls,
        options: Options,
        api: KubernetesClient,
        leadership: LeaderElector,
        signals: StopSignal,
        session: aiohttp.ClientSession,
    ) -> "Manager":
        """Put them together."""
        books, queue = ResourceCache(), WorkQueue()
        cluster = KubernetesCluster(api, books, ProgressPoller(session, queue.add), ServerProbe(session, queue.add))
        watches = Informers(api, books, queue, signals, options.namespaces)
        return cls(options, leadership, queue, watches, cluster)

    async def run(self) -> None:
        """Lead whenever that is possible, for ever."""
        while True:
            await self.leader_elector.acquire()
            lead = asyncio.create_task(self._run_as_leader())
            keep = asyncio.create_task(self.leader_elector.renew())
            await _wait_first(lead, keep)

    async def _run_as_leader(self) -> None:
        await self.informers.relist_with_retry()  # what was known when we led last is not true any more
        async with asyncio.TaskGroup() as group:
            group.create_task(self.informers.watch())
            group.create_task(self.informers.resync_periodically())
            for _ in range(self.options.workers):
                group.create_task(run_worker(self.queue, self.cluster, self.options.settings))


async def _wait_first(*tasks: asyncio.Task[Any]) -> None:
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


async def _run_until_stopped(asked: asyncio.Event, life: Coroutine[Any, Any, None], leadership: LeaderElector) -> None:
    """Live until asked to stop; then let another take over first, for kopf takes seconds to end."""
    living, waiting = asyncio.create_task(life), asyncio.create_task(asked.wait())
    await asyncio.wait([living, waiting], return_when=asyncio.FIRST_COMPLETED)
    log.info("asked to stop" if asked.is_set() else "ending")
    await leadership.release()
    await _wait_first(living, waiting)
