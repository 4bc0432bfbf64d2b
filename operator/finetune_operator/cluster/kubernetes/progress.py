"""How far running stages are: asked of their pods over HTTP, so that no pod needs rights of any kind."""

import asyncio
import time
from dataclasses import dataclass

import aiohttp
from pydantic import ValidationError

from finetune_operator.cluster.kubernetes.asking import ask, host_of, ok
from finetune_operator.cluster.kubernetes.job import CONTAINER, PORT
from finetune_operator.cluster.kubernetes.pod import Pod
from finetune_trainer.contract import PROGRESS_BYTES, Progress
from finetune_trainer.contract import environment as names

EVERY_SECONDS = 15.0
"""No pod is asked more often, and so no status is written more often for its sake."""
PATIENCE_SECONDS = 2.0


@dataclass
class _Page:
    asked: float
    progress: Progress | None


class ProgressPages:
    """Remembers what each pod said last."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session
        self.pages: dict[str, _Page] = {}

    async def of(self, pod: Pod | None) -> Progress | None:
        """Give the progress of a pod, at most EVERY_SECONDS old while it runs, and its last when it is over."""
        if pod is None:
            return None
        uid = pod.raw["metadata"]["uid"]
        page = self.pages.get(uid)
        if pod.over or not pod.started_at or not pod.address:
            return page.progress if page else None
        if page is None or time.monotonic() - page.asked >= EVERY_SECONDS:
            found = await self._ask(pod)
            page = _Page(time.monotonic(), found or (page.progress if page else None))
            self.pages[uid] = page
        return page.progress

    def forget_all_but(self, uids: set[str]) -> None:
        """Drop pods that are no more."""
        self.pages = {uid: page for uid, page in self.pages.items() if uid in uids}

    async def _ask(self, pod: Pod) -> Progress | None:
        port = port_of(pod)
        if not port:
            return None
        where = f"http://{host_of(pod)}:{port}/progress"
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                status, content = await ask(self.session, where, most=PROGRESS_BYTES)
            return Progress.model_validate_json(content) if ok(status) else None
        except (TimeoutError, aiohttp.ClientError, OSError, ValidationError):
            return None  # it has not begun, or has its own idea of a port: the stage goes on without a figure


class NoPages:
    """In their place outside of the cluster, where no pod can be reached."""

    async def of(self, pod: Pod | None) -> Progress | None:  # noqa: ARG002  ProgressPages looks at it
        """Know nothing."""
        return None

    def forget_all_but(self, uids: set[str]) -> None:
        """Have nothing to forget."""


def port_of(pod: Pod) -> int:
    """Read the port from the pod's environment; 0: none."""
    for container in pod.raw["spec"].get("containers") or []:
        if container["name"] == CONTAINER:
            env = {one["name"]: one.get("value") for one in container.get("env") or []}
            text = env.get(names.METRICS_PORT, str(PORT)) or "0"
            return int(text) if text.isascii() and text.isdigit() else 0
    return 0
