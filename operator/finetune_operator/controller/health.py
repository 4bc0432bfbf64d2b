"""/livez, /readyz and /metrics."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from finetune_operator.controller.informers import RESYNC_SECONDS, Informers
from finetune_operator.controller.leader_election import LeaderElector
from finetune_operator.controller.metrics import IS_LEADER, PIPELINES, QUEUE_DEPTH, QUEUE_OLDEST_SECONDS, REGISTRY
from finetune_operator.controller.workqueue import WorkQueue

API_SILENCE_SECONDS = 60.0


class Health:
    """Live: this loop turns, for it answers. Ready: it sees the cluster."""

    def __init__(self, leadership: LeaderElector, watches: Informers, queue: WorkQueue) -> None:
        self.leader_elector, self.informers, self.queue = leadership, watches, queue

    def not_ready_reason(self) -> str:
        """Say what is missing, or nothing."""
        now = asyncio.get_running_loop().time()
        if now - self.leader_elector.answered > API_SILENCE_SECONDS:
            return "the API server does not answer questions about the Lease"
        if not self.leader_elector.is_leader:
            return ""  # standing by
        if self.informers.synced_at is None:
            return "the books have not been compared with the API server yet"
        if now - self.informers.synced_at > 3 * RESYNC_SECONDS:
            return f"the books have not been compared for {now - self.informers.synced_at:.0f} s"
        return ""

    async def livez(self, _request: web.Request) -> web.Response:
        """Answer: the loop turns."""
        return web.Response(text="ok\n")

    async def readyz(self, _request: web.Request) -> web.Response:
        """Say whether it sees the cluster."""
        trouble = self.not_ready_reason()
        said = trouble or ("leading" if self.leader_elector.is_leader else "standing by")
        return web.Response(text=said + "\n", status=503 if trouble else 200)

    async def metrics(self, _request: web.Request) -> web.Response:
        """Give figures."""
        PIPELINES.clear()
        for phase, count in self.informers.cache.phases().items():
            PIPELINES.labels(phase).set(count)
        IS_LEADER.set(self.leader_elector.is_leader)
        QUEUE_DEPTH.set(self.queue.__len__)
        QUEUE_OLDEST_SECONDS.set(self.queue.oldest())
        return web.Response(body=generate_latest(REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST})


@asynccontextmanager
async def serve_health(health: Health, port: int) -> AsyncIterator[None]:
    """Serve for a while; 0: not at all."""
    app = web.Application()
    app.add_routes(
        [web.get("/livez", health.livez), web.get("/readyz", health.readyz), web.get("/metrics", health.metrics)]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    if port:
        await web.TCPSite(runner, port=port).start()
    try:
        yield
    finally:
        await runner.cleanup()
