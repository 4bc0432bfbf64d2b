"""HTTP requests to the pods of stages and servers; their responses are not trusted."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from finetune_operator.core.pipeline import Key
from finetune_operator.kubernetes.cache.children import owner_key
from finetune_operator.kubernetes.translate.pod import ObservedPod

log = logging.getLogger(__name__)
MAX_RESPONSE_BYTES = 256 << 10
"""Bytes read of a response, unless the caller sets a lower limit; the rest is dropped."""
CONNECT_SECONDS = 10.0


def open_session() -> aiohttp.ClientSession:
    """Create a session for requests to pods; progress and probes have one each.

    The number of connections has no limit here: one queue for the pods of all tenants would let the mute pods of one
    delay the others. `NamespaceLimits` has the limits. Nothing of a response outlives it: no cookie and no connection,
    because another tenant's pod may have the address by then. A response is not decompressed: its size is limited.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Accept-Encoding": "identity"},
        auto_decompress=False,
    )


async def request(
    session: aiohttp.ClientSession,
    url: str,
    body: Any = None,
    max_bytes: int = MAX_RESPONSE_BYTES,
    *,
    method: str | None = None,
) -> tuple[int, bytes]:
    """Get a URL, or post a body to it as JSON; return status and content. Raises aiohttp.ClientError, OSError.

    `method` replaces GET or POST. Redirects are not followed: a pod could choose which host the operator sends requests
    to. Only connecting has a timeout here; the caller limits the whole request.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
    verb = method or ("GET" if body is None else "POST")
    async with session.request(
        verb, url, json=body, allow_redirects=False, timeout=timeout
    ) as response:
        content = bytearray()
        async for piece in response.content.iter_any():
            content += piece
            # A pod may send without end.
            if len(content) >= max_bytes:
                break
        return response.status, bytes(content[:max_bytes])


def url_host(pod: ObservedPod) -> str:
    """Return the pod's address as the host of a URL: IPv6 in brackets."""
    if ":" in pod.address:
        return f"[{pod.address}]"
    return pod.address


@dataclass
class _Limit:
    semaphore: asyncio.Semaphore
    users: int = 0
    """Requests that hold the semaphore or wait for it."""


class NamespaceLimits:
    """A limit of concurrent requests for each namespace: a request waits for others of its own namespace only."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.limits: dict[str, _Limit] = {}
        """Namespace -> its limit, while it has a request."""

    @asynccontextmanager
    async def slot(self, namespace: str) -> AsyncIterator[None]:
        """Wait until the namespace has fewer requests than the limit, and hold its place while the context is open."""
        limit = self.limits.setdefault(namespace, _Limit(asyncio.Semaphore(self.limit)))
        limit.users += 1
        try:
            async with limit.semaphore:
                yield
        finally:
            limit.users -= 1
            # A namespace may be deleted, and would stay here forever.
            if not limit.users:
                del self.limits[namespace]


Enqueue = Callable[[Key], None]
"""Called with the pipeline of a pod whose state changed, so that a worker reconciles it."""


def ignore(_key: Key) -> None:
    """Enqueue nothing: the next reconcile reads the change."""


class BackgroundRequests:
    """At most one background request per pod, and `limit` at once per namespace.

    A request returns whether its pipeline is to be reconciled.
    """

    def __init__(self, limit: int, enqueue: Enqueue) -> None:
        self.limits = NamespaceLimits(limit)
        self.enqueue = enqueue
        self.tasks: dict[str, asyncio.Task[None]] = {}
        """Pod's uid -> its request, which waits or is in flight."""

    def start(self, pod: ObservedPod, send: Callable[[], Awaitable[bool]]) -> None:
        """Start a request, unless a request to this pod waits or is in flight."""
        if pod.uid not in self.tasks:
            task = self.tasks[pod.uid] = asyncio.create_task(self._run(pod, send))
            task.add_done_callback(lambda done: self._on_done(pod.uid, done))

    async def _run(self, pod: ObservedPod, send: Callable[[], Awaitable[bool]]) -> None:
        key = owner_key(pod.raw)
        try:
            async with self.limits.slot(pod.raw["metadata"]["namespace"]):
                changed = await send()
        except Exception:
            log.exception(
                "the background request to pod %s failed; this is a bug in the operator",
                pod.name,
                extra={"pipeline": key},
            )
            return
        if changed and key:
            self.enqueue(key)

    def _on_done(self, uid: str, task: asyncio.Task[None]) -> None:
        # A cancelled request ends late: the pod may have another request by then.
        if self.tasks.get(uid) is task:
            del self.tasks[uid]

    def cancel(self, uids: Iterable[str]) -> None:
        """Cancel the requests to these pods."""
        for uid in uids:
            task = self.tasks.pop(uid, None)
            if task:
                task.cancel()

    def cancel_all(self) -> None:
        """Cancel all requests."""
        self.cancel(list(self.tasks))

    async def close(self) -> None:
        """Cancel all requests and wait until they have ended: the session that they use is closed next."""
        tasks = list(self.tasks.values())
        self.cancel_all()
        await asyncio.gather(*tasks, return_exceptions=True)
