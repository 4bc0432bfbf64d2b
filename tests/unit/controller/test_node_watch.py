"""Notices on nodes: which taints count, which pods are asked to save, and how often."""

import asyncio
import json
import logging
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, cast
from unittest.mock import patch

import pytest
from aiohttp import ClientSession, web
from support.http_server import serve_http
from support.operator.fake_api import FakeApi
from support.operator.noticed_nodes import REBALANCE, SPOT_ITN, Object, node
from support.operator.pods import a_pod

from finetune_operator.controller import node_watch, reflector
from finetune_operator.controller.node_watch import NodeWatch
from finetune_operator.kubernetes.pods import progress as progress_module
from finetune_operator.kubernetes.pods import saves as saves_module
from finetune_operator.kubernetes.pods.http import open_session
from finetune_operator.kubernetes.pods.progress import ProgressPoller
from finetune_operator.kubernetes.pods.saves import SaveSender
from finetune_operator.kubernetes.translate.api_errors import ApiError
from finetune_operator.kubernetes.translate.pod import ObservedPod

PATH = "/api/v1/nodes"


def event(kind: str, raw: Object) -> Object:
    return {"type": kind, "object": raw}


def stage_pod(
    port: int, name: str = "one", node_name: str = "spot-1", **meta: Any
) -> ObservedPod:
    started = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    pod = a_pod(
        {"running": {"startedAt": started}},
        status={"podIP": "127.0.0.1"},
        name=name,
        uid=name,
        **meta,
    )
    env = [{"name": "FINETUNE_METRICS_PORT", "value": str(port)}]
    pod["spec"] = {
        "nodeName": node_name,
        "containers": [{"name": "stage", "env": env}],
    }
    return ObservedPod(pod)


# ---- what counts


# ---- requests to save


