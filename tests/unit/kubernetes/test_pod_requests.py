"""Pods are asked over HTTP, and what they say is not ours to trust."""

import asyncio
import json
import time
from unittest.mock import patch

import aiohttp
import pytest
from aiohttp import web
from support.http_server import answering
from support.pods import a_pod, running

from finetune_operator.api.stages.base import Serving
from finetune_operator.core.pipeline import Key
from finetune_operator.kubernetes.pods import probe as module
from finetune_operator.kubernetes.pods import progress as pages_module
from finetune_operator.kubernetes.pods.http import MAX_RESPONSE_BYTES, request
from finetune_operator.kubernetes.pods.probe import ProbeResult, ServerProbe
from finetune_operator.kubernetes.pods.progress import ProgressPoller, metrics_port
from finetune_operator.kubernetes.translate.pod import Pod

A_POD = Pod(a_pod(running(), status={"podIP": "127.0.0.1"}))
SERVING = Serving("transformers", "pvc://models/demo", None, 1, "Hello", 8)


def answer_of(answers) -> ProbeResult | None:
    """Ask a server for its first answer."""

    async def story():
        async with answering(answers) as port, aiohttp.ClientSession() as session:
            with patch.multiple(module, PORT=port, PAUSE_SECONDS=0.01):
                return await settled(session)

    return asyncio.run(asyncio.wait_for(story(), 20))


async def settled(session) -> ProbeResult | None:
    """Give what is known when somebody has been told to look again."""
    told = asyncio.Queue()
    asked = ServerProbe(session, told.put_nowait)
    assert asked.result(A_POD, "demo", SERVING) is None
    assert await told.get() == Key("team", "demo")
    return asked.result(A_POD, "demo", SERVING)


def saying(text: str, status: int = 200):
    async def answers(_request):
        return web.Response(text=text, status=status)

    return answers


def test_what_it_says_is_the_answer():
    assert answer_of(saying('{"choices": [{"text": " scenario"}]}')) == ProbeResult(" scenario")


