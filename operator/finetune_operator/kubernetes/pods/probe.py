"""What new servers say when they are asked for the first time, before anybody's requests are sent to them."""

import asyncio
import json
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import aiohttp

from finetune_operator.api.stages.base import Serving
from finetune_operator.kubernetes.pods.http import Errands, Tell, ask, host_of, to_nobody
from finetune_operator.kubernetes.resources.server import PORT
from finetune_operator.kubernetes.translate.pod import Pod

PATIENCE_SECONDS = 600.0
"""For the whole answer."""
TRIES, PAUSE_SECONDS = 5, 2.0
"""For a connection, which may need a moment after the server has said that it is ready."""
CHARACTERS = 1024
"""Of the answer, kept."""


@dataclass(frozen=True)
class Answer:
    """What a server said, or why it said nothing."""

    text: str = ""
    failure: str = ""


class Answers:
    """Has each pod asked once, beside the looks, and remembers what it said; `tell` is called when it has."""

    def __init__(self, session: aiohttp.ClientSession, tell: Tell = to_nobody) -> None:
        self.session, self.errands = session, Errands(tell)
        self.said: dict[str, Answer] = {}

    def of(self, pod: Pod, model: str, serving: Serving) -> Answer | None:
        """Give a pod's answer; None: it thinks."""
        if pod.uid not in self.said:
            self.errands.send(pod, partial(self._note, pod, model, serving))
        return self.said.get(pod.uid)

    def forget_all_but(self, uids: set[str]) -> None:
        """Drop pods that are no more."""
        self.errands.call_off(self.errands.tasks.keys() - uids)
        self.said = {uid: answer for uid, answer in self.said.items() if uid in uids}

    async def close(self) -> None:
        """Ask nobody any more."""
        await self.errands.close()

    async def _note(self, pod: Pod, model: str, serving: Serving) -> bool:
        self.said[pod.uid] = await self._ask(pod, model, serving)
        return True

    async def _ask(self, pod: Pod, model: str, serving: Serving) -> Answer:
        body = {"model": model, "prompt": serving.prompt, "max_tokens": serving.max_tokens, "temperature": 0}
        where = f"http://{host_of(pod)}:{PORT}/v1/completions"
        said = ""
        for _ in range(TRIES):
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    return _read(*await ask(self.session, where, body))
            except aiohttp.ClientError as error:  # first, for one that cannot connect in time is a TimeoutError as well
                said = str(error) or type(error).__name__
            except TimeoutError:
                return Answer(failure=f"it has not answered the prompt within {PATIENCE_SECONDS:.0f} s")
            await asyncio.sleep(PAUSE_SECONDS)
        return Answer(failure=f"the operator cannot reach {where}: {said}; does a NetworkPolicy forbid it?")


class NoAnswers:
    """In their place outside of the cluster, where no pod can be reached."""

    def of(self, pod: Pod, model: str, serving: Serving) -> Answer | None:  # noqa: ARG002  as Answers has it
        """Know nothing."""
        return None

    def forget_all_but(self, uids: set[str]) -> None:
        """Have nothing to forget."""

    async def close(self) -> None:
        """Have nothing to end."""


def _read(status: int, content: bytes) -> Answer:
    try:
        said: Any = json.loads(content)
        if status == HTTPStatus.OK:
            text = str(said["choices"][0]["text"])[:CHARACTERS]
            return Answer(text.encode(errors="replace").decode())  # JSON may hold halves of characters
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    return Answer(failure=f"it answered the prompt with status {status}: {content[:500].decode(errors='replace')}")
