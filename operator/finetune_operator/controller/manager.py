"""The manager: runs the informers and the workers while this replica is the leader, and stands by when it is not."""

import asyncio
import logging
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from finetune_operator.controller.health import Health, serve_health
from finetune_operator.controller.informers import Informers
from finetune_operator.controller.leader_election import LeaderElector
from finetune_operator.controller.metrics import REQUESTS, record_changes
from finetune_operator.controller.missing_rights import MissingRights
from finetune_operator.controller.node_watch import NodeWatch
from finetune_operator.controller.prices import PricedSettings
from finetune_operator.controller.scope import Scope
from finetune_operator.controller.signals import ShutdownSignal
from finetune_operator.controller.worker import run_worker
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.core.settings import Settings
from finetune_operator.kubernetes.cache.cache import ResourceCache
from finetune_operator.kubernetes.cache.pipeline import has_running_attempt
from finetune_operator.kubernetes.client import KubernetesClient, open_client
from finetune_operator.kubernetes.cluster import KubernetesCluster
from finetune_operator.kubernetes.configuration import load_configuration
from finetune_operator.kubernetes.pods.http import open_session
from finetune_operator.kubernetes.pods.probe import ServerProbe
from finetune_operator.kubernetes.pods.progress import ProgressPoller
from finetune_operator.kubernetes.pods.saves import SaveSender
from finetune_operator.kubernetes.token_bucket import TokenBucket

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
    scope_leases: bool = False
    """Whether a Lease in its namespaces keeps other releases of the operator away from their pipelines."""
    port: int = 8080
    """Of /livez, /readyz and /metrics; 0: they are not served."""
    workers: int = 20
    """Of which one namespace can have half, two a third each, and so on."""
    qps: float = 500.0
    """Requests to the API server per second, after a burst."""
    burst: float = 1000.0
    settings: Settings = field(default_factory=Settings)
    metadata_notices: str = ""
    """The cloud whose metadata endpoint training processes watch for notices of their node's end; empty: none."""
    node_notices: bool = True
    """Whether nodes are watched for such notices. It takes a right on all nodes, so not with `namespaces`."""
    prices: Path | None = None
    """Folder of the price list; None: prices do not change while the operator runs."""


async def run(options: Options) -> None:
    """Run until SIGTERM or SIGINT."""
    signals = ShutdownSignal()
    signals.install()
    # Leader election has a client of its own: it must write before this replica is the leader, and it is not slowed
    # down when the API server throttles the reconciles.
    lease_client = open_client(await load_configuration(), on_response=_count_request)
    async with (
        lease_client as lease_api,
        open_session() as progress_session,
        open_session() as probe_session,
    ):
        elector = LeaderElector(
            lease_api, options.lease_namespace, options.lease_name, options.identity
        )
        scope = Scope([], None)
        if options.scope_leases:
            release = f"{options.lease_namespace}/{options.lease_name}"
            scope = Scope.create(lease_api, release, options.namespaces)

        def seconds_to_write() -> float:
            # A replica that may have lost the Lease writes nothing.
            if not (elector.is_leader and scope.is_held):
                return 0.0
            return min(elector.seconds_left, scope.seconds_left)

        client = open_client(
            await load_configuration(),
            seconds_to_write=seconds_to_write,
            on_response=_count_request,
            rate_limiter=TokenBucket(options.qps, options.burst),
        )
        async with client as api:
            manager = Manager.create(
                options,
                api,
                (elector, scope),
                signals,
                (progress_session, probe_session),
            )
            async with serve_health(
                Health(elector, scope, manager.informers, manager.queue), options.port
            ):
                try:
                    await _run_until_stopped(signals.requested, manager)
                finally:
                    # Before the sessions close, which the background requests use.
                    await manager.close()


def _count_request(verb: str, status: int) -> None:
    REQUESTS.labels(verb, str(status)).inc()