def test_an_answer_in_pieces_is_put_together():
    async def answers(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in ('{"choices": [{"te', 'xt": " scenario"}]}'):
            await response.write(piece.encode())
            await asyncio.sleep(0.05)
        return response

    assert answer_of(answers) == ProbeResult(" scenario")


def test_it_cannot_send_the_operator_elsewhere():
    async def answers(request):
        if request.path == "/secret":
            return web.Response(text="token=1")
        raise web.HTTPFound("/secret")

    found = answer_of(answers)
    assert "status 302" in found.failure
    assert "token" not in found.failure


def test_an_endless_answer_is_cut():
    async def story():
        async def answers(request):
            response = web.StreamResponse()
            await response.prepare(request)
            for _ in range(100):
                await response.write(b"x" * (MAX_RESPONSE_BYTES // 4))
            return response

        async with answering(answers) as port, aiohttp.ClientSession() as session:
            _, content = await request(session, f"http://127.0.0.1:{port}/")
            assert len(content) == MAX_RESPONSE_BYTES

    asyncio.run(asyncio.wait_for(story(), 20))


@pytest.mark.parametrize("text", ["[" * 100_000, "null", "{}", "", '{"choices": [{"text": "\\ud800"}]}'])
def test_nonsense_is_a_failure_or_text_and_never_an_error(text):
    found = answer_of(saying(text))
    assert found.failure or found.text.encode()


async def never(_request):
    await asyncio.sleep(60)


def test_a_look_does_not_wait_for_a_server_that_thinks():
    async def story():
        async with answering(never) as port, aiohttp.ClientSession() as session:
            with patch.multiple(module, PORT=port):
                asked, began = ServerProbe(session), time.monotonic()
                assert asked.result(A_POD, "demo", SERVING) is None
                assert time.monotonic() - began < 1
                await asked.close()

    asyncio.run(asyncio.wait_for(story(), 20))


async def forgotten(asked):
    asked.retain(set())


@pytest.mark.parametrize("end", [forgotten, ServerProbe.close])
def test_nobody_asks_on_behalf_of_a_pod_that_is_forgotten_or_of_an_operator_that_ends(end):
    async def story():
        async with answering(never) as port, aiohttp.ClientSession() as session:
            with patch.multiple(module, PORT=port):
                asked = ServerProbe(session)
                asked.result(A_POD, "demo", SERVING)
                [task] = asked.requests.tasks.values()
                await asyncio.sleep(0.1)
                await end(asked)
                await asyncio.wait([task], timeout=5)
                assert task.cancelled()
                assert asked.requests.tasks == {}

    asyncio.run(asyncio.wait_for(story(), 20))


def test_nobody_there_is_said_after_some_tries():
    async def story():
        async with aiohttp.ClientSession() as session:
            with patch.multiple(module, PORT=1, PAUSE_SECONDS=0.01):
                return await settled(session)

    assert "NetworkPolicy" in asyncio.run(asyncio.wait_for(story(), 20)).failure


@pytest.mark.parametrize(("text", "port"), [("9000", 9000), ("0", 0), ("²", 0), ("-1", 0), ("", 0)])
def test_only_a_port_is_a_port(text, port):
    pod = a_pod(running())
    pod["spec"]["containers"] = [{"name": "stage", "env": [{"name": "FINETUNE_METRICS_PORT", "value": text}]}]
    assert metrics_port(Pod(pod)) == port


def training(port: int, **meta) -> Pod:
    pod = a_pod(running(), status={"podIP": "127.0.0.1"}, **meta)
    env = [{"name": "FINETUNE_METRICS_PORT", "value": str(port)}]
    pod["spec"]["containers"] = [{"name": "stage", "env": env}]
    return Pod(pod)


def at(step: int, **more) -> str:
    return json.dumps({"stage": "train", "updatedAt": "2030-01-01T00:00:00Z", "step": step, **more})


def with_pages(answers, story):
    """Let a story happen to the pages of one pod, with what tells of news."""

    async def whole():
        async with answering(answers) as port, aiohttp.ClientSession() as session:
            told = asyncio.Queue()
            pages = ProgressPoller(session, told.put_nowait)
            try:
                return await story(pages, training(port), told)
            finally:
                await pages.close()

    return asyncio.run(asyncio.wait_for(whole(), 20))


def test_what_a_pod_says_of_its_progress_is_there_for_the_look_that_follows_the_news():
    async def story(pages, pod, told):
        assert pages.latest(pod) is None
        assert await told.get() == Key("team", "demo")
        assert pages.latest(pod).step == 3
        assert pages.latest(Pod(pod.raw, gone=True)).step == 3

    with_pages(saying(at(3)), story)


def test_a_hundred_pods_that_do_not_answer_keep_no_look_waiting():
    async def story(pages, pod, _told):
        began = time.monotonic()
        for number in range(100):
            assert pages.latest(training(metrics_port(pod), uid=f"uid-{number}")) is None
        assert time.monotonic() - began < 1

    with_pages(never, story)


def test_a_pod_that_is_over_is_asked_no_more():
    async def story(pages, pod, _told):
        pages.latest(pod)
        await asyncio.sleep(0.1)
        assert pages.latest(Pod(pod.raw, gone=True)) is None
        assert pages.requests.tasks == {}

    with_pages(never, story)


@pytest.mark.parametrize(("answer", "waits"), [("{}", [15, 15, 30, 60, 60]), (at(3), [15] * 5)])
def test_a_pod_that_never_answers_is_asked_less_and_less_often(answer, waits):
    async def story(pages, pod, _told):
        found = []
        for _ in waits:
            pages.latest(pod)
            await asyncio.gather(*pages.requests.tasks.values())
            page = pages.pages[pod.uid]
            found.append(page.wait)
            page.requested_at -= page.wait
        return found

    assert with_pages(saying(answer), story) == waits


def test_a_pod_is_not_asked_again_before_its_time():
    asked = []

    async def answers(_request):
        asked.append(1)
        return web.Response(text=at(len(asked)))

    async def story(pages, pod, told):
        for _ in range(5):
            pages.latest(pod)
            await asyncio.gather(*pages.requests.tasks.values())
        assert told.qsize() == 1

    with_pages(answers, story)
    assert len(asked) == 1


def test_the_same_words_again_are_no_news():
    async def story(pages, pod, told):
        with patch.object(pages_module, "POLL_SECONDS", 0.0):
            for _ in range(3):
                pages.latest(pod)
                await asyncio.gather(*pages.requests.tasks.values())
        return told.qsize()

    assert with_pages(saying(at(3)), story) == 1


@pytest.mark.parametrize("text", [at(3, note="x" * (64 << 10)), "[" * 10_000, "null", at(2**70), ""])
def test_what_is_too_long_or_no_progress_is_none(text):
    async def story(pages, pod, _told):
        pages.latest(pod)
        await asyncio.gather(*pages.requests.tasks.values())
        return pages.latest(pod)

    assert with_pages(saying(text), story) is None
