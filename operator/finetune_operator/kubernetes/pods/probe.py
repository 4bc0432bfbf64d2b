"""What new servers say when they are asked for the first time, before anybody's requests are sent to them."""

import asyncio
import json
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import aiohttp

from finetune_operator.api.stages.base import Serving
from finetune_operator.kubernetes.pods.http import BackgroundRequests, Enqueue, ignore, request, url_host
from finetune_operator.kubernetes.resources.server import PORT
from finetune_operator.kubernetes.translate.pod import Pod

ANSWER_TIMEOUT_SECONDS = 600.0
"""For the whole answer."""
TRIES, PAUSE_SECONDS = 5, 2.0
"""For a connection, which may need a moment after the server has said that it is ready."""
MAX_ANSWER_LENGTH = 1024
"""Of the answer, kept."""


@dataclass(frozen=True)
class ProbeResult:
    """What a server said, or why it said nothing."""

    text: str = ""
    failure: str = ""


class ServerProbe:
    """Has each pod asked once, beside the looks, and remembers what it said; `tell` is called when it has."""

    def __init__(self, session: aiohttp.ClientSession, tell: Enqueue = ignore) -> None:
        self.session, self.requests = session, BackgroundRequests(tell)
        self.results: dict[str, ProbeResult] = {}

    def result(self, pod: Pod, model: str, serving: Serving) -> ProbeResult | None:
        """Give a pod's answer; None: it thinks."""
        if pod.uid not in self.results:
            self.requests.start(pod, partial(self._store, pod, model, serving))
        return self.results.get(pod.uid)

    def retain(self, uids: set[str]) -> None:
        """Drop pods that are no more."""
        self.requests.cancel(self.requests.tasks.keys() - uids)
        self.results = {uid: answer for uid, answer in self.results.items() if uid in uids}

    async def close(self) -> None:
        """Ask nobody any more."""
        await self.requests.close()

    async def _store(self, pod: Pod, model: str, serving: Serving) -> bool:
        self.results[pod.uid] = await self._ask(pod, model, serving)
        return True

    async def _ask(self, pod: Pod, model: str, serving: Serving) -> ProbeResult:
        body = {"model": model, "prompt": serving.prompt, "max_tokens": serving.max_tokens, "temperature": 0}
        where = f"http://{url_host(pod)}:{PORT}/v1/completions"
        said = ""
        for _ in range(TRIES):
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_SECONDS):
                    return _read(*await request(self.session, where, body))
            except aiohttp.ClientError as error:  # first, for one that cannot connect in time is a TimeoutError as well
                said = str(error) or type(error).__name__
            except TimeoutError:
                return ProbeResult(failure=f"it has not answered the prompt within {ANSWER_TIMEOUT_SECONDS:.0f} s")
            await asyncio.sleep(PAUSE_SECONDS)
        return ProbeResult(failure=f"the operator cannot reach {where}: {said}; does a NetworkPolicy forbid it?")


class NoProbe:
    """In their place outside of the cluster, where no pod can be reached."""

    def result(self, pod: Pod, model: str, serving: Serving) -> ProbeResult | None:  # noqa: ARG002  as Answers has it
        """Know nothing."""
        return None

    def retain(self, uids: set[str]) -> None:
        """Have nothing to forget."""

    async def close(self) -> None:
        """Have nothing to end."""


def _read(status: int, content: bytes) -> ProbeResult:
    try:
        said: Any = json.loads(content)
        if status == HTTPStatus.OK:
            text = str(said["choices"][0]["text"])[:MAX_ANSWER_LENGTH]
            return ProbeResult(text.encode(errors="replace").decode())  # JSON may hold halves of characters
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    return ProbeResult(failure=f"it answered the prompt with status {status}: {content[:500].decode(errors='replace')}")
