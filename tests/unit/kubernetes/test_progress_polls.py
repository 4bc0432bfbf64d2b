"""The progress poller: how often it polls which pods, and what it believes of their responses."""

import asyncio
import json
import math
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from aiohttp import web
from support.http_server import serve_http
from support.operator.pods import a_pod, running

from finetune_operator.core.pipeline import Key
from finetune_operator.kubernetes.pods import progress as progress_module
from finetune_operator.kubernetes.pods.http import open_session
from finetune_operator.kubernetes.pods.progress import (
    REQUESTS_PER_NAMESPACE,
    ProgressPoller,
    metrics_port,
)
from finetune_operator.kubernetes.translate.pod import ObservedPod
from finetune_trainer.contract import Progress


@pytest.mark.parametrize(
    ("text", "port"), [("9000", 9000), ("0", 0), ("²", 0), ("-1", 0), ("", 0)]
)
def test_invalid_metrics_port_counts_as_none(text, port):
    pod = a_pod(running())
    pod["spec"]["containers"] = [
        {
            "name": "stage",
            "env": [{"name": "FINETUNE_METRICS_PORT", "value": text}],
        }
    ]
    assert metrics_port(ObservedPod(pod)) == port


def training_pod(port: int, started_at: datetime | None = None, **meta) -> ObservedPod:
    """Return a pod whose process serves its progress on this port, and has just started by default."""
    started = (
        (started_at or datetime.now(UTC))
        .isoformat(timespec="seconds")
        .replace("+00:00", "Z")
    )
    pod = a_pod(
        {"running": {"startedAt": started}}, status={"podIP": "127.0.0.1"}, **meta
    )
    env = [{"name": "FINETUNE_METRICS_PORT", "value": str(port)}]
    pod["spec"]["containers"] = [{"name": "stage", "env": env}]
    return ObservedPod(pod)


def progress_json(step: int, **more) -> str:
    return json.dumps(
        {"stage": "train", "updatedAt": "2030-01-01T00:00:00Z", "step": step, **more}
    )


def responding(text: str):
    async def respond(_request):
        return web.Response(text=text)

    return respond


async def hang(_request):
    await asyncio.sleep(60)


async def until(condition) -> None:
    """Wait until the condition holds; the caller limits the time."""
    while not condition():  # noqa: ASYNC110  an HTTP server has no event to wait for
        await asyncio.sleep(0.01)


def due_at_once(_started_at) -> progress_module._PodProgress:
    return progress_module._PodProgress(-math.inf, progress_module.FIRST_POLL_SECONDS)


def with_poller(handler, scenario, **settings):
    """Run the scenario with a running poller, its list of pods, and the queue of enqueued pipelines.

    The list has one pod, whose process has this handler and is polled at once.
    """

    async def run():
        async with serve_http(handler) as port, open_session() as session:
            enqueued: asyncio.Queue[Key] = asyncio.Queue()
            pods = [training_pod(port)]
            poller = ProgressPoller(session, lambda: pods, enqueued.put_nowait)
            with patch.multiple(
                progress_module, SCAN_SECONDS=0.01, _schedule=due_at_once, **settings
            ):
                running_task = asyncio.create_task(poller.run())
                try:
                    return await scenario(poller, pods, enqueued)
                finally:
                    running_task.cancel()
                    await poller.close()

    return asyncio.run(asyncio.wait_for(run(), 20))


async def poll_again(poller, pod) -> None:
    """Make the pod due and wait until it has been polled."""
    poller.states[pod.uid].due_at = -math.inf
    await until(lambda: poller.states[pod.uid].due_at > 0 and not poller.requests.tasks)


def test_new_progress_enqueues_the_pipeline():
    async def scenario(poller, pods, enqueued):
        assert await enqueued.get() == Key("team", "demo")
        assert poller.latest(pods[0]).step == 3
        assert poller.latest(ObservedPod(pods[0].raw, gone=True)).step == 3
        assert poller.latest(None) is None

    with_poller(responding(progress_json(3)), scenario)