@dataclass
class Manager:
    """The components of one replica."""

    options: Options
    leader_elector: LeaderElector
    scope: Scope
    queue: WorkQueue
    informers: Informers
    cluster: KubernetesCluster
    progress: ProgressPoller
    settings: PricedSettings
    nodes: NodeWatch | None
    """None: no nodes are watched."""

    @classmethod
    def create(
        cls,
        options: Options,
        api: KubernetesClient,
        leadership: tuple[LeaderElector, Scope],
        signals: ShutdownSignal,
        sessions: tuple[aiohttp.ClientSession, aiohttp.ClientSession],
    ) -> "Manager":
        """Create the components and connect them; `sessions`: first for progress, second for probes."""
        cache = ResourceCache()
        queue = WorkQueue(
            options.workers, partial(has_running_attempt, cache.pipelines)
        )
        progress = ProgressPoller(sessions[0], cache.all_pods, queue.add)
        cluster = KubernetesCluster(
            api,
            cache,
            progress,
            ServerProbe(sessions[1], queue.add),
            record_changes,
            enqueue=queue.add,
            notices=options.metadata_notices,
            troubleshooting_url=options.settings.troubleshooting_url,
        )
        informers = Informers(api, cache, queue, signals, options.namespaces)
        informers.on_error = MissingRights(cache, cluster.events.record).report
        saves = SaveSender(sessions[0], progress.poll_soon)
        nodes = None
        # A role in some namespaces gives no right on nodes.
        if options.node_notices and not options.namespaces:
            nodes = NodeWatch(api, cache.all_pods, saves)
        settings = PricedSettings(options.settings, options.prices)
        return cls(
            options,
            *leadership,
            queue,
            informers,
            cluster,
            progress,
            settings,
            nodes,
        )

    async def run(self) -> None:
        """Run as the leader whenever this replica holds the Lease, and look at the prices, forever."""
        await _wait_first(
            asyncio.create_task(self._lead()), asyncio.create_task(self.settings.run())
        )

    async def _lead(self) -> None:
        while True:
            await self.leader_elector.acquire()
            leading = asyncio.create_task(self._lead_in_scope())
            renewing = asyncio.create_task(self.leader_elector.renew())
            await _wait_first(leading, renewing)

    async def _lead_in_scope(self) -> None:
        """Run as the leader once no other release reconciles these pipelines, until another release does."""
        await self.scope.acquire()
        leading = asyncio.create_task(self._run_as_leader())
        renewing = asyncio.create_task(self.scope.renew())
        await _wait_first(leading, renewing)

    async def close(self) -> None:
        """Cancel the background requests."""
        await self.cluster.close()
        if self.nodes:
            await self.nodes.saves.close()

    async def _run_as_leader(self) -> None:
        async with asyncio.TaskGroup() as group:
            # Before the list: if a right is missing, Events tell the users of pipelines.
            group.create_task(self.cluster.events.run())
            # Before all else: the cache is empty, or as old as the last leadership.
            await self.informers.list_first()
            group.create_task(self.informers.requeue_all())
            group.create_task(self.informers.watch())
            group.create_task(self.informers.resync_periodically())
            group.create_task(self.progress.run())
            if self.nodes:
                group.create_task(self.nodes.run())
            elif self.options.node_notices:
                log.info(
                    "nodes are not watched for notices of their end: the operator has rights in namespaces only"
                )
            for _ in range(self.options.workers):
                group.create_task(
                    run_worker(self.queue, self.cluster, lambda: self.settings.current)
                )


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


async def _run_until_stopped(stop: asyncio.Event, manager: Manager) -> None:
    """Run until stopped. Release the Lease first: another replica then takes over while kopf takes seconds to end."""
    run_task = asyncio.create_task(manager.run())
    stop_task = asyncio.create_task(stop.wait())
    await asyncio.wait([run_task, stop_task], return_when=asyncio.FIRST_COMPLETED)
    cause = "received SIGTERM or SIGINT" if stop.is_set() else "the manager has ended"
    log.info("stopping: %s", cause)
    await manager.leader_elector.release(manager.cluster.api.wait_for_writes)
    await manager.scope.release()
    await _wait_first(run_task, stop_task)
