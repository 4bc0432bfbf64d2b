"""The client of the API server: errors, rate limit, timeouts, pagination and leadership."""

import asyncio
from unittest.mock import patch

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration
from support.trainer.served_client import call, client_of, rejecting

from finetune_operator.errors import ClusterError, Conflict
from finetune_operator.kubernetes import client as module
from finetune_operator.kubernetes.client import NotLeader, open_client
from finetune_operator.kubernetes.token_bucket import MAX_PAUSE_SECONDS
from finetune_operator.kubernetes.translate.api_errors import AlreadyExists, ApiError


@pytest.mark.parametrize("status", [401, 403, 422, 429, 500, 502, 503, 504])
def test_error_status_is_a_retryable_error(status):
    with pytest.raises(ClusterError, match="no"):
        call(rejecting(status), lambda api: api.get("/x"))


def test_html_error_page_is_a_retryable_error():
    page = lambda _: web.Response(text="<html>Bad Gateway</html>", status=502)  # noqa: E731
    with pytest.raises(ApiError, match="Bad Gateway"):
        call(page, lambda api: api.get("/x"))


@pytest.mark.parametrize(
    "text", ["<html>Welcome</html>", "[" * 100_000, "\x80", "[]", "null", '"text"']
)
def test_unparseable_response_is_a_retryable_error(text):
    page = lambda _: web.Response(body=text.encode("latin-1"))  # noqa: E731
    with pytest.raises(ApiError, match="cannot be parsed"):
        call(page, lambda api: api.get("/x"))


@pytest.mark.parametrize("text", ["[]", "null", '"Bad Gateway"', "7"])
def test_json_error_page_that_is_no_object_is_an_error(text):
    page = lambda _: web.Response(text=text, status=502)  # noqa: E731
    with pytest.raises(ApiError, match=r"HTTP 502|Bad Gateway|\[\]|null|7"):
        call(page, lambda api: api.get("/x"))


def test_get_of_a_missing_object_returns_none():
    result, _ = call(rejecting(404, "NotFound"), lambda api: api.get("/x"))
    assert result is None


@pytest.mark.parametrize(
    ("reason", "error"), [("AlreadyExists", AlreadyExists), ("Conflict", Conflict)]
)
def test_409_is_already_exists_or_conflict_by_reason(reason, error):
    with pytest.raises(error):
        call(rejecting(409, reason), lambda api: api.create("/x", {}))


def test_writes_under_way_can_be_awaited():
    async def scenario():
        arrived = asyncio.Event()
        proceed = asyncio.Event()

        async def respond(request):
            if request.method != "GET":
                arrived.set()
                await proceed.wait()
            return web.json_response({})

        async with client_of(respond) as api:
            await api.wait_for_writes()
            writing = asyncio.create_task(api.create("/x", {}))
            await arrived.wait()
            waiting = asyncio.create_task(api.wait_for_writes())
            await api.get("/x")
            assert not waiting.done()
            proceed.set()
            await waiting
            assert writing.done()

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_cancelled_write_counts_until_the_server_has_given_up(monkeypatch):
    monkeypatch.setattr(module, "WRITE_TIMEOUT_SECONDS", 0.3)

    async def scenario():
        arrived = asyncio.Event()

        async def respond(_):
            arrived.set()
            await asyncio.sleep(0.2)
            return web.json_response({})

        async with client_of(respond) as api:
            writing = asyncio.create_task(api.create("/x", {}))
            await arrived.wait()
            writing.cancel()
            began = asyncio.get_running_loop().time()
            await api.wait_for_writes()
            assert asyncio.get_running_loop().time() - began > 0.2

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_429_pauses_for_retry_after_and_not_longer():
    async def scenario():
        rejections = [
            web.json_response(
                {"message": "slow down"}, status=429, headers={"Retry-After": "1"}
            )
        ]

        def respond(_):
            return rejections.pop() if rejections else web.json_response({})

        async with client_of(respond) as api:
            clock = asyncio.get_running_loop().time
            with pytest.raises(ApiError):
                await api.get("/x")
            started = clock()
            await api.get("/x")
            assert 0.9 < clock() - started < 3
            started = clock()
            await asyncio.gather(*(api.get("/x") for _ in range(50)))
            assert clock() - started < 3, "the full rate is back at once"

    asyncio.run(asyncio.wait_for(scenario(), 20))


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("3", 3), ("900", MAX_PAUSE_SECONDS), ("²", 1), ("soon", 1), ("", 1)],
)
def test_pause_is_retry_after_with_a_limit(header, seconds):
    async def scenario():
        async with client_of(rejecting(429, **{"Retry-After": header})) as api:
            started = asyncio.get_running_loop().time()
            with pytest.raises(ApiError):
                await api.get("/x")
            assert api.rate_limiter._paused_until - started == pytest.approx(
                seconds, abs=0.9
            )

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_every_request_names_the_operator_and_its_version():
    agents = []

    def respond(request):
        agents.append(request.headers.get("User-Agent"))
        return web.json_response({"items": [], "metadata": {}})

    async def scenario():
        async with client_of(respond) as api:
            await api.get("/x")
            await api.create("/x", {})
            await api.replace("/x", {})
            await api.patch("/x", {})
            await api.apply("/x", {})
            await api.delete("/x")
            [item async for item in api.list("/x")]
            [event async for event in api.watch("/x", "1", 1)]
            [line async for line in api.stream_lines("/x")]

    asyncio.run(scenario())
    assert len(agents) == 9
    assert set(agents) == {module.USER_AGENT}
    assert module.USER_AGENT == "finetune-operator"


