"""A proxy between one operator and the API server, which injects faults by a rule."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web
from support.faults.api import Endpoint
from support.faults.faults import (
    Answer,
    Cut,
    Delay,
    EndWatch,
    Fault,
    Kind,
    Request,
    Rule,
    Stale,
    WatchEnd,
    no_fault,
)

LARGEST_BODY = 16 << 20
HALF_AN_EVENT = b'{"type":"MODIFIED","object":{"apiVersion":"v1","kind":"Po'
HEADERS_IN = ("Content-Type", "Accept", "User-Agent")
HEADERS_OUT = ("Content-Type", "Retry-After", "Warning")


@dataclass(eq=False)
class OpenWatch:
    """A watch that is being passed on."""

    request: Request
    end: asyncio.Future[WatchEnd] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Set by a test to end the watch."""


class Proxy:
    """Plain HTTP to the operator, TLS to the API server; `rule` decides about each request."""

    def __init__(self, endpoint: Endpoint, session: aiohttp.ClientSession) -> None:
        self.endpoint = endpoint
        self.session = session
        self.rule: Rule = no_fault
        self.requests: list[Request] = []
        self.watches: set[OpenWatch] = set()
        self._counts: Counter[str] = Counter()
        self._lists: dict[str, bytes] = {}
        self._silence = asyncio.Event()
        self.port = 0

    def write_kubeconfig(self, path: Path) -> Path:
        """Write a kubeconfig of this proxy for the operator; return its path."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "proxy",
                    "cluster": {"server": f"http://127.0.0.1:{self.port}"},
                }
            ],
            "users": [
                {"name": "operator", "user": {"token": "not-checked-by-the-proxy"}}
            ],
            "contexts": [
                {"name": "proxy", "context": {"cluster": "proxy", "user": "operator"}}
            ],
            "current-context": "proxy",
        }
        path.write_text(yaml.safe_dump(config))
        return path

    def count(self, kind: str) -> int:
        """Return how many requests of the kind there were."""
        return self._counts[kind]

    def end_watches(self, how: WatchEnd) -> int:
        """End all open watches; return their number."""
        open_watches = [watch for watch in self.watches if not watch.end.done()]
        for watch in open_watches:
            watch.end.set_result(how)
        return len(open_watches)

    def drop_silent_watches(self) -> None:
        """Close the connections of silent watches, as a load balancer does at its idle timeout."""
        self._silence.set()
        self._silence = asyncio.Event()

    async def remember_lists(self) -> None:
        """Read every list that the operator has read so far; `Stale` answers with these bodies from then on."""
        lists = {
            f"{request.path}?{request.query}"
            for request in self.requests
            if request.is_list
        }
        for path in lists:
            async with self.session.get(self.endpoint.url + path) as response:
                self._lists[path] = await response.read()

    # Handling of one request.

    async def handle(self, incoming: web.Request) -> web.StreamResponse:
        """Pass a request on, or inject the fault that the rule names."""
        request = self._record(incoming)
        body = await incoming.read()
        fault = self.rule(request)
        if isinstance(fault, Delay):
            await asyncio.sleep(fault.seconds)
        if isinstance(fault, Answer):
            return _answer(fault)
        remembered = self._lists.get(f"{request.path}?{request.query}")
        if isinstance(fault, Stale) and remembered:
            return web.Response(body=remembered, content_type="application/json")
        if isinstance(fault, Cut) and fault.when == "before":
            await fault.then()
            return _abort(incoming)
        try:
            return await self._pass_on(incoming, request, body, fault)
        except (
            aiohttp.ClientError,
            OSError,
        ):  # the API server is down: so is the proxy
            return _abort(incoming)

    def _record(self, incoming: web.Request) -> Request:
        kind: Kind
        if incoming.query.get("watch") in {"true", "1"}:
            kind = "watch"
        elif "/leases" in incoming.path:
            kind = "lease"
        else:
            kind = "request"
        self._counts[kind] += 1
        request = Request(
            kind,
            self._counts[kind],
            incoming.method,
            incoming.path,
            incoming.query_string,
        )
        self.requests.append(request)
        return request

    async def _pass_on(
        self, incoming: web.Request, request: Request, body: bytes, fault: Fault | None
    ) -> web.StreamResponse:
        url = f"{self.endpoint.url}{incoming.raw_path}"
        headers = {
            name: incoming.headers[name]
            for name in HEADERS_IN
            if name in incoming.headers
        }
        async with self.session.request(
            incoming.method, url, data=body or None, headers=headers
        ) as upstream:
            if (
                request.kind == "watch"
                and upstream.status < web.HTTPBadRequest.status_code
            ):
                if isinstance(fault, Cut):
                    await fault.then()
                    return _abort(incoming)
                return await self._stream(incoming, OpenWatch(request), upstream, fault)
            content = await upstream.read()
        if isinstance(fault, Cut):
            await fault.then()
            return _abort(incoming)
        kept = {
            name: upstream.headers[name]
            for name in HEADERS_OUT
            if name in upstream.headers
        }
        return web.Response(status=upstream.status, body=content, headers=kept)

    async def _stream(
        self,
        incoming: web.Request,
        watch: OpenWatch,
        upstream: aiohttp.ClientResponse,
        fault: Fault | None,
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": upstream.headers["Content-Type"]}
        )
        response.enable_chunked_encoding()
        await response.prepare(incoming)
        self.watches.add(watch)
        if isinstance(fault, EndWatch):
            watch.end.set_result(fault.how)
        try:
            await self._copy_lines(incoming, response, watch, upstream)
        finally:
            self.watches.discard(watch)
        if watch.end.done():
            await _end_watch(incoming, response, watch.end.result(), self._silence)
        return response

    async def _copy_lines(
        self,
        incoming: web.Request,
        response: web.StreamResponse,
        watch: OpenWatch,
        upstream: aiohttp.ClientResponse,
    ) -> None:
        """Copy events until the watch ends, the API server ends it, or the operator closes the connection."""
        line: asyncio.Task[bytes] | None = None
        try:
            while not watch.end.done() and _is_open(incoming):
                line = line or asyncio.create_task(upstream.content.readline())
                ends: set[asyncio.Future[Any]] = {line, watch.end}
                await asyncio.wait(ends, timeout=1, return_when=asyncio.FIRST_COMPLETED)
                if watch.end.done() or not line.done():
                    continue
                text = line.result()
                line = None
                if not text:
                    return
                await response.write(text)
        finally:
            if line:
                line.cancel()
                with suppress(asyncio.CancelledError, aiohttp.ClientError, OSError):
                    await line


def _is_open(incoming: web.Request) -> bool:
    return incoming.transport is not None and not incoming.transport.is_closing()


def _abort(incoming: web.Request) -> web.Response:
    """Close the connection without an answer; the response is never sent."""
    if incoming.transport:
        incoming.transport.abort()
    return web.Response(status=web.HTTPBadGateway.status_code)


async def _end_watch(
    incoming: web.Request,
    response: web.StreamResponse,
    how: WatchEnd,
    silence: asyncio.Event,
) -> None:
    match how:
        case WatchEnd.CLOSED:
            await response.write_eof()
        case WatchEnd.GONE:
            status = {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "reason": "Expired",
                "code": 410,
            }
            event = {
                "type": "ERROR",
                "object": {**status, "message": "too old resource version"},
            }
            await response.write(json.dumps(event).encode() + b"\n")
            await response.write_eof()
        case WatchEnd.TRUNCATED:
            await response.write(HALF_AN_EVENT)
            if incoming.transport:
                incoming.transport.close()
        case WatchEnd.SILENT:
            while _is_open(incoming) and not silence.is_set():  # noqa: ASYNC110  aiohttp has no event for a closed request
                await asyncio.sleep(0.5)
            _abort(incoming)


def _answer(fault: Answer) -> web.Response:
    body: dict[str, Any] = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": f"injected by a test: {fault.status} {fault.reason}",
        "reason": fault.reason,
        "code": int(fault.status),
    }
    headers = (
        {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
    )
    return web.json_response(body, status=fault.status, headers=headers)


@asynccontextmanager
async def running_proxy(
    endpoint: Endpoint, session: aiohttp.ClientSession
) -> AsyncIterator[Proxy]:
    """Serve a proxy on a free port of this machine."""
    proxy = Proxy(endpoint, session)
    application = web.Application(client_max_size=LARGEST_BODY)
    application.router.add_route("*", "/{path:.*}", proxy.handle)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    proxy.port = runner.addresses[0][1]
    try:
        yield proxy
    finally:
        await runner.cleanup()
