"""HTTP requests to pods, whose responses are not trusted: the server probe and the progress poller."""

import asyncio
import json
import time
from unittest.mock import patch

import aiohttp
import pytest
from aiohttp import web
from support.http_server import serve_http
from support.pods import a_pod, running

from finetune_operator.api.stages.base import Serving
from finetune_operator.core.pipeline import Key
from finetune_operator.kubernetes.pods import probe as probe_module
from finetune_operator.kubernetes.pods import progress as progress_module
from finetune_operator.kubernetes.pods.http import MAX_RESPONSE_BYTES, request
from finetune_operator.kubernetes.pods.probe import ProbeResult, ServerProbe
from finetune_operator.kubernetes.pods.progress import ProgressPoller, metrics_port
from finetune_operator.kubernetes.translate.pod import Pod

A_POD = Pod(a_pod(running(), status={"podIP": "127.0.0.1"}))
SERVING = Serving("transformers", "pvc://models/demo", None, 1, "Hello", 8)


def probe_result(handler) -> ProbeResult | None:
    """Probe a server that has this handler; return the result."""

    async def scenario():
        async with serve_http(handler) as port, aiohttp.ClientSession() as session:
            with patch.multiple(probe_module, PORT=port, PAUSE_SECONDS=0.01):
                return await wait_result(session)

    return asyncio.run(asyncio.wait_for(scenario(), 20))


async def wait_result(session) -> ProbeResult | None:
    """Return the result once the probe has enqueued the pipeline."""
    enqueued = asyncio.Queue()
    probe = ServerProbe(session, enqueued.put_nowait)
    assert probe.result(A_POD, "demo", SERVING) is None
    assert await enqueued.get() == Key("team", "demo")
    return probe.result(A_POD, "demo", SERVING)


def responding(text: str, status: int = 200):
    async def respond(_request):
        return web.Response(text=text, status=status)

    return respond


def test_probe_result_is_the_text_of_the_first_choice():
    assert probe_result(responding('{"choices": [{"text": " scenario"}]}')) == ProbeResult(" scenario")


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

    found = probe_result(respond)
    assert "status 302" in found.failure
    assert "token" not in found.failure


def test_long_response_is_truncated():
    async def scenario():
        async def respond(request):
            response = web.StreamResponse()
            await response.prepare(request)
            for _ in range(100):
                await response.write(b"x" * (MAX_RESPONSE_BYTES // 4))
            return response

        async with serve_http(respond) as port, aiohttp.ClientSession() as session:
            _, content = await request(session, f"http://127.0.0.1:{port}/")
            assert len(content) == MAX_RESPONSE_BYTES

    asyncio.run(asyncio.wait_for(scenario(), 20))


@pytest.mark.parametrize("text", ["[" * 100_000, "null", "{}", "", '{"choices": [{"text": "\\ud800"}]}'])
def test_malformed_response_raises_no_error(text):
    found = probe_result(responding(text))
    assert found.failure or found.text.encode()


async def hang(_request):
    await asyncio.sleep(60)


def test_probe_does_not_block_on_a_slow_server():
    async def scenario():
        async with serve_http(hang) as port, aiohttp.ClientSession() as session:
            with patch.multiple(probe_module, PORT=port):
                probe, started = ServerProbe(session), time.monotonic()
                assert probe.result(A_POD, "demo", SERVING) is None
                assert time.monotonic() - started < 1
                await probe.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))


async def retain_none(probe):
    probe.retain(set())


@pytest.mark.parametrize("end", [retain_none, ServerProbe.close])
def test_probe_is_cancelled_for_dropped_pods_and_on_close(end):
    async def scenario():
        async with serve_http(hang) as port, aiohttp.ClientSession() as session:
            with patch.multiple(probe_module, PORT=port):
                probe = ServerProbe(session)
                probe.result(A_POD, "demo", SERVING)
                [task] = probe.requests.tasks.values()
                await asyncio.sleep(0.1)
                await end(probe)
                await asyncio.wait([task], timeout=5)
                assert task.cancelled()
                assert probe.requests.tasks == {}

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_unreachable_server_fails_after_retries():
    async def scenario():
        async with aiohttp.ClientSession() as session:
            with patch.multiple(probe_module, PORT=1, PAUSE_SECONDS=0.01):
                return await wait_result(session)

    assert "NetworkPolicy" in asyncio.run(asyncio.wait_for(scenario(), 20)).failure


