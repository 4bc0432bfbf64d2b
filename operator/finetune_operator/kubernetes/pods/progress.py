"""How far running stages are: asked of their pods over HTTP, so that no pod needs rights of any kind."""

import asyncio
import math
import time
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

import aiohttp

from finetune_operator.kubernetes.pods.http import Errands, Tell, ask, host_of, to_nobody
from finetune_operator.kubernetes.resources.job import CONTAINER, PORT
from finetune_operator.kubernetes.translate.pod import Pod
from finetune_trainer.contract import PROGRESS_BYTES, Progress
from finetune_trainer.contract import environment as names

EVERY_SECONDS = 15.0
"""No pod is asked more often, and so no status is written more often for its sake."""
LONGEST_SECONDS = 60.0
"""Between two questions to a pod that has never answered, which may not want to."""
PATIENCE_SECONDS = 2.0


@dataclass
class _Page:
    asked: float = -math.inf
    wait: float = EVERY_SECONDS
    silences: int = 0
    """Questions without an answer, before the first."""
    progress: Progress | None = None


class ProgressPages:
    """Remembers what each pod said last, and asks beside the looks; `tell` is called when one has news."""

    def __init__(self, session: aiohttp.ClientSession, tell: Tell = to_nobody) -> None:
        self.session, self.errands = session, Errands(tell)
        self.pages: dict[str, _Page] = {}

    def of(self, pod: Pod | None) -> Progress | None:
        """Give what a pod said last, and have it asked where that is long ago; one that is over is asked no more."""
        if pod is None:
            return None
        page = self.pages.setdefault(pod.uid, _Page())
        if pod.over:
            self.errands.call_off([pod.uid])
        elif pod.started_at and pod.address and time.monotonic() - page.asked >= page.wait:
            page.asked = time.monotonic()
            self.errands.send(pod, partial(self._ask, pod, page))
        return page.progress

    def forget_all_but(self, uids: set[str]) -> None:
        """Drop pods that are no more."""
        self.errands.call_off(self.pages.keys() - uids)
        self.pages = {uid: page for uid, page in self.pages.items() if uid in uids}

    async def close(self) -> None:
        """Ask nobody any more."""
        await self.errands.close()

    async def _ask(self, pod: Pod, page: _Page) -> bool:
        found = await self._read(pod)
        page.silences = 0 if found or page.progress else page.silences + 1
        # It may have to load its libraries first: only the third silence in a row is taken for an answer.
        page.wait = min(EVERY_SECONDS * 2.0 ** min(max(page.silences - 2, 0), 8), LONGEST_SECONDS)
        if found is None or found == page.progress:
            return False
        page.progress = found
        return True

    async def _read(self, pod: Pod) -> Progress | None:
        port = port_of(pod)
        if not port:
            return None
        where = f"http://{host_of(pod)}:{port}/progress"
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                status, content = await ask(self.session, where, most=PROGRESS_BYTES)
            return Progress.model_validate_json(content) if status == HTTPStatus.OK else None
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            return None  # it has not begun, or has its own idea of a port: the stage goes on without a figure


class NoPages:
    """In their place outside of the cluster, where no pod can be reached."""

    def of(self, pod: Pod | None) -> Progress | None:  # noqa: ARG002  ProgressPages looks at it
        """Know nothing."""
        return None

    def forget_all_but(self, uids: set[str]) -> None:
        """Have nothing to forget."""

    async def close(self) -> None:
        """Have nothing to end."""


def port_of(pod: Pod) -> int:
    """Read the port from the pod's environment; 0: none."""
    for container in pod.raw["spec"].get("containers") or []:
        if container["name"] == CONTAINER:
            env = {one["name"]: one.get("value") for one in container.get("env") or []}
            text = env.get(names.METRICS_PORT, str(PORT)) or "0"
            return int(text) if text.isascii() and text.isdigit() else 0
    return 0
