"""/livez, /readyz and /metrics."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from finetune_operator.controller.informers import EVERYTHING_SECONDS, Watches
from finetune_operator.controller.leader_election import Leadership
from finetune_operator.controller.metrics import DEPTH, LEADING, OLDEST, PIPELINES, REGISTRY
from finetune_operator.controller.workqueue import WorkQueue

SILENT_SECONDS = 60.0


class Health:
    """Live: this loop turns, for it answers. Ready: it sees the cluster."""

    def __init__(self, leadership: Leadership, watches: Watches, queue: WorkQueue) -> None:
        self.leadership, self.watches, self.queue = leadership, watches, queue

    def trouble(self) -> str:
        """Say what is missing, or nothing."""
        now = asyncio.get_running_loop().time()
        if now - self.leadership.answered > SILENT_SECONDS:
            return "the API server does not answer questions about the Lease"
        if not self.leadership.held:
            return ""  # standing by
        if self.watches.synced_at is None:
            return "the books have not been compared with the API server yet"
        if now - self.watches.synced_at > 3 * EVERYTHING_SECONDS:
            return f"the books have not been compared for {now - self.watches.synced_at:.0f} s"
        return ""

    async def live(self, _request: web.Request) -> web.Response:
        """Answer: the loop turns."""
        return web.Response(text="ok\n")

    async def ready(self, _request: web.Request) -> web.Response:
        """Say whether it sees the cluster."""
        trouble = self.trouble()
        said = trouble or ("leading" if self.leadership.held else "standing by")
        return web.Response(text=said + "\n", status=503 if trouble else 200)

    async def metrics(self, _request: web.Request) -> web.Response:
        """Give figures."""
        PIPELINES.clear()
        for phase, count in self.watches.books.phases().items():
            PIPELINES.labels(phase).set(count)
        LEADING.set(self.leadership.held)
        DEPTH.set(self.queue.depth)
        OLDEST.set(self.queue.oldest())
        return web.Response(body=generate_latest(REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST})


@asynccontextmanager
async def served(health: Health, port: int) -> AsyncIterator[None]:
    """Serve for a while; 0: not at all."""
    app = web.Application()
    app.add_routes(
        [web.get("/livez", health.live), web.get("/readyz", health.ready), web.get("/metrics", health.metrics)]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    if port:
        await web.TCPSite(runner, port=port).start()
    try:
        yield
    finally:
        await runner.cleanup()
