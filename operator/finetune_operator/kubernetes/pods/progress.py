"""Poll running stages for their progress over HTTP, so that their pods need no permissions."""

import asyncio
import random  # noqa: TID251  an edge
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus

import aiohttp

from finetune_operator.core.metadata import STAGE_CONTAINER
from finetune_operator.kubernetes.pods.http import (
    BackgroundRequests,
    Enqueue,
    ignore,
    request,
    url_host,
)
from finetune_operator.kubernetes.resources.job import METRICS_PORT
from finetune_operator.kubernetes.translate.pod import ObservedPod
from finetune_trainer.contract import PROGRESS_BYTES, Progress
from finetune_trainer.contract import environment as variables

# Each response may change the status, and each change is a write.
POLL_SECONDS = 60.0
"""Shortest time between two requests to a pod that has run for longer."""
# Pods that started together must drift apart.
JITTER = 1.2
"""Longest time between two requests, as a multiple of the shortest."""
FIRST_POLL_SECONDS = 5.0
"""Time from a pod's start to the first request, and between the first two; then the wait doubles to `POLL_SECONDS`.

The requests come 5, 10, 20, 40 and 80 s after the start, before jitter. A short stage shows its progress, too, and the
first step is known soon: from it the steps are known that the attempt before has lost.
"""
SCAN_SECONDS = 2.0
"""Between two scans for pods that are due."""
SAVED_SECONDS = 2.0
"""Time from a request to save to the first poll; more polls follow, as after a pod's start."""
PROGRESS_TIMEOUT_SECONDS = 2.0
# 16 pods that accept a request and never answer cost their namespace 2 s.
REQUESTS_PER_NAMESPACE = 16
"""Requests at once in a namespace."""


@dataclass
class _PodProgress:
    due_at: float
    """When the next request is due, on the monotonic clock."""
    wait: float
    """Seconds from the next request to the request after it, before jitter."""
    progress: Progress | None = None


class ProgressPoller:
    """Polls pods in the background and keeps the latest progress of each; `enqueue` is called when it changes.

    `pods` returns the pods of all attempts. Of several pods of one attempt, the first has the progress. A finished pod
    is not polled, and its progress stays until `pods` no longer returns it.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        pods: Callable[[], Iterable[ObservedPod]],
        enqueue: Enqueue = ignore,
    ) -> None:
        self.session = session
        self.pods = pods
        self.requests = BackgroundRequests(REQUESTS_PER_NAMESPACE, enqueue)
        self.states: dict[str, _PodProgress] = {}
        """Pod's uid -> its state, from the first look at the running pod."""

    async def run(self) -> None:
        """Poll the pods until cancelled, which also cancels the requests in flight."""
        # The times of an earlier leadership have passed: all of its pods would be due at once.
        self.states.clear()
        try:
            while True:
                self.poll_due_pods()
                await asyncio.sleep(SCAN_SECONDS)
        finally:
            self.requests.cancel_all()

    def latest(self, pod: ObservedPod | None) -> Progress | None:
        """Return a pod's latest progress; None while it has reported none."""
        if pod is None or pod.uid not in self.states:
            return None
        return self.states[pod.uid].progress

    def poll_soon(self, pod: ObservedPod) -> None:
        """Poll a pod that is about to save as often as a pod that has just started."""
        state = self.states.get(pod.uid)
        if state:
            state.due_at = time.monotonic() + SAVED_SECONDS
            state.wait = FIRST_POLL_SECONDS

    def poll_due_pods(self) -> None:
        """Start a request to each pod that is due, and drop the state of pods that no longer exist."""
        pods = {pod.uid: pod for pod in self.pods()}
        self.requests.cancel(
            [
                uid
                for uid in self.requests.tasks
                if uid not in pods or pods[uid].finished
            ]
        )
        for uid in self.states.keys() - pods.keys():
            del self.states[uid]
        for pod in pods.values():
            # Of several pods of an attempt, only the first reports progress.
            if not pod.finished and pod.address and pod.started_at and pod.index == 0:
                self._poll_if_due(pod, pod.started_at)

    def _poll_if_due(self, pod: ObservedPod, started_at: datetime) -> None:
        state = self.states.get(pod.uid)
        if state is None:
            state = self.states[pod.uid] = _schedule(started_at)
        if time.monotonic() >= state.due_at:
            # Keeps the pod from being polled again while the request waits; the response sets the time anew.
            state.due_at = time.monotonic() + POLL_SECONDS
            self.requests.start(pod, partial(self._poll, pod, state))

    async def close(self) -> None:
        """Cancel all requests."""
        await self.requests.close()

    async def _poll(self, pod: ObservedPod, state: _PodProgress) -> bool:
        progress = await self._read(pod)
        before = state.progress
        state.progress = progress or before
        state.due_at = time.monotonic() + state.wait * random.uniform(1.0, JITTER)  # noqa: S311
        state.wait = min(2 * state.wait, POLL_SECONDS)
        return progress is not None and not _is_same(progress, before)

    async def _read(self, pod: ObservedPod) -> Progress | None:
        port = metrics_port(pod)
        if not port:
            return None
        url = f"http://{url_host(pod)}:{port}/progress"
        try:
            async with asyncio.timeout(PROGRESS_TIMEOUT_SECONDS):
                status, content = await request(
                    self.session, url, max_bytes=PROGRESS_BYTES
                )
            return (
                Progress.model_validate_json(content)
                if status == HTTPStatus.OK
                else None
            )
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            # Not listening yet, or the port serves something else: the stage runs without progress.
            return None


class NoProgress:
    """The poller of a process outside the cluster, which can reach no pod."""

    def latest(self, pod: ObservedPod | None) -> Progress | None:  # noqa: ARG002  ProgressPoller's signature
        """Return None."""
        return None

    async def close(self) -> None:
        """Do nothing."""


def _schedule(started_at: datetime) -> _PodProgress:
    """Return the state of a pod that was not known before.

    A pod that has run for a while was polled by an earlier leader. Such pods become known together, when a replica
    becomes the leader, so that their requests are spread over one interval.
    """
    now = time.monotonic()
    age = (datetime.now(UTC) - started_at).total_seconds()  # noqa: TID251  an edge
    if age < POLL_SECONDS:
        return _PodProgress(now + FIRST_POLL_SECONDS, FIRST_POLL_SECONDS)
    return _PodProgress(now + random.uniform(0.0, POLL_SECONDS), POLL_SECONDS)  # noqa: S311


def _is_same(progress: Progress, before: Progress | None) -> bool:
    """Return whether nothing but the time of the report has changed."""
    if before is None:
        return False
    return progress == before.model_copy(update={"updated_at": progress.updated_at})


def metrics_port(pod: ObservedPod) -> int:
    """Return the port from the environment of the stage's container; 0: none."""
    for container in pod.raw["spec"].get("containers") or []:
        if container["name"] == STAGE_CONTAINER:
            env = {
                entry["name"]: entry.get("value")
                for entry in container.get("env") or []
            }
            text = env.get(variables.METRICS_PORT, str(METRICS_PORT)) or "0"
            # isdigit alone accepts characters such as ², which int refuses.
            return int(text) if text.isascii() and text.isdigit() else 0
    return 0
