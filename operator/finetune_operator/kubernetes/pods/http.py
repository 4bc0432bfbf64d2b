"""HTTP requests to the pods of stages and servers; their responses are not trusted."""

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
"""Bytes read of a response, unless the caller sets a lower limit; the rest is dropped."""
CONNECT_SECONDS = 10.0


async def request(
    session: aiohttp.ClientSession, url: str, body: Any = None, max_bytes: int = MAX_RESPONSE_BYTES
) -> tuple[int, bytes]:
    """Get a URL, or post a body to it as JSON; return status and content. Raises aiohttp.ClientError, OSError.

    Redirects are not followed: a pod could choose which host the operator sends requests to. Only connecting has a
    timeout here; the caller limits the whole request.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
    method = "GET" if body is None else "POST"
    async with session.request(method, url, json=body, allow_redirects=False, timeout=timeout) as response:
        content = bytearray()
        async for piece in response.content.iter_any():
            content += piece
            if len(content) >= max_bytes:
                break
        return response.status, bytes(content[:max_bytes])


def url_host(pod: Pod) -> str:
    """Return the pod's address as the host of a URL: IPv6 in brackets."""
    return f"[{pod.address}]" if ":" in pod.address else pod.address


Enqueue = Callable[[Key], None]
"""Called with the pipeline of a pod whose state changed, so that a worker reconciles it."""


def ignore(_key: Key) -> None:
    """Enqueue nothing: the next reconcile reads the change."""


class BackgroundRequests:
    """At most one background request per pod; a request returns whether its pipeline is to be reconciled."""

    def __init__(self, enqueue: Enqueue) -> None:
        self.enqueue = enqueue
        self.tasks: dict[str, asyncio.Task[None]] = {}
        """Pod's uid -> its request in flight."""

    def start(self, pod: Pod, send: Callable[[], Awaitable[bool]]) -> None:
        """Start a request, unless one to this pod is in flight."""
        if pod.uid not in self.tasks:
            task = self.tasks[pod.uid] = asyncio.create_task(self._run(pod, send))
            task.add_done_callback(lambda done: self._on_done(pod.uid, done))

    async def _run(self, pod: Pod, send: Callable[[], Awaitable[bool]]) -> None:
        try:
            changed = await send()
        except Exception:
            log.exception("the background request to pod %s failed; this is a bug in the operator", pod.name)
            return
        if changed and (key := owner_key(pod.raw)):
            self.enqueue(key)

    def _on_done(self, uid: str, task: asyncio.Task[None]) -> None:
        if self.tasks.get(uid) is task:
            del self.tasks[uid]

    def cancel(self, uids: Iterable[str]) -> None:
        """Cancel the requests to these pods."""
        for uid in uids:
            if task := self.tasks.pop(uid, None):
                task.cancel()

    async def close(self) -> None:
        """Cancel all requests and wait until they have ended: the session that they use is closed next."""
        tasks = list(self.tasks.values())
        self.cancel(list(self.tasks))
        await asyncio.gather(*tasks, return_exceptions=True)
