"""What new servers say when they are asked for the first time, before anybody's requests are sent to them."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import aiohttp

from finetune_operator.cluster.kubernetes.asking import ask, host_of, ok
from finetune_operator.cluster.kubernetes.engines.base import PORT
from finetune_operator.cluster.kubernetes.pod import Pod
from finetune_operator.stages.base import Serving

PATIENCE_SECONDS = 600.0
"""For the whole answer."""
LOOK_SECONDS = 5.0
"""An answer that takes longer is waited for beside the other work."""
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
    """Asks each pod once, and remembers what it said."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session
        self.asked: dict[str, asyncio.Task[Answer]] = {}

    async def of(self, pod: Pod, model: str, serving: Serving) -> Answer | None:
        """Give a pod's answer; None: it thinks."""
        uid = pod.raw["metadata"]["uid"]
        task = self.asked.get(uid) or asyncio.create_task(self._ask(pod, model, serving))
        self.asked[uid] = task
        await asyncio.wait([task], timeout=LOOK_SECONDS)
        # Somebody may have called it off meanwhile, and that is not meant for whoever waits here.
        return task.result() if task.done() and not task.cancelled() else None

    def forget_all_but(self, uids: set[str]) -> None:
        """Drop pods that are no more."""
        for uid in self.asked.keys() - uids:
            self.asked.pop(uid).cancel()

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

    async def of(self, pod: Pod, model: str, serving: Serving) -> Answer | None:  # noqa: ARG002  as Answers has it
        """Know nothing."""
        return None

    def forget_all_but(self, uids: set[str]) -> None:
        """Have nothing to forget."""


def _read(status: int, content: bytes) -> Answer:
    try:
        said: Any = json.loads(content)
        if ok(status):
            text = str(said["choices"][0]["text"])[:CHARACTERS]
            return Answer(text.encode(errors="replace").decode())  # JSON may hold halves of characters
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    return Answer(failure=f"it answered the prompt with status {status}: {content[:500].decode(errors='replace')}")
