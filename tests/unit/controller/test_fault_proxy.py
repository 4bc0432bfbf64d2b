"""The proxy of tests/integration/faults does to requests and watches what its faults say."""

import asyncio
import json
import ssl
from contextlib import AsyncExitStack

import aiohttp
import pytest
from aiohttp import web
from support.faults import faults
from support.faults.api import Endpoint
from support.faults.faults import Cut, Delay, EndWatch, Stale, WatchEnd
from support.faults.proxy import Proxy, running_proxy

EVENT = b'{"type":"ADDED","object":{}}\n'


class Upstream:
    """An API server with one list; its watch delivers an event every 10 ms."""

    def __init__(self):
        self.requests = 0

    async def handle(self, request):
        self.requests += 1
        if "watch" not in request.query:
            return web.json_response({"items": [], "version": self.requests})
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for _ in range(100):
            await response.write(EVENT)
            await asyncio.sleep(0.01)
        return response


def with_proxy(test):
    """Run a test with a proxy in front of an upstream, a session, and the proxy's URL."""

    async def run():
        upstream = Upstream()
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", upstream.handle)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(runner.cleanup)
            session = await stack.enter_async_context(aiohttp.ClientSession())
            endpoint = Endpoint(
                f"http://127.0.0.1:{runner.addresses[0][1]}",
                ssl.create_default_context(),
            )
            proxy = await stack.enter_async_context(running_proxy(endpoint, session))
            return await test(
                proxy,
                upstream,
                session,
                f"http://127.0.0.1:{proxy.port}/api/v1/namespaces/team/pods",
            )

    return asyncio.run(run())


async def watched(session, url, seconds=5.0) -> list[bytes]:
    """Return the lines of a watch; an error ends it with the line b"broken", silence with b"silent"."""
    lines = []
    try:
        async with session.get(f"{url}?watch=true") as response:
            while line := await asyncio.wait_for(response.content.readline(), seconds):
                lines.append(line)
    except aiohttp.ClientError:
        lines.append(b"broken")
    except TimeoutError:
        lines.append(b"silent")
    return lines


@pytest.mark.parametrize(("when", "reached"), [("before", 0), ("after", 1)])
def test_cut_loses_the_request_or_the_answer(when, reached):
    async def test(proxy: Proxy, upstream, session, url):
        proxy.rule = lambda _: Cut(when)
        with pytest.raises(aiohttp.ClientError):
            await session.post(url)
        return upstream.requests

    assert with_proxy(test) == reached


def test_answer_reaches_the_operator_and_not_the_server():
    async def test(proxy: Proxy, upstream, session, url):
        proxy.rule = lambda _: faults.BUSY
        async with session.get(url) as response:
            return (
                response.status,
                response.headers["Retry-After"],
                (await response.json())["code"],
                upstream.requests,
            )

    assert with_proxy(test) == (429, "1", 429, 0)


def test_stale_list_is_the_remembered_one():
    async def test(proxy: Proxy, upstream, session, url):
        await session.get(f"{url}?limit=500")
        await proxy.remember_lists()
        remembered = upstream.requests
        await session.get(f"{url}?limit=500")
        proxy.rule = lambda _: Stale()
        async with session.get(f"{url}?limit=500") as response:
            return remembered, (await response.json())["version"]

    assert with_proxy(test) == (2, 2)


def test_delayed_request_is_executed_later():
    async def test(proxy: Proxy, upstream, session, url):
        proxy.rule = lambda _: Delay(0.2)
        sent = asyncio.create_task(session.get(url))
        await asyncio.sleep(0.1)
        before = upstream.requests
        await sent
        return before, upstream.requests

    assert with_proxy(test) == (0, 1)


@pytest.mark.parametrize(
    ("how", "ending"),
    [
        (WatchEnd.CLOSED, EVENT),
        (WatchEnd.TRUNCATED, b"broken"),
        (WatchEnd.SILENT, b"silent"),
    ],
)
def test_open_watch_ends_as_requested(how, ending):
    async def test(proxy: Proxy, _upstream, session, url):
        watching = asyncio.create_task(watched(session, url, seconds=1.0))
        while not proxy.watches:  # noqa: ASYNC110  the proxy has no event for it
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert proxy.end_watches(how) == 1
        return await watching

    lines = with_proxy(test)
    assert 2 < len(lines) < 80
    assert lines[-1] == ending


def test_gone_watch_delivers_an_error_event_with_410():
    async def test(proxy: Proxy, _upstream, session, url):
        proxy.rule = lambda _: EndWatch(WatchEnd.GONE)
        return await watched(session, url)

    event = json.loads(with_proxy(test)[-1])
    assert (event["type"], event["object"]["code"]) == ("ERROR", 410)


def test_requests_are_numbered_by_kind():
    async def test(proxy: Proxy, _upstream, session, url):
        for end in ("pods", "leases/operator", "services"):
            await session.get(url.replace("pods", end))
        await watched(session, url)
        return [(request.kind, request.number) for request in proxy.requests]

    assert with_proxy(test) == [
        ("request", 1),
        ("lease", 1),
        ("request", 2),
        ("watch", 1),
    ]
