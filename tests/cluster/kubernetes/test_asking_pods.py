"""Pods are asked over HTTP, and what they say is not ours to trust."""

import asyncio
from unittest.mock import patch

import aiohttp
import pytest
from aiohttp import web
from support.pages import answering
from support.pods import a_pod, running

from finetune_operator.cluster.kubernetes import answers as module
from finetune_operator.cluster.kubernetes.answers import Answer, Answers
from finetune_operator.cluster.kubernetes.asking import LARGEST, ask
from finetune_operator.cluster.kubernetes.pod import Pod
from finetune_operator.cluster.kubernetes.progress import port_of
from finetune_operator.stages.base import Serving

SERVING = Serving("transformers", "pvc://models/demo", None, 1, "Hello", 8)


def answer_of(answers) -> Answer | None:
    """Ask a server for its first answer."""

    async def story():
        async with answering(answers) as port, aiohttp.ClientSession() as session:
            with patch.multiple(module, PORT=port, PAUSE_SECONDS=0.01):
                pod = a_pod(running(), status={"podIP": "127.0.0.1"})
                return await Answers(session).of(Pod(pod), "demo", SERVING)

    return asyncio.run(asyncio.wait_for(story(), 20))


def saying(text: str, status: int = 200):
    async def answers(_request):
        return web.Response(text=text, status=status)

    return answers


def test_what_it_says_is_the_answer():
    assert answer_of(saying('{"choices": [{"text": " world"}]}')) == Answer(" world")


def test_an_answer_in_pieces_is_put_together():
    async def answers(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in ('{"choices": [{"te', 'xt": " world"}]}'):
            await response.write(piece.encode())
            await asyncio.sleep(0.05)
        return response

    assert answer_of(answers) == Answer(" world")


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
                await response.write(b"x" * (LARGEST // 4))
            return response

        async with answering(answers) as port, aiohttp.ClientSession() as session:
            _, content = await ask(session, f"http://127.0.0.1:{port}/")
            assert len(content) == LARGEST

    asyncio.run(asyncio.wait_for(story(), 20))


@pytest.mark.parametrize("text", ["[" * 100_000, "null", "{}", "", '{"choices": [{"text": "\\ud800"}]}'])
def test_nonsense_is_a_failure_or_text_and_never_an_error(text):
    found = answer_of(saying(text))
    assert found.failure or found.text.encode()


def test_one_that_thinks_is_looked_at_again():
    async def story():
        async def answers(_request):
            await asyncio.sleep(0.3)
            return web.json_response({"choices": [{"text": " world"}]})

        async with answering(answers) as port, aiohttp.ClientSession() as session:
            with patch.multiple(module, PORT=port, LOOK_SECONDS=0.05):
                asked, pod = Answers(session), Pod(a_pod(running(), status={"podIP": "127.0.0.1"}))
                assert await asked.of(pod, "demo", SERVING) is None
                await asyncio.sleep(0.5)
                assert await asked.of(pod, "demo", SERVING) == Answer(" world")

    asyncio.run(asyncio.wait_for(story(), 20))


def test_whoever_waits_for_a_pod_that_is_forgotten_goes_on():
    async def story():
        async def answers(_request):
            await asyncio.sleep(5)

        async with answering(answers) as port, aiohttp.ClientSession() as session:
            with patch.multiple(module, PORT=port):
                asked, pod = Answers(session), Pod(a_pod(running(), status={"podIP": "127.0.0.1"}))
                waiting = asyncio.create_task(asked.of(pod, "demo", SERVING))
                await asyncio.sleep(0.1)
                asked.forget_all_but(set())
                assert await waiting is None

    asyncio.run(asyncio.wait_for(story(), 20))


def test_nobody_there_is_said_after_some_tries():
    async def story():
        async with aiohttp.ClientSession() as session:
            with patch.multiple(module, PORT=1, PAUSE_SECONDS=0.01):
                pod = Pod(a_pod(running(), status={"podIP": "127.0.0.1"}))
                return await Answers(session).of(pod, "demo", SERVING)

    assert "NetworkPolicy" in asyncio.run(asyncio.wait_for(story(), 20)).failure


@pytest.mark.parametrize(("text", "port"), [("9000", 9000), ("0", 0), ("²", 0), ("-1", 0), ("", 0)])
def test_only_a_port_is_a_port(text, port):
    pod = a_pod(running())
    pod["spec"]["containers"] = [{"name": "stage", "env": [{"name": "FINETUNE_METRICS_PORT", "value": text}]}]
    assert port_of(Pod(pod)) == port
