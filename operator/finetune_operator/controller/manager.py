"""The manager: runs the informers and the workers while this replica is the leader, and stands by when it is not."""

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
    """The options of this replica."""

    identity: str
    """The holder of the Lease: the name of this replica's pod."""
    lease_namespace: str
    lease_name: str = "finetune-operator"
    namespaces: tuple[str, ...] = ()
    """Namespaces whose pipelines are reconciled; empty: all namespaces."""
    port: int = 8080
    """Of /livez, /readyz and /metrics; 0: they are not served."""
    workers: int = 10
    settings: Settings = field(default_factory=Settings)


async def run(options: Options) -> None:
    """Run until SIGTERM or SIGINT."""
    signals = StopSignal()
    signals.install()
    # Leader election has a client of its own: it must write before this replica is the leader, and it is not slowed
    # down when the API server throttles the reconciles.
    lease_client = open_client(await load_configuration(), on_response=_count_request)
    async with lease_client as lease_api, aiohttp.ClientSession() as session:
        elector = LeaderElector(lease_api, options.lease_namespace, options.lease_name, options.identity)
        client = open_client(
            await load_configuration(), may_write=lambda: elector.is_leader, on_response=_count_request
        )
        async with client as api:
            manager = Manager.create(options, api, elector, signals, session)
            async with serve_health(Health(elector, manager.informers, manager.queue), options.port):
                try:
                    await _run_until_stopped(signals.requested, manager.run(), elector)
                finally:
                    await manager.cluster.close()


def _count_request(verb: str, status: int) -> None:
    REQUESTS.labels(verb, str(status)).inc()


@dataclass
class Manager:
    """The components of one replica."""

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
        leader_elector: LeaderElector,
        signals: StopSignal,
        session: aiohttp.ClientSession,
    ) -> "Manager":
        """Create the components and connect them."""
        cache, queue = ResourceCache(), WorkQueue()
        cluster = KubernetesCluster(api, cache, ProgressPoller(session, queue.add), ServerProbe(session, queue.add))
        informers = Informers(api, cache, queue, signals, options.namespaces)
        return cls(options, leader_elector, queue, informers, cluster)

    async def run(self) -> None:
        """Run as the leader whenever this replica holds the Lease, forever."""
        while True:
            await self.leader_elector.acquire()
            leading = asyncio.create_task(self._run_as_leader())
            renewing = asyncio.create_task(self.leader_elector.renew())
            await _wait_first(leading, renewing)

    async def _run_as_leader(self) -> None:
        await self.informers.relist_with_retry()  # first: the cache is empty, or as old as the last leadership
        async with asyncio.TaskGroup() as group:
            group.create_task(self.informers.watch())
            group.create_task(self.informers.resync_periodically())
            for _ in range(self.options.workers):
                group.create_task(run_worker(self.queue, self.cluster, self.options.settings))


async def _wait_first(*tasks: asyncio.Task[Any]) -> None:
    """Wait for the first task to end, cancel the others, and raise the first error of any of them."""
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


async def _run_until_stopped(
    stop: asyncio.Event, running: Coroutine[Any, Any, None], leader_elector: LeaderElector
) -> None:
    """Run until stopped. Release the Lease first: another replica then takes over while kopf takes seconds to end."""
    run_task, stop_task = asyncio.create_task(running), asyncio.create_task(stop.wait())
    await asyncio.wait([run_task, stop_task], return_when=asyncio.FIRST_COMPLETED)
    log.info("stopping: received SIGTERM or SIGINT" if stop.is_set() else "stopping: the manager has ended")
    await leader_elector.release()
    await _wait_first(run_task, stop_task)
