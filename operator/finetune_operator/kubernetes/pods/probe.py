"""Probe each new server with one prompt before users' requests are sent to it."""

import asyncio
import json
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import aiohttp

from finetune_operator.api.stages.base import Serving
from finetune_operator.kubernetes.pods.http import (
    BackgroundRequests,
    Enqueue,
    ignore,
    request,
    url_host,
)
from finetune_operator.kubernetes.resources.server import PORT
from finetune_operator.kubernetes.translate.pod import ObservedPod
from finetune_trainer.contract.smoke_test import Question

# A server is probed once, so more than a few at once are rare.
REQUESTS_PER_NAMESPACE = 4
"""Probes at once in a namespace."""
TOKEN_SECONDS = 0.1
"""Patience for each token of the answer."""
FIRST_TOKEN_SECONDS = 120.0
"""Patience until the first token of the answer, in addition.

The server is Ready, so that its model is loaded. The first prompt may still compile kernels, which takes a large model
a minute. A server that generates fewer than 10 tokens a second for one user is not ready for many.
"""
# A server that is Ready may not be reachable for a moment.
TRIES = 5
"""Attempts to connect."""
PAUSE_SECONDS = 2.0
"""Pause between two of them."""
MAX_ANSWER_LENGTH = 1024
"""Characters of the answer that are kept."""


@dataclass(frozen=True)
class ProbeResult:
    """A server's answer, or why it has none."""

    text: str = ""
    failure: str = ""
    is_permanent: bool = False
    """Whether another attempt with the same model would fail in the same way."""


class ServerProbe:
    """Probes each pod once in the background and keeps the result; `enqueue` is called when it is there."""

    def __init__(
        self, session: aiohttp.ClientSession, enqueue: Enqueue = ignore
    ) -> None:
        self.session = session
        self.requests = BackgroundRequests(REQUESTS_PER_NAMESPACE, enqueue)
        self.results: dict[str, ProbeResult] = {}
        """Pod's uid -> its result."""

    def result(self, pod: ObservedPod) -> ProbeResult | None:
        """Return the result of a pod's probe; None while there is none."""
        return self.results.get(pod.uid)

    def start(self, pod: ObservedPod, model: str, serving: Serving) -> None:
        """Start the probe of a pod, unless it has started or has a result."""
        if pod.uid not in self.results:
            self.requests.start(pod, partial(self._store, pod, model, serving))

    def retain(self, uids: set[str]) -> None:
        """Drop all pods but these, which are the server pods that exist."""
        self.requests.cancel(self.requests.tasks.keys() - uids)
        self.results = {
            uid: result for uid, result in self.results.items() if uid in uids
        }

    async def close(self) -> None:
        """Cancel all probes."""
        await self.requests.close()

    async def _store(self, pod: ObservedPod, model: str, serving: Serving) -> bool:
        self.results[pod.uid] = await self._probe(pod, model, serving)
        return True

    async def _probe(
        self, pod: ObservedPod, model: str, serving: Serving
    ) -> ProbeResult:
        question = serving.question
        body = question.body(model)
        url = f"http://{url_host(pod)}:{PORT}{question.path}"
        patience = patience_seconds(serving)
        cause = ""
        for _ in range(TRIES):
            try:
                async with asyncio.timeout(patience):
                    status, content = await request(self.session, url, body)
                    return _parse(question, status, content)
            # Before TimeoutError: aiohttp's connection timeout is both.
            except aiohttp.ClientError as error:
                cause = str(error) or type(error).__name__
            except TimeoutError:
                return ProbeResult(
                    failure=f"the server did not answer the prompt within {patience:.0f} s"
                )
            await asyncio.sleep(PAUSE_SECONDS)
        return ProbeResult(
            failure=f"the operator cannot reach {url}: {cause}; a NetworkPolicy may forbid it"
        )


class NoProbe:
    """The probe of a process outside the cluster, which can reach no pod."""

    def result(self, pod: ObservedPod) -> ProbeResult | None:  # noqa: ARG002  ServerProbe's signature
        """Return None."""
        return None

    def start(self, pod: ObservedPod, model: str, serving: Serving) -> None:
        """Do nothing."""

    def retain(self, uids: set[str]) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


def patience_seconds(serving: Serving) -> float:
    """Return how long the answer to the prompt may take: 123 s for the default of 32 tokens."""
    return FIRST_TOKEN_SECONDS + TOKEN_SECONDS * serving.max_tokens


def _parse(question: Question, status: int, content: bytes) -> ProbeResult:
    try:
        body: Any = json.loads(content)
        if status == HTTPStatus.OK:
            # JSON may hold lone surrogates, which no UTF-8 text can.
            text = question.answer(body).encode(errors="replace").decode()
            problem = question.problem(text)
            if problem:
                return ProbeResult(failure=problem, is_permanent=True)
            return ProbeResult(text[:MAX_ANSWER_LENGTH])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    text = content[:500].decode(errors="replace")
    return ProbeResult(
        failure=f"the server answered the prompt with status {status}: {text}"
    )