def test_only_the_first_of_several_pods_is_polled():
    async def scenario(poller, pods, _enqueued):
        await until(lambda: poller.latest(pods[0]))
        second = training_pod(1, name="second", uid="second")
        second.raw["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] = (
            "1"
        )
        pods.append(second)
        await asyncio.sleep(0.1)  # ten looks
        assert list(poller.states) == [pods[0].uid]

    with_poller(responding(progress_json(3)), scenario)


def test_reading_progress_starts_no_request():
    async def scenario():
        async with open_session() as session:
            poller = ProgressPoller(session, list)
            pod = training_pod(1)
            assert poller.latest(pod) is None
            assert poller.states == {}
            assert poller.requests.tasks == {}

    asyncio.run(scenario())


@pytest.mark.parametrize("change", ["finished", "without address", "not started"])
def test_pod_that_cannot_answer_is_not_polled(change):
    pod = training_pod(1)
    if change == "without address":
        del pod.raw["status"]["podIP"]
    elif change == "not started":
        pod = ObservedPod(a_pod({"waiting": {}}, status={"podIP": "127.0.0.1"}))
    else:
        pod = ObservedPod(pod.raw, gone=True)

    async def scenario():
        async with open_session() as session:
            poller = ProgressPoller(session, lambda: [pod])
            with patch.object(progress_module, "_schedule", due_at_once):
                poller.poll_due_pods()
            return poller.states, poller.requests.tasks

    assert asyncio.run(scenario()) == ({}, {})


def test_request_to_a_pod_that_finishes_is_cancelled():
    async def scenario(poller, pods, _enqueued):
        await until(lambda: poller.requests.tasks)
        pods[0] = ObservedPod(pods[0].raw, gone=True)
        await until(lambda: not poller.requests.tasks)
        return poller.latest(pods[0])

    assert with_poller(hang, scenario, PROGRESS_TIMEOUT_SECONDS=60.0) is None


def test_progress_of_a_pod_that_no_longer_exists_is_dropped():
    async def scenario(poller, pods, enqueued):
        await enqueued.get()
        pods.clear()
        await until(lambda: not poller.states)

    with_poller(responding(progress_json(3)), scenario)


def test_cancelled_poller_has_no_request_in_flight():
    async def scenario():
        async with serve_http(hang) as port, open_session() as session:
            poller = ProgressPoller(session, lambda: [training_pod(port)])
            with patch.multiple(
                progress_module, _schedule=due_at_once, PROGRESS_TIMEOUT_SECONDS=60.0
            ):
                task = asyncio.create_task(poller.run())
                await until(lambda: poller.requests.tasks)
                task.cancel()
                await asyncio.wait([task])
                assert poller.requests.tasks == {}

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_wait_doubles_up_to_a_minute():
    async def scenario(poller, pods, enqueued):
        await enqueued.get()
        actual = []
        for _ in range(5):
            await poll_again(poller, pods[0])
            actual.append(poller.states[pods[0].uid].wait)
        return actual

    assert with_poller(responding(progress_json(3)), scenario) == [20, 40, 60, 60, 60]


def test_progress_with_only_a_newer_time_does_not_enqueue():
    polls = 0

    async def respond(_request):
        nonlocal polls
        polls += 1
        return web.Response(
            text=progress_json(3, updatedAt=f"2030-01-01T00:00:{polls:02}Z")
        )

    async def scenario(poller, pods, enqueued):
        await enqueued.get()
        for _ in range(3):
            await poll_again(poller, pods[0])
        assert poller.latest(pods[0]).updated_at.second == polls
        return enqueued.qsize()

    assert with_poller(respond, scenario) == 0
    assert polls == 4


def test_each_new_step_enqueues_once():
    polls = 0

    async def respond(_request):
        nonlocal polls
        polls += 1
        return web.Response(text=progress_json(polls))

    async def scenario(poller, pods, enqueued):
        await enqueued.get()
        for _ in range(3):
            await poll_again(poller, pods[0])
        return enqueued.qsize()

    assert with_poller(respond, scenario) == 3