@pytest.mark.parametrize(
    ("seconds", "timeout"), [(15.0, "10s"), (3.7, "3s"), (0.4, "1s")]
)
def test_write_ends_on_the_server_before_the_lease(seconds, timeout):
    queries = []

    def respond(request):
        queries.append(
            (
                request.method,
                request.query.get("timeout"),
                request.query.get("fieldValidation"),
            )
        )
        return web.json_response({})

    async def scenario():
        async with client_of(respond, seconds_to_write=lambda: seconds) as api:
            await api.get("/x")
            await api.create("/x", {})
            await api.delete("/x")

    asyncio.run(scenario())
    assert queries == [
        ("GET", None, None),
        ("POST", timeout, "Strict"),
        ("DELETE", timeout, None),
    ]


def test_write_without_response_ends_with_the_lease():
    async def silent(_):
        await asyncio.sleep(2)
        return web.json_response({})

    async def scenario():
        async with client_of(silent, seconds_to_write=lambda: 0.2) as api:
            started = asyncio.get_running_loop().time()
            with pytest.raises(ApiError, match="does not answer"):
                await api.create("/x", {})
            assert asyncio.get_running_loop().time() - started < 1.5

    asyncio.run(scenario())


def test_deletion_carries_its_preconditions():
    bodies = []

    async def respond(request):
        bodies.append(await request.json())
        return web.json_response({})

    call(
        respond,
        lambda api: api.delete("/x", "Foreground", uid="u", resourceVersion="7"),
    )
    assert bodies[0]["preconditions"] == {"uid": "u", "resourceVersion": "7"}
    assert bodies[0]["propagationPolicy"] == "Foreground"


def test_deletion_of_a_missing_object_succeeds():
    call(rejecting(404, "NotFound"), lambda api: api.delete("/x"))


def test_silent_server_times_out():
    async def silent(_):
        await asyncio.sleep(2)
        return web.json_response({})

    with (
        patch.object(module, "TIMEOUT_SECONDS", 0.2),
        pytest.raises(ApiError, match="does not answer"),
    ):
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
        call(respond, lambda api: api.create("/x", {}), seconds_to_write=lambda: 0.0)
    call(respond, lambda api: api.get("/x"), seconds_to_write=lambda: 0.0)
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
            return [item async for item in api.list("/x")]

    assert asyncio.run(scenario()) == [1, 2, 3]


def test_lease_lost_while_rate_limited_prevents_the_write():
    methods = []
    is_leader = [True]

    def respond(request):
        methods.append(request.method)
        return web.json_response({})

    async def scenario():
        async with client_of(
            respond, seconds_to_write=lambda: 15.0 * is_leader[0]
        ) as api:
            api.rate_limiter.pause(0.3)
            writing = asyncio.create_task(api.create("/x", {}))
            await asyncio.sleep(0.1)
            is_leader[0] = False
            with pytest.raises(NotLeader):
                await writing

    asyncio.run(scenario())
    assert methods == []
