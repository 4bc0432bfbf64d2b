"""How far running stages are: asked of their pods over HTTP, so that no pod needs rights of any kind."""

import asyncio
import math
import time
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

import aiohttp

from finetune_operator.kubernetes.pods.http import BackgroundRequests, Enqueue, ignore, request, url_host
from finetune_operator.kubernetes.resources.job import METRICS_PORT, STAGE_CONTAINER
from finetune_operator.kubernetes.translate.pod import Pod
from finetune_trainer.contract import PROGRESS_BYTES, Progress
from finetune_trainer.contract import environment as names

POLL_SECONDS = 15.0
"""No pod is asked more often, and so no status is written more often for its sake."""
MAX_POLL_SECONDS = 60.0
"""Between two questions to a pod that has never answered, which may not want to."""
PROGRESS_TIMEOUT_SECONDS = 2.0


@dataclass
class _PodProgress:
    requested_at: float = -math.inf
    wait: float = POLL_SECONDS
    unanswered: int = 0
    """Questions without an answer, before the first."""
    progress: Progress | None = None


class ProgressPoller:
    """Remembers what each pod said last, and asks beside the looks; `tell` is called when one has news."""

    def __init__(self, session: aiohttp.ClientSession, tell: Enqueue = ignore) -> None:
        self.session, self.requests = session, BackgroundRequests(tell)
        self.pages: dict[str, _PodProgress] = {}

    def latest(self, pod: Pod | None) -> Progress | None:
        """Give what a pod said last, and have it asked where that is long ago; one that is over is asked no more."""
        if pod is None:
            return None
        page = self.pages.setdefault(pod.uid, _PodProgress())
        if pod.finished:
            self.requests.cancel([pod.uid])
        elif pod.started_at and pod.address and time.monotonic() - page.requested_at >= page.wait:
            page.requested_at = time.monotonic()
            self.requests.start(pod, partial(self._ask, pod, page))
        return page.progress

    def retain(self, uids: set[str]) -> None:
        """Drop pods that are no more."""
        self.requests.cancel(self.pages.keys() - uids)
        self.pages = {uid: page for uid, page in self.pages.items() if uid in uids}

    async def close(self) -> None:
        """Ask nobody any more."""
        await self.requests.close()

    async def _ask(self, pod: Pod, page: _PodProgress) -> bool:
        found = await self._read(pod)
        page.unanswered = 0 if found or page.progress else page.unanswered + 1
        # It may have to load its libraries first: only the third silence in a row is taken for an answer.
        page.wait = min(POLL_SECONDS * 2.0 ** min(max(page.unanswered - 2, 0), 8), MAX_POLL_SECONDS)
        if found is None or found == page.progress:
            return False
        page.progress = found
        return True

    async def _read(self, pod: Pod) -> Progress | None:
        port = metrics_port(pod)
        if not port:
            return None
        where = f"http://{url_host(pod)}:{port}/progress"
        try:
            async with asyncio.timeout(PROGRESS_TIMEOUT_SECONDS):
                status, content = await request(self.session, where, most=PROGRESS_BYTES)
            return Progress.model_validate_json(content) if status == HTTPStatus.OK else None
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            return None  # it has not begun, or has its own idea of a port: the stage goes on without a figure


class NoProgress:
    """In their place outside of the cluster, where no pod can be reached."""

    def latest(self, pod: Pod | None) -> Progress | None:  # noqa: ARG002  ProgressPages looks at it
        """Know nothing."""
        return None

    def retain(self, uids: set[str]) -> None:
        """Have nothing to forget."""

    async def close(self) -> None:
        """Have nothing to end."""


def metrics_port(pod: Pod) -> int:
    """Read the port from the pod's environment; 0: none."""
    for container in pod.raw["spec"].get("containers") or []:
        if container["name"] == STAGE_CONTAINER:
            env = {one["name"]: one.get("value") for one in container.get("env") or []}
            text = env.get(names.METRICS_PORT, str(METRICS_PORT)) or "0"
            return int(text) if text.isascii() and text.isdigit() else 0
    return 0
