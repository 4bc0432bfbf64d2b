"""The HTTP endpoints /livez, /readyz and /metrics."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from finetune_operator.controller.informers import RESYNC_SECONDS, Informers
from finetune_operator.controller.leader_election import LeaderElector
from finetune_operator.controller.metrics import (
    CACHED_OBJECTS,
    IS_LEADER,
    IS_READY,
    PIPELINES,
    QUEUE_DEPTH,
    QUEUE_OLDEST_SECONDS,
    REGISTRY,
    SERVERS_DOWN,
    UNREADABLE_PIPELINES,
    WAITING_OLDEST_SECONDS,
    WAITING_STAGES,
)
from finetune_operator.controller.scope import Scope
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.kubernetes.cache import totals

MOST_CONNECTIONS = 64
"""Open connections of clients: the kubelet's probes, Prometheus, and strangers."""
API_SILENCE_SECONDS = 60.0
"""Seconds without a response to a request for the Lease after which a replica is not ready. The Lease is requested
every `RETRY_PERIOD` seconds, by the leader and by a standby."""


class Health:
    """Handlers of the endpoints.

    A replica is live while its event loop responds. It is ready while it reaches the API server and, as the leader,
    has a cache that was listed recently.
    """

    def __init__(
        self,
        leader_elector: LeaderElector,
        scope: Scope,
        informers: Informers,
        queue: WorkQueue,
    ) -> None:
        self.leader_elector = leader_elector
        self.scope = scope
        self.informers = informers
        self.queue = queue

    def not_ready_reason(self) -> str:
        """Return why this replica is not ready, or an empty string."""
        now = asyncio.get_running_loop().time()
        if now - self.leader_elector.last_response_at > API_SILENCE_SECONDS:
            return f"the API server has not responded to requests for the Lease for more than {API_SILENCE_SECONDS:g} s"
        if not self.leader_elector.is_leader:
            # A standby keeps no cache.
            return ""
        return self._leader_not_ready_reason()

    def _leader_not_ready_reason(self) -> str:
        if self.scope.other:
            return f"another release of the operator, {self.scope.other}, reconciles the pipelines of these namespaces"
        if self.informers.synced_at is None:
            return "the cache has not synced with the API server yet"
        age = asyncio.get_running_loop().time() - self.informers.synced_at
        # Two resyncs may fail before a replica is not ready.
        if age > 3 * RESYNC_SECONDS:
            return f"the cache was last listed {age:.0f} s ago"
        kind = self.informers.silent_watch(API_SILENCE_SECONDS)
        if kind:
            return f"the watch of {kind} has failed for more than {API_SILENCE_SECONDS:g} s"
        return ""

    async def livez(self, _request: web.Request) -> web.Response:
        """Return 200: the event loop responds."""
        return web.Response(text="ok\n")

    async def readyz(self, _request: web.Request) -> web.Response:
        """Return 200 and the replica's role, or 503 and the reason."""
        reason = self.not_ready_reason()
        if reason:
            return web.Response(text=f"{reason}\n", status=503)
        role = "leader" if self.leader_elector.is_leader else "standby"
        return web.Response(text=f"{role}\n", status=200)

    async def metrics(self, _request: web.Request) -> web.Response:
        """Return the metrics in Prometheus' text format; the gauges are set here, at each scrape."""
        # Else a phase without a pipeline would keep its last count.
        PIPELINES.clear()
        for phase, count in totals.phases(self.informers.cache).items():
            PIPELINES.labels(phase).set(count)
        self._count_waiting_stages()
        UNREADABLE_PIPELINES.set(totals.unreadable(self.informers.cache))
        SERVERS_DOWN.set(totals.servers_down(self.informers.cache))
        for kind, store in self.informers.cache.stores.items():
            CACHED_OBJECTS.labels(kind).set(len(store))
        IS_LEADER.set(self.leader_elector.is_leader and self.scope.is_held)
        IS_READY.set(not self.not_ready_reason())
        QUEUE_DEPTH.set(len(self.queue))
        QUEUE_OLDEST_SECONDS.set(self.queue.oldest())
        return web.Response(
            body=generate_latest(REGISTRY),
            headers={"Content-Type": CONTENT_TYPE_LATEST},
        )

    def _count_waiting_stages(self) -> None:
        WAITING_STAGES.clear()
        WAITING_OLDEST_SECONDS.clear()
        now = time.time()  # noqa: TID251  an edge
        oldest: dict[tuple[str, str], float] = {}
        for stage in totals.waiting(self.informers.cache):
            labels = (stage.stage, stage.reason)
            WAITING_STAGES.labels(*labels).inc()
            if stage.since is not None:
                oldest[labels] = min(stage.since, oldest.get(labels, now))
        for labels, since in oldest.items():
            WAITING_OLDEST_SECONDS.labels(*labels).set(now - since)


@asynccontextmanager
async def serve_health(health: Health, port: int) -> AsyncIterator[None]:
    """Serve the endpoints while the context is open; port 0 serves nothing."""
    app = web.Application()
    app.add_routes(
        [
            web.get("/livez", health.livez),
            web.get("/readyz", health.readyz),
            web.get("/metrics", health.metrics),
        ]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    listener: asyncio.Server | None = None
    if port:
        # No host: all addresses of IPv4 and IPv6.
        listener = await asyncio.get_running_loop().create_server(
            bounded(runner), None, port
        )
    try:
        yield
    finally:
        if listener:
            listener.close()
        await runner.cleanup()


def bounded(runner: web.AppRunner) -> Callable[[], asyncio.Protocol]:
    """Return a protocol factory of the runner that closes the oldest connection if there are too many.

    aiohttp lets a client that sends nothing keep its connection for ever. Each has a file descriptor, and the operator
    needs some for the API server.
    """

    def accept() -> asyncio.Protocol:
        server = runner.server
        if server is None:
            raise RuntimeError("the runner of the endpoints is not set up")
        for connection in server.connections[: -(MOST_CONNECTIONS - 1)]:
            connection.force_close()
        return server()

    return accept
