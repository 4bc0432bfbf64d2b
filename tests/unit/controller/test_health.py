"""/livez, /readyz and /metrics."""

import asyncio
import re
from datetime import UTC, datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import cast

from aiohttp import web
from support.operator.cluster_objects import pipeline_object, pod_of

from finetune_operator.controller import health
from finetune_operator.controller.health import Health
from finetune_operator.controller.informers import Informers
from finetune_operator.controller.leader_election import LeaderElector
from finetune_operator.controller.scope import Scope
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.core.pipeline import Key
from finetune_operator.core.report import unreadable_status
from finetune_operator.kubernetes.cache.cache import (
    PIPELINES,
    PODS,
    SERVICES,
    ResourceCache,
)


def get(
    endpoint,
    *,
    is_leader=True,
    response_age=0.0,
    sync_age=0.0,
    silent="",
    other="",
    phases=(),
    statuses=(),
    services=(),
):
    """Return status and text of an endpoint's response; a sync_age of None: never synced."""

    async def request():
        now = asyncio.get_running_loop().time()
        cache = ResourceCache()
        for number, status in enumerate(
            [*({"phase": phase} for phase in phases), *statuses]
        ):
            cache.update(PIPELINES, pipeline_object(f"p{number}", status=status))
        cache.update(PODS, pod_of())
        for service in services:
            cache.update(SERVICES, service)
        elector = SimpleNamespace(
            is_leader=is_leader, last_response_at=now - response_age
        )
        synced_at = None if sync_age is None else now - sync_age
        queue = WorkQueue()
        queue.add(Key("team", "demo"))
        informers = SimpleNamespace(
            synced_at=synced_at, cache=cache, silent_watch=lambda _seconds: silent
        )
        scope = SimpleNamespace(other=other, is_held=not other)
        health = Health(
            cast(LeaderElector, elector),
            cast(Scope, scope),
            cast(Informers, informers),
            queue,
        )
        response = await getattr(health, endpoint)(None)
        return (
            response.status,
            response.text if response.text is not None else response.body.decode(),
        )

    return asyncio.run(request())


def test_synced_leader_is_ready():
    assert get("readyz") == (200, "leader\n")


def test_leader_beside_another_release_is_not_ready():
    status, text = get("readyz", sync_age=None, other="sys/tuner")
    assert status == 503
    assert text.startswith("another release of the operator, sys/tuner, reconciles")
    assert "finetune_leader 0.0" in get("metrics", other="sys/tuner")[1]


def test_standby_is_ready_without_synced_cache():
    assert get("readyz", is_leader=False, sync_age=None) == (200, "standby\n")


def test_leader_without_synced_cache_is_live_but_not_ready():
    status, text = get("readyz", sync_age=None)
    assert (status, "has not synced" in text) == (503, True)
    assert get("readyz", sync_age=4000.0) == (
        503,
        "the cache was last listed 4000 s ago\n",
    )
    assert get("livez", sync_age=None)[0] == 200


def test_leader_with_a_failing_watch_is_not_ready():
    assert get("readyz", silent="pods") == (
        503,
        "the watch of pods has failed for more than 60 s\n",
    )


def test_standby_without_api_server_is_not_ready():
    status, text = get("readyz", is_leader=False, response_age=100.0)
    assert (status, "API server" in text) == (503, True)


def test_metrics_show_whether_a_replica_is_ready():
    assert "finetune_ready 1.0" in get("metrics")[1]
    assert "finetune_ready 1.0" in get("metrics", is_leader=False, sync_age=None)[1]
    assert "finetune_ready 0.0" in get("metrics", sync_age=None)[1]
    assert "finetune_ready 0.0" in get("metrics", silent="pods")[1]


def test_metrics_count_pipelines_that_cannot_be_read():
    unreadable = unreadable_status("train: no", 1, datetime.now(UTC), "", stalled=True)
    assert (
        "finetune_unreadable_pipelines 1.0"
        in get("metrics", phases=["Failed"], statuses=[unreadable])[1]
    )
    assert "finetune_unreadable_pipelines 0.0" in get("metrics", phases=["Failed"])[1]


