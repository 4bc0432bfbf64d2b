"""HTTP requests to pods, whose responses are not trusted: the server probe, and limits for each namespace."""

import asyncio
import json
import time
from dataclasses import replace
from unittest.mock import patch

import pytest
from aiohttp import web
from support.http_server import serve_http
from support.operator.pods import a_pod, running

from finetune_operator.api.stages.base import Serving
from finetune_operator.core.pipeline import Key
from finetune_operator.kubernetes.pods import probe as probe_module
from finetune_operator.kubernetes.pods.http import (
    MAX_RESPONSE_BYTES,
    NamespaceLimits,
    open_session,
    request,
)
from finetune_operator.kubernetes.pods.probe import (
    REQUESTS_PER_NAMESPACE,
    ProbeResult,
    ServerProbe,
)
from finetune_operator.kubernetes.translate.pod import ObservedPod

A_POD = ObservedPod(a_pod(running(), status={"podIP": "127.0.0.1"}))
SERVING = Serving("transformers", "pvc://models/demo", None, 1, "Hello", 8)


def probe_result(handler, serving: Serving = SERVING) -> ProbeResult | None:
    """Probe a server that has this handler; return the result."""

    async def scenario():
        async with serve_http(handler) as port, open_session() as session:
            with patch.multiple(probe_module, PORT=port, PAUSE_SECONDS=0.01):
                return await wait_result(session, serving)

    return asyncio.run(asyncio.wait_for(scenario(), 20))


async def wait_result(session, serving: Serving = SERVING) -> ProbeResult | None:
    """Return the result once the probe has enqueued the pipeline."""
    enqueued: asyncio.Queue[Key] = asyncio.Queue()
    probe = ServerProbe(session, enqueued.put_nowait)
    probe.start(A_POD, "demo", serving)
    assert probe.result(A_POD) is None
    assert await enqueued.get() == Key("team", "demo")
    return probe.result(A_POD)


def responding(text: str, status: int = 200):
    async def respond(_request):
        return web.Response(text=text, status=status)

    return respond


def test_probe_result_is_the_text_of_the_first_choice():
    assert probe_result(
        responding('{"choices": [{"text": " scenario"}]}')
    ) == ProbeResult(" scenario")


def answering(message: dict[str, object]):
    """Return a handler that answers conversations of one message, and refuses other requests."""

    async def respond(request):
        body = await request.json()
        if request.path != "/v1/chat/completions" or "prompt" in body:
            return web.Response(status=404)
        assert body["messages"] == [{"role": "user", "content": SERVING.prompt}]
        return web.json_response({"choices": [{"message": message}]})

    return respond


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": "Yes."}, "Yes."),
        ({"content": None, "reasoning_content": "Let me see"}, "Let me see"),
        ({"content": "", "tool_calls": [{"id": "1"}]}, '[{"id": "1"}]'),
    ],
)
def test_conversations_are_asked_with_a_message(message, text):
    serving = replace(SERVING, conversations=True)
    assert probe_result(answering(message), serving) == ProbeResult(text)


@pytest.mark.parametrize(
    ("text", "expect", "failure"),
    [
        (" \n", None, "the model answered 'Hello' with no text"),
        ("No.", "Yes", "the answer 'No.' does not contain 'Yes'"),
        ("x" * 5000 + "Yes", "Yes", ""),
    ],
)
def test_answer_that_proves_nothing_is_a_permanent_failure(text, expect, failure):
    response = json.dumps({"choices": [{"text": text}]})
    actual = probe_result(responding(response), replace(SERVING, expect=expect))
    assert actual
    assert failure in actual.failure
    assert actual.is_permanent == bool(failure)


def test_response_in_chunks_is_joined():
    async def respond(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in ('{"choices": [{"te', 'xt": " scenario"}]}'):
            await response.write(piece.encode())
            await asyncio.sleep(0.05)
        return response

    assert probe_result(respond) == ProbeResult(" scenario")


def test_redirect_is_not_followed():
    async def respond(request):
        if request.path == "/secret":
            return web.Response(text="token=1")
        raise web.HTTPFound("/secret")

    actual = probe_result(respond)
    assert actual
    assert "status 302" in actual.failure
    assert "token" not in actual.failure


def test_long_response_is_truncated():
    async def scenario():
        async def respond(request):
            response = web.StreamResponse()
            await response.prepare(request)
            for _ in range(100):
                await response.write(b"x" * (MAX_RESPONSE_BYTES // 4))
            return response

        async with serve_http(respond) as port, open_session() as session:
            _, content = await request(session, f"http://127.0.0.1:{port}/")
            assert len(content) == MAX_RESPONSE_BYTES

    asyncio.run(asyncio.wait_for(scenario(), 20))


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "null", "{}", "", '{"choices": [{"text": "\\ud800"}]}']
)
def test_malformed_response_raises_no_error(text):
    actual = probe_result(responding(text))
    assert actual
    assert actual.failure or actual.text.encode()


async def hang(_request):
    await asyncio.sleep(60)


def test_probe_does_not_block_on_a_slow_server():
    async def scenario():
        async with serve_http(hang) as port, open_session() as session:
            with patch.multiple(probe_module, PORT=port):
                probe = ServerProbe(session)
                started = time.monotonic()
                probe.start(A_POD, "demo", SERVING)
                assert time.monotonic() - started < 1
                await probe.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))


