"""The API server as it is on a bad day: what the operator makes of its answers."""

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from unittest.mock import patch

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration
from support.http_server import answering

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

Answers = Callable[[web.Request], web.StreamResponse]


@asynccontextmanager
async def api_of(answer, **more):
    """Serve whatever `answer` makes of each request."""

    async def handle(request: web.Request) -> web.StreamResponse:
        found = answer(request)
        return await found if asyncio.iscoroutine(found) else found

    async with answering(handle) as port:
        settings = Configuration()
        settings.host = f"http://127.0.0.1:{port}"
        async with open_client(settings, **more) as api:
            yield api


def asked(answer, ask: Callable[[KubernetesClient], object], **more):
    """Ask once, and give the answer."""

    async def story():
        async with api_of(answer, **more) as api:
            return await ask(api), api

    return asyncio.run(asyncio.wait_for(story(), 30))


def refusing(status: int, reason: str = "", message: str = "no", **headers: str) -> Answers:
    return lambda _: web.json_response({"reason": reason, "message": message}, status=status, headers=headers)


@pytest.mark.parametrize("status", [401, 403, 422, 429, 500, 502, 503, 504])
def test_whatever_it_refuses_is_an_error_that_is_tried_again(status):
    with pytest.raises(ClusterError, match="no"):
        asked(refusing(status), lambda api: api.get("/x"))


def test_a_page_of_a_proxy_is_no_reason_to_end():
    page = lambda _: web.Response(text="<html>Bad Gateway</html>", status=502)  # noqa: E731
    with pytest.raises(ApiError, match="Bad Gateway"):
        asked(page, lambda api: api.get("/x"))


@pytest.mark.parametrize("text", ["<html>Welcome</html>", "[" * 100_000, "\x80"])
def test_an_answer_that_nobody_can_read_is_an_error_that_is_tried_again(text):
    page = lambda _: web.Response(body=text.encode("latin-1"))  # noqa: E731
    with pytest.raises(ApiError, match="cannot be read"):
        asked(page, lambda api: api.get("/x"))


def test_what_is_not_there_is_none():
    found, _ = asked(refusing(404, "NotFound"), lambda api: api.get("/x"))
    assert found is None


@pytest.mark.parametrize(("reason", "error"), [("AlreadyExists", AlreadyExists), ("Conflict", Conflict)])
def test_two_kinds_of_409_are_told_apart(reason, error):
    with pytest.raises(error):
        asked(refusing(409, reason), lambda api: api.create("/x", {}))


def test_429_halves_the_pace_and_its_retry_after_is_waited_for():
    async def story():
        left = [1]

        def answer(_):
            if left.pop() if left else False:
                return web.json_response({"message": "slowly"}, status=429, headers={"Retry-After": "1"})
            return web.json_response({})

        async with api_of(answer) as api:
            before = api.rate_limiter.rate
            with pytest.raises(ApiError):
                await api.get("/x")
            assert api.rate_limiter.rate == before / 2
            began = asyncio.get_running_loop().time()
            await api.get("/x")
            assert asyncio.get_running_loop().time() - began > 0.9

    asyncio.run(asyncio.wait_for(story(), 20))


def test_many_that_are_refused_at_once_halve_the_pace_once():
    async def story():
        async with api_of(refusing(429, **{"Retry-After": "1"})) as api:
            before = api.rate_limiter.rate
            asked = (api.get("/x") for _ in range(10))
            await asyncio.gather(*asked, return_exceptions=True)
            assert api.rate_limiter.rate == before / 2

    asyncio.run(asyncio.wait_for(story(), 20))


def test_a_server_that_says_429_again_when_it_was_waited_for_is_asked_half_as_often_again():
    async def story():
        pace = RateLimiter(rate=40.0)
        for _ in range(2):
            for _ in range(3):
                pace.back_off(0.05)
            await asyncio.sleep(0.06)
        assert pace.rate == 10.0

    with patch.object(module, "HALVED_SECONDS", 0.05):
        asyncio.run(story())


def test_one_that_does_not_answer_is_given_up():
    async def silent(_):
        await asyncio.sleep(2)
        return web.json_response({})

    with patch.object(module, "TIMEOUT_SECONDS", 0.2), pytest.raises(ApiError, match="does not answer"):
        asked(silent, lambda api: api.get("/x"))


def test_nobody_there_is_an_error_that_is_tried_again():
    async def story():
        settings = Configuration()
        settings.host = "http://127.0.0.1:1"
        async with open_client(settings) as api:
            await api.get("/x")

    with pytest.raises(ApiError, match="does not answer"):
        asyncio.run(story())


def test_who_does_not_lead_writes_nothing():
    heard = []

    def answer(request):
        heard.append(request.method)
        return web.json_response({})

    with pytest.raises(NotLeader):
        asked(answer, lambda api: api.create("/x", {}), may_write=lambda: False)
    asked(answer, lambda api: api.get("/x"), may_write=lambda: False)
    assert heard == ["GET"]


def test_a_token_that_was_changed_is_used_from_then_on(tmp_path):
    heard = []

    def answer(request):
        heard.append(request.headers.get("Authorization"))
        return web.json_response({})

    async def story():
        token = tmp_path / "token"

        async def read_again(settings):
            settings.api_key["BearerToken"] = f"Bearer {token.read_text()}"

        async with api_of(answer) as api:
            api.client.configuration.api_key["BearerToken"] = "Bearer of long ago"
            api.client.configuration.refresh_api_key_hook = read_again
            for text in ("old", "new"):
                token.write_text(text)
                await api.get("/x")

    asyncio.run(story())
    assert heard == ["Bearer old", "Bearer new"]


def test_a_long_list_comes_page_by_page():
    pages = {"": ([1, 2], "more"), "more": ([3], "")}

    def answer(request):
        items, token = pages[request.query.get("continue", "")]
        return web.json_response({"items": items, "metadata": {"continue": token}})

    async def story():
        async with api_of(answer) as api:
            return [one async for one in api.list("/x")]

    assert asyncio.run(story()) == [1, 2, 3]


def test_who_stops_leading_while_it_waits_for_its_turn_writes_nothing():
    heard, leads = [], [True]

    def answer(request):
        heard.append(request.method)
        return web.json_response({})

    async def story():
        async with api_of(answer, may_write=lambda: leads[0]) as api:
            api.rate_limiter.back_off(0.3)
            writing = asyncio.create_task(api.create("/x", {}))
            await asyncio.sleep(0.1)
            leads[0] = False
            with pytest.raises(NotLeader):
                await writing

    asyncio.run(story())
    assert heard == []
