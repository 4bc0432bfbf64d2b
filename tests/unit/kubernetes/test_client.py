"""The client of the API server: errors, rate limit, timeouts, pagination and leadership."""

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from unittest.mock import patch

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration
from support.http_server import serve_http

from finetune_operator.errors import ClusterError, Conflict
from finetune_operator.kubernetes import client as module
from finetune_operator.kubernetes.client import (
    AlreadyExists,
    ApiError,
    KubernetesClient,
    NotLeader,
    RateLimiter,
    open_client,
)

Handler = Callable[[web.Request], web.StreamResponse]


@asynccontextmanager
async def client_of(handler, **options):
    """Serve requests with the handler, and yield a client of that server."""

    async def handle(request: web.Request) -> web.StreamResponse:
        response = handler(request)
        return await response if asyncio.iscoroutine(response) else response

    async with serve_http(handle) as port:
        settings = Configuration()
        settings.host = f"http://127.0.0.1:{port}"
        async with open_client(settings, **options) as api:
            yield api


def call(handler, request: Callable[[KubernetesClient], object], **options):
    """Send one request to the handler; return the result and the client."""

    async def scenario():
        async with client_of(handler, **options) as api:
            return await request(api), api

    return asyncio.run(asyncio.wait_for(scenario(), 30))


def rejecting(status: int, reason: str = "", message: str = "no", **headers: str) -> Handler:
    return lambda _: web.json_response({"reason": reason, "message": message}, status=status, headers=headers)


@pytest.mark.parametrize("status", [401, 403, 422, 429, 500, 502, 503, 504])
def test_error_status_is_a_retryable_error(status):
    with pytest.raises(ClusterError, match="no"):
        call(rejecting(status), lambda api: api.get("/x"))


def test_html_error_page_is_a_retryable_error():
    page = lambda _: web.Response(text="<html>Bad Gateway</html>", status=502)  # noqa: E731
    with pytest.raises(ApiError, match="Bad Gateway"):
        call(page, lambda api: api.get("/x"))


@pytest.mark.parametrize("text", ["<html>Welcome</html>", "[" * 100_000, "\x80"])
def test_unparseable_response_is_a_retryable_error(text):
    page = lambda _: web.Response(body=text.encode("latin-1"))  # noqa: E731
    with pytest.raises(ApiError, match="cannot be parsed"):
        call(page, lambda api: api.get("/x"))


def test_get_of_a_missing_object_returns_none():
    found, _ = call(rejecting(404, "NotFound"), lambda api: api.get("/x"))
    assert found is None


@pytest.mark.parametrize(("reason", "error"), [("AlreadyExists", AlreadyExists), ("Conflict", Conflict)])
def test_409_is_already_exists_or_conflict_by_reason(reason, error):
    with pytest.raises(error):
        call(rejecting(409, reason), lambda api: api.create("/x", {}))


def test_429_halves_the_rate_and_waits_for_retry_after():
    async def scenario():
        rejections = [web.json_response({"message": "slow down"}, status=429, headers={"Retry-After": "1"})]

        def respond(_):
            return rejections.pop() if rejections else web.json_response({})

        async with client_of(respond) as api:
            before = api.rate_limiter.rate
            with pytest.raises(ApiError):
                await api.get("/x")
            assert api.rate_limiter.rate == before / 2
            started = asyncio.get_running_loop().time()
            await api.get("/x")
            assert asyncio.get_running_loop().time() - started > 0.9

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_concurrent_429s_halve_the_rate_once():
    async def scenario():
        async with client_of(rejecting(429, **{"Retry-After": "1"})) as api:
            before = api.rate_limiter.rate
            requests = (api.get("/x") for _ in range(10))
            await asyncio.gather(*requests, return_exceptions=True)
            assert api.rate_limiter.rate == before / 2

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_429_after_the_wait_halves_the_rate_again():
    async def scenario():
        limiter = RateLimiter(rate=40.0)
        for _ in range(2):
            for _ in range(3):
                limiter.back_off(0.05)
            await asyncio.sleep(0.06)
        assert limiter.rate == 10.0

    with patch.object(module, "HALVED_SECONDS", 0.05):
        asyncio.run(scenario())


def test_silent_server_times_out():
    async def silent(_):
        await asyncio.sleep(2)
        return web.json_response({})

    with patch.object(module, "TIMEOUT_SECONDS", 0.2), pytest.raises(ApiError, match="does not answer"):
        call(silent, lambda api: api.get("/x"))


def test_refused_connection_is_a_retryable_error():
    async def scenario():
        settings = Configuration()
        settings.host = "http://127.0.0.1:1"
        async with open_client(settings) as api:
            await api.get("/x")

    with pytest.raises(ApiError, match="does not answer"):
        asyncio.run(scenario())


def test_client_without_the_lease_writes_nothing():
    methods = []

    def respond(request):
        methods.append(request.method)
        return web.json_response({})

    with pytest.raises(NotLeader):
        call(respond, lambda api: api.create("/x", {}), may_write=lambda: False)
    call(respond, lambda api: api.get("/x"), may_write=lambda: False)
    assert methods == ["GET"]


def test_rotated_token_is_used(tmp_path):
    tokens = []

    def respond(request):
        tokens.append(request.headers.get("Authorization"))
        return web.json_response({})

    async def scenario():
        token = tmp_path / "token"

        async def refresh(settings):
            settings.api_key["BearerToken"] = f"Bearer {token.read_text()}"

        async with client_of(respond) as api:
            api.client.configuration.api_key["BearerToken"] = "Bearer expired"
            api.client.configuration.refresh_api_key_hook = refresh
            for text in ("old", "new"):
                token.write_text(text)
                await api.get("/x")

    asyncio.run(scenario())
    assert tokens == ["Bearer old", "Bearer new"]


def test_list_follows_the_continue_token():
    pages = {"": ([1, 2], "more"), "more": ([3], "")}

    def respond(request):
        items, token = pages[request.query.get("continue", "")]
        return web.json_response({"items": items, "metadata": {"continue": token}})

    async def scenario():
        async with client_of(respond) as api:
            return [one async for one in api.list("/x")]

    assert asyncio.run(scenario()) == [1, 2, 3]


def test_lease_lost_while_rate_limited_prevents_the_write():
    methods, is_leader = [], [True]

    def respond(request):
        methods.append(request.method)
        return web.json_response({})

    async def scenario():
        async with client_of(respond, may_write=lambda: is_leader[0]) as api:
            api.rate_limiter.back_off(0.3)
            writing = asyncio.create_task(api.create("/x", {}))
            await asyncio.sleep(0.1)
            is_leader[0] = False
            with pytest.raises(NotLeader):
                await writing

    asyncio.run(scenario())
    assert methods == []
