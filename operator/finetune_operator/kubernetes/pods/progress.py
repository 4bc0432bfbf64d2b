"""Poll running stages for their progress over HTTP, so that their pods need no permissions."""

import asyncio
import math
import time
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

import aiohttp

from finetune_operator.core.metadata import STAGE_CONTAINER
from finetune_operator.kubernetes.pods.http import BackgroundRequests, Enqueue, ignore, request, url_host
from finetune_operator.kubernetes.resources.job import METRICS_PORT
from finetune_operator.kubernetes.translate.pod import Pod
from finetune_trainer.contract import PROGRESS_BYTES, Progress
from finetune_trainer.contract import environment as names

POLL_SECONDS = 15.0
"""Shortest time between two requests to a pod, which also limits how often its progress changes the status."""
MAX_POLL_SECONDS = 60.0
"""Longest time between two requests to a pod that has never answered: it may not serve /progress at all."""
PROGRESS_TIMEOUT_SECONDS = 2.0


@dataclass
class _PodProgress:
    requested_at: float = -math.inf
    """On the monotonic clock."""
    wait: float = POLL_SECONDS
    """Seconds until the next request."""
    unanswered: int = 0
    """Requests without a response, before the first response."""
    progress: Progress | None = None


class ProgressPoller:
    """Polls pods in the background and keeps the latest progress of each; `enqueue` is called when it changes."""

    def __init__(self, session: aiohttp.ClientSession, enqueue: Enqueue = ignore) -> None:
        self.session, self.requests = session, BackgroundRequests(enqueue)
        self.states: dict[str, _PodProgress] = {}
        """Pod's uid -> its state."""

    def latest(self, pod: Pod | None) -> Progress | None:
        """Return a pod's latest progress, and start a request if one is due; a finished pod gets no request."""
        if pod is None:
            return None
        state = self.states.setdefault(pod.uid, _PodProgress())
        if pod.finished:
            self.requests.cancel([pod.uid])
        elif pod.started_at and pod.address and time.monotonic() - state.requested_at >= state.wait:
            state.requested_at = time.monotonic()
            self.requests.start(pod, partial(self._poll, pod, state))
        return state.progress

    def retain(self, uids: set[str]) -> None:
        """Drop all pods but these."""
        self.requests.cancel(self.states.keys() - uids)
        self.states = {uid: state for uid, state in self.states.items() if uid in uids}

    async def close(self) -> None:
        """Cancel all requests."""
        await self.requests.close()

    async def _poll(self, pod: Pod, state: _PodProgress) -> bool:
        found = await self._read(pod)
        state.unanswered = 0 if found or state.progress else state.unanswered + 1
        # The process may still be importing its libraries: the wait grows only from the third failure in a row.
        state.wait = min(POLL_SECONDS * 2.0 ** min(max(state.unanswered - 2, 0), 8), MAX_POLL_SECONDS)
        if found is None or found == state.progress:
            return False
        state.progress = found
        return True

    async def _read(self, pod: Pod) -> Progress | None:
        port = metrics_port(pod)
        if not port:
            return None
        url = f"http://{url_host(pod)}:{port}/progress"
        try:
            async with asyncio.timeout(PROGRESS_TIMEOUT_SECONDS):
                status, content = await request(self.session, url, max_bytes=PROGRESS_BYTES)
            return Progress.model_validate_json(content) if status == HTTPStatus.OK else None
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            return None  # not listening yet, or the port serves something else: the stage runs without progress


class NoProgress:
    """The poller of a process outside the cluster, which can reach no pod."""

    def latest(self, pod: Pod | None) -> Progress | None:  # noqa: ARG002  ProgressPoller's signature
        """Return None."""
        return None

    def retain(self, uids: set[str]) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


def metrics_port(pod: Pod) -> int:
    """Return the port from the environment of the stage's container; 0: none."""
    for container in pod.raw["spec"].get("containers") or []:
        if container["name"] == STAGE_CONTAINER:
            env = {one["name"]: one.get("value") for one in container.get("env") or []}
            text = env.get(names.METRICS_PORT, str(METRICS_PORT)) or "0"
            return int(text) if text.isascii() and text.isdigit() else 0
    return 0