def test_metrics_count_pipelines_by_phase():
    _, text = get("metrics", phases=["Running", "Running", "Succeeded"])
    assert 'finetune_pipelines{phase="Running"} 2.0' in text
    assert 'finetune_pipelines{phase="Succeeded"} 1.0' in text
    assert "finetune_leader 1.0" in text
    assert "finetune_queue_depth 1.0" in text
    assert 'phase="Running"' not in get("metrics")[1]


def test_metrics_count_cached_objects_by_kind():
    _, text = get("metrics", phases=["Running", "Succeeded"])
    assert 'finetune_cache_objects{kind="finetunepipelines"} 2.0' in text
    assert 'finetune_cache_objects{kind="pods"} 1.0' in text
    assert 'finetune_cache_objects{kind="jobs"} 0.0' in text


def test_metrics_count_servers_that_are_down():
    """Also of a pipeline that runs again, whose phase does not say so."""
    meta = {
        "namespace": "team",
        "name": "p0-deploy",
        "ownerReferences": [{"uid": "uid-p0"}],
    }
    service = {
        "metadata": meta,
        "spec": {"selector": {"finetune.dev/server": "p0-deploy-a1"}},
    }
    assert (
        "finetune_servers_down 1.0"
        in get("metrics", phases=["Running"], services=[service])[1]
    )
    assert "finetune_servers_down 0.0" in get("metrics", phases=["Running"])[1]


def waiting_status(reason, minutes, state="Queued"):
    since = (datetime.now(UTC) - timedelta(minutes=minutes)).isoformat()
    changed = {"type": "Ready", "status": "False", "lastTransitionTime": since}
    of_stage = {"type": "Trained", "status": "Unknown", "lastTransitionTime": since}
    return {
        "stage": "train",
        "stages": [{"name": "train", "state": state, "reason": reason}],
        "conditions": [changed, of_stage],
    }


def test_metrics_show_how_long_stages_wait_and_why():
    """A reason that this version does not know is shown as an empty label, so that nothing can add series."""
    _, text = get(
        "metrics",
        statuses=[
            waiting_status("WaitingForCapacity", 10),
            waiting_status("WaitingForCapacity", 90),
            waiting_status("Invented", 5),
        ],
    )
    assert (
        'finetune_waiting_stages{reason="WaitingForCapacity",stage="train"} 2.0' in text
    )
    assert 'finetune_waiting_stages{reason="",stage="train"} 1.0' in text
    [oldest] = re.findall(
        r'finetune_waiting_oldest_seconds{reason="WaitingForCapacity",stage="train"} (\S+)',
        text,
    )
    assert 5400 <= float(oldest) < 5460
    assert "finetune_waiting_stages{" not in get("metrics")[1]


def test_metrics_count_stages_whose_node_does_not_answer():
    """Their process has started: how long they have waited is not known."""
    _, text = get("metrics", statuses=[waiting_status("NodeLost", 90, state="Running")])
    assert 'finetune_waiting_stages{reason="NodeLost",stage="train"} 1.0' in text
    assert "finetune_waiting_oldest_seconds{" not in text


def test_idle_connections_are_limited(monkeypatch):
    """Each has a file descriptor, and aiohttp would keep all of them."""
    monkeypatch.setattr(health, "MOST_CONNECTIONS", 8)

    async def serve():
        app = web.Application()
        app.add_routes([web.get("/livez", partial(Health.livez, cast(Health, None)))])
        runner = web.AppRunner(app)
        await runner.setup()
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(health.bounded(runner), "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /livez HTTP/1.0\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 2)
        assert runner.server is not None
        kept = len(runner.server.connections)
        for _, client in clients:
            client.close()
        listener.close()
        await runner.cleanup()
        return answer, kept

    answer, kept = asyncio.run(serve())
    assert answer.startswith(b"HTTP/1.0 200")
    assert kept <= 8