async def retain_none(probe):
    probe.retain(set())


@pytest.mark.parametrize("end", [retain_none, ServerProbe.close])
def test_probe_is_cancelled_for_dropped_pods_and_on_close(end):
    async def scenario():
        async with serve_http(hang) as port, open_session() as session:
            with patch.multiple(probe_module, PORT=port):
                probe = ServerProbe(session)
                probe.start(A_POD, "demo", SERVING)
                [task] = probe.requests.tasks.values()
                await asyncio.sleep(0.1)
                await end(probe)
                await asyncio.wait([task], timeout=5)
                assert task.cancelled()
                assert probe.requests.tasks == {}

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_unreachable_server_fails_after_retries():
    async def scenario():
        async with open_session() as session:
            with patch.multiple(probe_module, PORT=1, PAUSE_SECONDS=0.01):
                return await wait_result(session)

    assert "NetworkPolicy" in asyncio.run(asyncio.wait_for(scenario(), 20)).failure


def test_reading_the_result_starts_no_probe():
    async def scenario():
        async with open_session() as session:
            probe = ServerProbe(session)
            assert probe.result(A_POD) is None
            assert probe.requests.tasks == {}

    asyncio.run(scenario())


def test_server_is_probed_once():
    requests = []

    async def respond(request):
        requests.append(request)
        return web.Response(text='{"choices": [{"text": "one"}]}')

    async def scenario():
        async with serve_http(respond) as port, open_session() as session:
            with patch.multiple(probe_module, PORT=port):
                enqueued: asyncio.Queue[Key] = asyncio.Queue()
                probe = ServerProbe(session, enqueued.put_nowait)
                for _ in range(3):
                    probe.start(A_POD, "demo", SERVING)
                await enqueued.get()
                await asyncio.sleep(0.05)
                probe.start(A_POD, "demo", SERVING)
                assert probe.requests.tasks == {}

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert len(requests) == 1


def test_mute_server_fails_after_its_patience():
    async def scenario():
        async with serve_http(hang) as port, open_session() as session:
            with patch.multiple(
                probe_module, PORT=port, FIRST_TOKEN_SECONDS=0.1, TOKEN_SECONDS=0.01
            ):
                return await wait_result(session)

    actual = asyncio.run(asyncio.wait_for(scenario(), 20))
    assert actual == ProbeResult(
        failure="the server did not answer the prompt within 0 s"
    )


def test_patience_grows_with_the_length_of_the_answer():
    lengths = (1, 32, 4096)
    assert [
        round(probe_module.patience_seconds(replace(SERVING, max_tokens=length)))
        for length in lengths
    ] == [
        120,
        123,
        530,
    ]


def server_pod(namespace: str, uid: str) -> ObservedPod:
    return ObservedPod(
        a_pod(running(), status={"podIP": "127.0.0.1"}, namespace=namespace, uid=uid)
    )


@pytest.mark.parametrize(
    ("namespaces", "requests"), [(1, REQUESTS_PER_NAMESPACE), (50, 100)]
)
def test_hundred_mute_servers_do_not_delay_another_namespace(namespaces, requests):
    waiting = 0
    peak = 0

    async def respond(request):
        nonlocal waiting, peak
        if (await request.json())["model"] == "mute":
            waiting += 1
            peak = max(peak, waiting)
            try:
                await asyncio.sleep(60)
            finally:
                waiting -= 1
        return web.Response(text='{"choices": [{"text": "healthy"}]}')

    async def scenario():
        async with serve_http(respond) as port, open_session() as session:
            with patch.multiple(probe_module, PORT=port):
                enqueued: asyncio.Queue[Key] = asyncio.Queue()
                probe = ServerProbe(session, enqueued.put_nowait)
                for number in range(100):
                    probe.start(
                        server_pod(f"mute-{number % namespaces}", f"uid-{number}"),
                        "mute",
                        SERVING,
                    )
                while waiting < requests:  # noqa: ASYNC110  an HTTP server has no event to wait for
                    await asyncio.sleep(0.01)
                healthy = server_pod("team", "healthy")
                probe.start(healthy, "demo", SERVING)
                await asyncio.wait_for(enqueued.get(), 2)
                assert probe.result(healthy) == ProbeResult("healthy")
                assert set(probe.requests.limits.limits) == {
                    f"mute-{number}" for number in range(namespaces)
                }
                await probe.close()
                assert probe.requests.tasks == {}
                assert probe.requests.limits.limits == {}

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert peak == requests


@pytest.mark.parametrize("cancelled", [False, True])
def test_limit_of_a_namespace_without_requests_is_dropped(cancelled):
    async def scenario():
        limits = NamespaceLimits(2)
        release = asyncio.Event()

        async def use(namespace):
            async with limits.slot(namespace):
                await release.wait()

        tasks = [
            asyncio.create_task(use(namespace)) for namespace in ("a", "a", "a", "b")
        ]
        await asyncio.sleep(0)
        assert {name: limit.users for name, limit in limits.limits.items()} == {
            "a": 3,
            "b": 1,
        }
        release.set()
        for task in tasks:
            if cancelled:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert limits.limits == {}

    asyncio.run(scenario())