def test_unanswered_poll_keeps_the_last_progress():
    texts = [progress_json(3), "nonsense"]

    async def respond(_request):
        return web.Response(text=texts.pop(0))

    async def scenario(poller, pods, enqueued):
        await enqueued.get()
        await poll_again(poller, pods[0])
        return poller.latest(pods[0]).step, enqueued.qsize()

    assert with_poller(respond, scenario) == (3, 0)


@pytest.mark.parametrize(
    "text",
    [
        progress_json(3, note="x" * (64 << 10)),
        "[" * 10_000,
        "null",
        progress_json(2**70),
        "",
    ],
)
def test_invalid_progress_is_none(text):
    async def scenario(poller, pods, enqueued):
        await until(lambda: poller.states)
        await until(lambda: not poller.requests.tasks)
        return poller.latest(pods[0]), enqueued.qsize()

    assert with_poller(responding(text), scenario) == (None, 0)


def test_hundred_mute_pods_do_not_delay_another_namespace():
    waiting = 0
    peak = 0

    async def mute(_request):
        nonlocal waiting, peak
        waiting += 1
        peak = max(peak, waiting)
        try:
            await asyncio.sleep(60)
        finally:
            waiting -= 1

    async def scenario(poller, pods, enqueued):
        await enqueued.get()
        healthy = training_pod(metrics_port(pods[0]), uid="healthy")
        async with serve_http(mute) as port:
            pods[:] = [
                training_pod(port, namespace="mute", uid=f"uid-{number}")
                for number in range(100)
            ]
            await until(lambda: waiting == REQUESTS_PER_NAMESPACE)
            pods.append(healthy)
            assert await asyncio.wait_for(enqueued.get(), 2) == Key("team", "demo")
            assert poller.latest(healthy).step == 3
            assert set(poller.requests.limits.limits) == {"mute"}
            await poller.close()
            assert poller.requests.limits.limits == {}

    with_poller(responding(progress_json(3)), scenario, PROGRESS_TIMEOUT_SECONDS=60.0)
    assert peak == REQUESTS_PER_NAMESPACE


def request_times(pods: list[ObservedPod], seconds: int) -> list[float]:
    """Return the times of the requests to pods that answer at once, on a clock that starts with 0."""
    now = 0.0
    times = []

    async def answer(_pod):
        times.append(now)
        return Progress.model_validate_json(progress_json(len(times), startStep=0))

    async def scenario():
        nonlocal now
        async with open_session() as session:
            poller = ProgressPoller(session, lambda: pods)
            poller._read = answer
            while now < seconds:
                poller.poll_due_pods()
                await asyncio.gather(*poller.requests.tasks.values())
                now += progress_module.SCAN_SECONDS

    with patch.object(progress_module, "time", SimpleNamespace(monotonic=lambda: now)):
        asyncio.run(asyncio.wait_for(scenario(), 60))
    return times


def test_five_hundred_pods_cost_less_than_nine_requests_a_second():
    long_ago = datetime.now(UTC) - timedelta(hours=1)
    times = request_times(
        [training_pod(1, long_ago, uid=f"uid-{number}") for number in range(500)], 300
    )
    for minute in range(5):
        in_minute = [time for time in times if minute * 60 <= time < (minute + 1) * 60]
        assert 350 < len(in_minute) < 9 * 60
    for start in range(
        0, 300, 10
    ):  # a replica that has just become the leader spreads its first requests, too
        assert len([time for time in times if start <= time < start + 10]) < 200


def test_new_pod_is_polled_soon_and_then_once_a_minute():
    times = request_times([training_pod(1)], 300)
    waits = [later - earlier for earlier, later in pairwise([0, *times])]
    for wait, least in zip(waits, [5, 5, 10, 20, 40, 60, 60, 60], strict=False):
        assert least <= wait <= 1.2 * least + 2 * progress_module.SCAN_SECONDS
    assert len(waits) >= 7