@pytest.mark.parametrize(("text", "port"), [("9000", 9000), ("0", 0), ("²", 0), ("-1", 0), ("", 0)])
def test_invalid_metrics_port_counts_as_none(text, port):
    pod = a_pod(running())
    pod["spec"]["containers"] = [{"name": "stage", "env": [{"name": "FINETUNE_METRICS_PORT", "value": text}]}]
    assert metrics_port(Pod(pod)) == port


def training_pod(port: int, **meta) -> Pod:
    pod = a_pod(running(), status={"podIP": "127.0.0.1"}, **meta)
    env = [{"name": "FINETUNE_METRICS_PORT", "value": str(port)}]
    pod["spec"]["containers"] = [{"name": "stage", "env": env}]
    return Pod(pod)


def progress_json(step: int, **more) -> str:
    return json.dumps({"stage": "train", "updatedAt": "2030-01-01T00:00:00Z", "step": step, **more})


def with_poller(handler, scenario):
    """Run the scenario with a poller, a pod that has this handler, and the queue of enqueued pipelines."""

    async def run():
        async with serve_http(handler) as port, aiohttp.ClientSession() as session:
            enqueued = asyncio.Queue()
            poller = ProgressPoller(session, enqueued.put_nowait)
            try:
                return await scenario(poller, training_pod(port), enqueued)
            finally:
                await poller.close()

    return asyncio.run(asyncio.wait_for(run(), 20))


def test_new_progress_enqueues_the_pipeline():
    async def scenario(poller, pod, enqueued):
        assert poller.latest(pod) is None
        assert await enqueued.get() == Key("team", "demo")
        assert poller.latest(pod).step == 3
        assert poller.latest(Pod(pod.raw, gone=True)).step == 3

    with_poller(responding(progress_json(3)), scenario)


def test_hundred_silent_pods_do_not_block():
    async def scenario(poller, pod, _enqueued):
        started = time.monotonic()
        for number in range(100):
            assert poller.latest(training_pod(metrics_port(pod), uid=f"uid-{number}")) is None
        assert time.monotonic() - started < 1

    with_poller(hang, scenario)


def test_finished_pod_is_not_polled():
    async def scenario(poller, pod, _enqueued):
        poller.latest(pod)
        await asyncio.sleep(0.1)
        assert poller.latest(Pod(pod.raw, gone=True)) is None
        assert poller.requests.tasks == {}

    with_poller(hang, scenario)


@pytest.mark.parametrize(("text", "waits"), [("{}", [15, 15, 30, 60, 60]), (progress_json(3), [15] * 5)])
def test_poll_interval_grows_only_for_silent_pods(text, waits):
    async def scenario(poller, pod, _enqueued):
        found = []
        for _ in waits:
            poller.latest(pod)
            await asyncio.gather(*poller.requests.tasks.values())
            state = poller.states[pod.uid]
            found.append(state.wait)
            state.requested_at -= state.wait
        return found

    assert with_poller(responding(text), scenario) == waits


def test_pod_is_not_polled_before_its_interval():
    requests = []

    async def respond(request):
        requests.append(request)
        return web.Response(text=progress_json(len(requests)))

    async def scenario(poller, pod, enqueued):
        for _ in range(5):
            poller.latest(pod)
            await asyncio.gather(*poller.requests.tasks.values())
        assert enqueued.qsize() == 1

    with_poller(respond, scenario)
    assert len(requests) == 1


def test_unchanged_progress_does_not_enqueue():
    async def scenario(poller, pod, enqueued):
        with patch.object(progress_module, "POLL_SECONDS", 0.0):
            for _ in range(3):
                poller.latest(pod)
                await asyncio.gather(*poller.requests.tasks.values())
        return enqueued.qsize()

    assert with_poller(responding(progress_json(3)), scenario) == 1


@pytest.mark.parametrize(
    "text", [progress_json(3, note="x" * (64 << 10)), "[" * 10_000, "null", progress_json(2**70), ""]
)
def test_invalid_progress_is_none(text):
    async def scenario(poller, pod, _enqueued):
        poller.latest(pod)
        await asyncio.gather(*poller.requests.tasks.values())
        return poller.latest(pod)

    assert with_poller(responding(text), scenario) is None