class Trainers:
    """Stages that answer POST /save, all on one port; pods are told apart by their path only, so each has a server."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.requests: list[tuple[str, str, bytes]] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append((request.method, request.path, await request.read()))
        if request.path == "/progress":
            text = {
                "stage": "train",
                "updatedAt": "2030-01-01T00:00:00Z",
                "step": 7,
                "savedStep": 7,
            }
            return web.Response(text=json.dumps(text))
        return web.Response(
            status=self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        )


@asynccontextmanager
async def watching(api: FakeApi, pods: list[ObservedPod], **settings: Any):
    """Watch the nodes of the API; yield the poller and the sender."""
    with (
        patch.multiple(saves_module, PAUSE_SECONDS=0.01, **settings),
        patch.multiple(reflector, BASE_RETRY_SECONDS=0.01),
        patch.multiple(node_watch, BASE_RETRY_SECONDS=0.01),
    ):
        async with open_session() as session:
            poller = ProgressPoller(session, lambda: pods)
            poller.states = {
                pod.uid: progress_module._PodProgress(1e12, 60.0) for pod in pods
            }
            saves = SaveSender(session, poller.poll_soon)
            task = asyncio.create_task(NodeWatch(api, lambda: pods, saves).run())
            try:
                yield poller, saves
            finally:
                task.cancel()
                await asyncio.wait([task])
                await saves.close()


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  an HTTP server has no event to wait for
            await asyncio.sleep(0.01)


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario(), 20))


def test_taint_asks_each_pod_on_that_node_once():
    async def scenario():
        api = FakeApi()
        here = Trainers(202)
        elsewhere = Trainers(202)
        async with (
            serve_http(here.answer) as port,
            serve_http(elsewhere.answer) as other,
        ):
            pods = [
                stage_pod(port, "one"),
                stage_pod(port, "two"),
                stage_pod(other, "three", "spot-2"),
            ]
            tainted: list[dict[str, Any] | Exception] = [
                event("MODIFIED", node("spot-1", SPOT_ITN, version=number))
                for number in (300, 301)
            ]
            untainted = [
                event("MODIFIED", node("spot-2", version=302)),
                event("MODIFIED", node("spot-1", version=303)),
            ]
            again = [event("MODIFIED", node("spot-1", SPOT_ITN, version=304))]
            api.watches[PATH] = [[*tainted, *untainted, *again]]
            async with watching(api, pods) as (poller, saves):
                await until(lambda: len(api.watched) == 2 and not saves.requests.tasks)
                assert here.requests == [("POST", "/save", b"")] * 2
                assert elsewhere.requests == []
                return {uid: state.wait for uid, state in poller.states.items()}

    waits = run(scenario)
    assert waits == {"one": 5.0, "two": 5.0, "three": 60.0}


def test_later_notice_of_the_same_node_asks_again():
    async def scenario():
        api = FakeApi()
        trainers = Trainers(202)
        async with serve_http(trainers.answer) as port:
            api.watches[PATH] = [
                [event("MODIFIED", node("spot-1", REBALANCE, version=300))],
                [event("MODIFIED", node("spot-1", REBALANCE, SPOT_ITN, version=301))],
            ]
            async with watching(api, [stage_pod(port)]) as (_, saves):
                await until(lambda: len(saves.sent) == 2 and not saves.requests.tasks)
        return saves.sent

    assert run(scenario) == {("one", "spot-1", REBALANCE), ("one", "spot-1", SPOT_ITN)}


def test_first_pod_saves_for_the_nodes_of_all():
    """Only it can save, and the attempt ends with any of its nodes."""

    async def scenario():
        api = FakeApi()
        trainers = Trainers(202)
        others = Trainers(202)
        async with (
            serve_http(trainers.answer) as port,
            serve_http(others.answer) as other,
        ):
            index = {"batch.kubernetes.io/job-completion-index": "1"}
            second = stage_pod(other, "two", "spot-2")
            second.raw["metadata"]["labels"] |= index
            tainted: list[dict[str, Any] | Exception] = [
                event("MODIFIED", node(name, SPOT_ITN, version=300))
                for name in ("spot-2", "spot-1")
            ]
            api.watches[PATH] = [tainted]
            async with watching(api, [stage_pod(port), second]) as (_, saves):
                await until(lambda: len(saves.sent) == 2 and not saves.requests.tasks)
        return saves.sent, others.requests

    assert run(scenario) == (
        {("one", "spot-1", SPOT_ITN), ("one", "spot-2", SPOT_ITN)},
        [],
    )


def test_notice_found_by_the_first_list_counts():
    async def scenario():
        api = FakeApi()
        trainers = Trainers(202)
        api.put(f"{PATH}/spot-1", node("spot-1", "karpenter.sh/disrupted"))
        async with (
            serve_http(trainers.answer) as port,
            watching(api, [stage_pod(port)]),
        ):
            await until(lambda: trainers.requests)
        return trainers.requests

    assert run(scenario) == [("POST", "/save", b"")]


@pytest.mark.parametrize("change", ["finished", "not started", "server", "no port"])
def test_pod_that_cannot_save_is_not_asked(change):
    async def scenario():
        api = FakeApi()
        trainers = Trainers(202)
        async with serve_http(trainers.answer) as port:
            pod = stage_pod(0 if change == "no port" else port)
            if change == "finished":
                pod = ObservedPod(pod.raw, gone=True)
            elif change == "not started":
                pod.raw["status"]["containerStatuses"] = []
            elif change == "server":
                pod.raw["metadata"]["labels"] = {"finetune.dev/server": "one"}
            api.watches[PATH] = [
                [event("MODIFIED", node("spot-1", SPOT_ITN, version=300))]
            ]
            async with watching(api, [pod]) as (_, saves):
                await until(lambda: len(api.watched) == 2)
                assert not saves.sent
        return trainers.requests

    assert run(scenario) == []


@pytest.mark.parametrize(
    ("statuses", "requests"),
    [((503, 500, 202), 3), ((404,), 1), ((405,), 1), ((202,), 1)],
)
def test_refused_request_is_repeated_where_that_may_help(statuses, requests):
    async def scenario():
        trainers = Trainers(*statuses)
        async with serve_http(trainers.answer) as port:
            api = FakeApi()
            pods = [stage_pod(port)]
            api.watches[PATH] = [
                [event("MODIFIED", node("spot-1", SPOT_ITN, version=300))]
            ]
            async with watching(api, pods) as (_, saves):
                await until(lambda: trainers.requests and not saves.requests.tasks)
        return len(trainers.requests)

    assert run(scenario) == requests


def test_mute_pod_is_given_up_with_a_warning(caplog):
    async def scenario():
        api = FakeApi()
        pods = [stage_pod(1)]
        api.watches[PATH] = [[event("MODIFIED", node("spot-1", SPOT_ITN, version=300))]]
        async with watching(api, pods, PATIENCE_SECONDS=0.1) as (_, saves):
            await until(lambda: saves.sent and not saves.requests.tasks)

    with caplog.at_level(logging.INFO):
        run(scenario)
    assert (
        "team/demo: aws-node-termination-handler/spot-itn announces the end of node spot-1"
        in caplog.text
    )
    assert (
        "team/demo: pod one was not asked to save: it answers nothing (" in caplog.text
    )


def test_progress_is_polled_soon_after_the_request():
    async def scenario():
        trainers = Trainers(202)
        async with serve_http(trainers.answer) as port, open_session() as session:
            pod = stage_pod(port)
            poller = ProgressPoller(session, lambda: [pod])
            poller.states = {pod.uid: progress_module._PodProgress(1e12, 60.0)}
            with patch.multiple(progress_module, SCAN_SECONDS=0.01, SAVED_SECONDS=0.05):
                task = asyncio.create_task(poller.run())
                await asyncio.sleep(0)
                poller.states = {pod.uid: progress_module._PodProgress(1e12, 60.0)}
                SaveSender(session, poller.poll_soon).send(pod, SPOT_ITN, pod.node)
                await until(lambda: poller.latest(pod))
                task.cancel()
            progress = poller.latest(pod)
            assert progress
            return progress.saved_step

    assert run(scenario) == 7


# ---- rights


class ForbiddenApi(FakeApi):
    async def pages(self, path, **query):
        self.reads.append(path)
        raise ApiError(
            403,
            'nodes is forbidden: User "operator" cannot list resource "nodes"',
            "Forbidden",
        )
        yield


def test_missing_right_turns_the_watch_off_with_one_line(caplog):
    async def scenario():
        api = ForbiddenApi()
        await NodeWatch(
            api, list, SaveSender(cast(ClientSession, None), lambda _: None)
        ).run()
        return api.reads

    with caplog.at_level(logging.INFO):
        assert run(scenario) == [PATH]
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "nodes are not watched for notices of their end" in caplog.text


class FlakyApi(FakeApi):
    async def pages(self, path, **query):
        if not self.reads:
            self.reads.append(path)
            raise ApiError(503, "busy")
        async for page in super().pages(path, **query):
            yield page


def test_list_that_fails_otherwise_is_retried():
    async def scenario():
        api = FlakyApi()
        trainers = Trainers(202)
        api.put(f"{PATH}/spot-1", node("spot-1", SPOT_ITN))
        async with (
            serve_http(trainers.answer) as port,
            watching(api, [stage_pod(port)]),
        ):
            await until(lambda: trainers.requests)

    run(scenario)
