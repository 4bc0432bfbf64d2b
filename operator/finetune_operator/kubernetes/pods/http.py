"""Pods are asked over HTTP, and what they say is not ours to trust."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import aiohttp

from finetune_operator.core.pipeline import Key
from finetune_operator.kubernetes.cache import owner_key
from finetune_operator.kubernetes.translate.pod import Pod

log = logging.getLogger(__name__)
MAX_RESPONSE_BYTES = 256 << 10
"""Bytes read of an answer, unless less is asked for; what is longer is cut."""
CONNECT_SECONDS = 10.0


async def request(
    session: aiohttp.ClientSession, url: str, body: Any = None, most: int = MAX_RESPONSE_BYTES
) -> tuple[int, bytes]:
    """Get a page, or post a body as JSON; gives status and content. Raises aiohttp.ClientError, OSError.

    Redirects are not followed: a pod would choose whom the operator talks to. How long it may take is the caller's.
    """
    patience = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
    method = "GET" if body is None else "POST"
    async with session.request(method, url, json=body, allow_redirects=False, timeout=patience) as answer:
        content = bytearray()
        async for piece in answer.content.iter_any():
            content += piece
            if len(content) >= most:
                break
        return answer.status, bytes(content[:most])


def url_host(pod: Pod) -> str:
    """Give its address as URLs have it."""
    return f"[{pod.address}]" if ":" in pod.address else pod.address


Enqueue = Callable[[Key], None]
"""Called with the pipeline of a pod that had news, so that somebody looks."""


def ignore(_key: Key) -> None:
    """Let the news wait for the next look."""


class BackgroundRequests:
    """At most one question to a pod at a time; a question gives whether its answer is news."""

    def __init__(self, tell: Enqueue) -> None:
        self.enqueue = tell
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, pod: Pod, question: Callable[[], Awaitable[bool]]) -> None:
        """Ask, unless it is being asked."""
        if pod.uid not in self.tasks:
            task = self.tasks[pod.uid] = asyncio.create_task(self._run(pod, question))
            task.add_done_callback(lambda done: self._on_done(pod.uid, done))

    async def _run(self, pod: Pod, question: Callable[[], Awaitable[bool]]) -> None:
        try:
            news = await question()
        except Exception:
            log.exception("%s could not be asked: this is a bug", pod.name)
            return
        if news and (key := owner_key(pod.raw)):
            self.enqueue(key)

    def _on_done(self, uid: str, task: asyncio.Task[None]) -> None:
        if self.tasks.get(uid) is task:
            del self.tasks[uid]

    def cancel(self, uids: Iterable[str]) -> None:
        """Ask them no more."""
        for uid in uids:
            if task := self.tasks.pop(uid, None):
                task.cancel()

    async def close(self) -> None:
        """Call everything off, and wait until it has ended: the session that it uses is about to be closed."""
        tasks = list(self.tasks.values())
        self.cancel(list(self.tasks))
        await asyncio.gather(*tasks, return_exceptions=True)
