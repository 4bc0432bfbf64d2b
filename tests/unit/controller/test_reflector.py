"""A reflector: pages of a list, versions of a watch, and objects that cannot be read."""

import asyncio
from typing import Any
from unittest.mock import patch

import pytest
from support.operator.cluster_objects import (
    job_of,
    pipeline_object,
    pod_of,
    running_status,
)
from support.operator.fake_api import FakeApi
from support.operator.pods import running

from finetune_operator.controller import reflector as module
from finetune_operator.controller.informers import UNFINISHED_JOBS
from finetune_operator.controller.reflector import Reflector, Resource, watch_seconds
from finetune_operator.core.pipeline import Key
from finetune_operator.errors import ClusterError
from finetune_operator.kubernetes.cache.cache import (
    EVENTS,
    JOBS,
    PIPELINES,
    PODS,
    ResourceCache,
)
from finetune_operator.kubernetes.cache.change import Urgency
from finetune_operator.kubernetes.translate.api_errors import ApiError

PATHS = {
    JOBS: "/apis/batch/v1/namespaces/team/jobs",
    PODS: "/api/v1/namespaces/team/pods",
    EVENTS: "/api/v1/namespaces/team/events",
    PIPELINES: "/apis/finetune.dev/v1alpha1/namespaces/team/finetunepipelines",
}
EXPIRED = ApiError(410, "too old resource version", "Expired")


class Reflected:
    """A reflector of one kind, with its cache and the changes that it has passed on."""

    def __init__(self, kind=JOBS, first=()):
        self.api = FakeApi()
        self.cache = ResourceCache()
        self.changes: list[Any] = []
        self.path = PATHS[kind]
        self.cache.update(
            PIPELINES, pipeline_object(status=running_status("demo-train-a1"))
        )
        resource = Resource(kind, self.path, first=first, namespace="team")
        self.reflector = Reflector(
            self.api, self.cache, resource, self.changes.append, self.changes.append
        )

    def put(self, raw):
        return self.api.put(f"{self.path}/{raw['metadata']['name']}", raw)

    def list(self):
        self.changes.clear()
        asyncio.run(self.reflector.list())

    def watch(self, *streams):
        """Watch until all streams have ended and one more watch has begun."""
        self.api.watches[self.path] = list(streams)

        async def scenario():
            watching = asyncio.create_task(self.reflector.watch())
            while len(self.api.watched) <= len(streams):  # noqa: ASYNC110  the fake API appends to a list
                await asyncio.sleep(0.005)
            watching.cancel()

        self.api.watched.clear()
        with patch.object(module, "BASE_RETRY_SECONDS", 0.01):
            asyncio.run(asyncio.wait_for(scenario(), 10))
        return [version for _, version in self.api.watched]

    @property
    def woken(self):
        return [
            key
            for change in self.changes
            if change.urgency is not Urgency.NEVER
            for key in change.keys
        ]


def event(kind, raw, version):
    return {
        "type": kind,
        "object": {
            **raw,
            "metadata": {**raw["metadata"], "resourceVersion": str(version)},
        },
    }


BOOKMARK = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "500"}}}


def test_list_reads_every_page():
    reflected = Reflected()
    for stage in ("prepare", "train", "evaluate", "push", "deploy"):
        reflected.put(job_of("demo", stage))
    reflected.list()
    assert len(reflected.cache.jobs) == 5
    assert reflected.reflector.version == str(reflected.api.version)


def test_second_list_passes_on_differences_only():
    reflected = Reflected()
    reflected.put(job_of())
    reflected.list()
    assert reflected.woken == [Key("team", "demo")]
    reflected.list()
    assert reflected.woken == []
    del reflected.api.objects[f"{reflected.path}/demo-train-a1"]
    reflected.api.version += 1
    reflected.list()
    assert reflected.woken == [Key("team", "demo")]
    assert len(reflected.cache.jobs) == 0


def test_failed_list_removes_nothing():
    reflected = Reflected()
    for stage in ("prepare", "train", "evaluate"):
        reflected.put(job_of("demo", stage))
    reflected.list()
    version = reflected.reflector.version

    async def one_page(path, **query):
        async for page in FakeApi.pages(reflected.api, path, **query):
            yield page
            raise ClusterError("no answer")

    reflected.api.pages = one_page
    with pytest.raises(ClusterError):
        reflected.list()
    assert len(reflected.cache.jobs) == 3
    assert reflected.reflector.version == version


def test_first_list_reads_unfinished_jobs_and_the_watch_all():
    reflected = Reflected(first=UNFINISHED_JOBS)
    reflected.put(job_of("demo", "prepare") | {"status": {"succeeded": 1}})
    reflected.put(job_of())
    asyncio.run(reflected.reflector.list_first())
    assert set(reflected.cache.jobs.entries) == {("team", "demo-train-a1")}
    assert not reflected.reflector.listed.is_set()
    reflected.watch([])
    assert set(reflected.cache.jobs.entries) == {
        ("team", "demo-train-a1"),
        ("team", "demo-prepare-a1"),
    }
    assert reflected.reflector.listed.is_set()


def test_first_list_of_a_new_leader_removes_nothing():
    reflected = Reflected(first=UNFINISHED_JOBS)
    reflected.put(job_of("demo", "prepare") | {"status": {"succeeded": 1}})
    reflected.list()
    asyncio.run(reflected.reflector.list_first())
    assert set(reflected.cache.jobs.entries) == {("team", "demo-prepare-a1")}
    assert reflected.reflector.version == ""


def test_watch_continues_from_the_version_of_the_last_event():
    reflected = Reflected()
    versions = reflected.watch(
        [event("ADDED", job_of(), 300)], [event("DELETED", job_of(), 301)]
    )
    assert versions == ["100", "300", "301"]
    assert len(reflected.cache.jobs) == 0
    assert reflected.woken == [Key("team", "demo")] * 2


def test_bookmarks_advance_the_version():
    assert Reflected().watch([BOOKMARK])[-1] == "500"


def test_expired_version_leads_to_a_new_list():
    reflected = Reflected()
    reflected.watch([BOOKMARK])
    reflected.put(job_of())
    reflected.api.version = 700
    assert reflected.watch([EXPIRED]) == ["500", "700"]
    assert len(reflected.cache.jobs) == 1


def test_failed_watch_is_retried_from_its_version(caplog):
    reflected = Reflected()
    versions = reflected.watch(
        [event("ADDED", job_of(), 300), ApiError(0, "no answer")],
        [ApiError(503, "not now")],
    )
    assert versions == ["100", "300", "300"]
    assert caplog.text.count("watching jobs failed and is retried") == 2


@pytest.mark.parametrize(
    ("stream", "answered"),
    [
        ([], True),
        ([BOOKMARK], True),
        ([BOOKMARK, ApiError(0, "cut")], True),
        ([ApiError(403, "no watch")], False),
    ],
)
def test_watch_that_only_fails_gives_no_answer(stream, answered):
    """A load balancer may cut each watch before its end: what was delivered counts."""
    reflected = Reflected()
    reflected.list()
    reflected.api.watches[reflected.path] = [list(stream)]
    watch_at_once = reflected.api.watch

    async def watch(*arguments, **query):
        await asyncio.sleep(0.05)
        async for raw in watch_at_once(*arguments, **query):
            yield raw

    async def scenario():
        reflected.api.watch = watch
        watching = asyncio.create_task(reflected.reflector.watch())
        await asyncio.sleep(0)
        began = reflected.reflector.answered_at
        while len(reflected.api.watched) < 2:  # noqa: ASYNC110  the fake API appends to a list
            await asyncio.sleep(0.005)
        answered_at = reflected.reflector.answered_at
        assert began
        assert answered_at
        assert (answered_at > began) is answered
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert reflected.reflector.answered_at is None

    with patch.object(module, "BASE_RETRY_SECONDS", 0.01):
        asyncio.run(asyncio.wait_for(scenario(), 10))


def test_event_that_a_list_has_shown_is_no_change():
    reflected = Reflected()
    reflected.put(job_of())
    reflected.list()
    reflected.changes.clear()
    reflected.watch([event("ADDED", job_of(), 101)])
    assert reflected.woken == []


MALFORMED = [
    {"metadata": {}},
    {
        "metadata": {
            "namespace": "team",
            "name": "x",
            "uid": "u",
            "resourceVersion": "1",
            "ownerReferences": [{}],
        }
    },
    {
        "metadata": {
            "namespace": "team",
            "name": "x",
            "uid": "u",
            "labels": [],
            "annotations": "x",
        }
    },
    {
        "metadata": {"namespace": "team", "name": "x", "uid": "u"},
        "status": {"conditions": "x"},
        "spec": [],
    },
    {"metadata": {"namespace": "team", "name": "x", "uid": "u"}, "involvedObject": "x"},
]


@pytest.mark.parametrize("kind", [JOBS, PODS, PIPELINES, EVENTS])
@pytest.mark.parametrize("raw", MALFORMED, ids=str)
def test_malformed_object_does_not_hide_the_next_one(kind, raw):
    reflected = Reflected(kind)
    sound = {
        JOBS: job_of(),
        PODS: pod_of(state=running()),
        PIPELINES: pipeline_object(generation=2),
        EVENTS: {
            "metadata": {"namespace": "team", "name": "e"},
            "type": "Warning",
            "involvedObject": {
                "namespace": "team",
                "kind": "Job",
                "name": "demo-train-a1",
            },
        },
    }[kind]
    reflected.cache.update(JOBS, job_of())
    events = [
        event(change, raw, 300 + n)
        for n, change in enumerate(("ADDED", "MODIFIED", "DELETED"))
    ]
    versions = reflected.watch([*events, event("ADDED", sound, 310)])
    assert versions == ["100", "310"], "the watch went on"
    assert Key("team", "demo") in reflected.woken


def test_list_with_a_malformed_object_has_the_others():
    reflected = Reflected()
    reflected.api.objects[f"{reflected.path}/bad"] = {"metadata": {}}
    reflected.put(job_of())
    reflected.list()
    assert list(reflected.cache.jobs.entries) == [("team", "demo-train-a1")]


@pytest.mark.parametrize(
    ("namespaces", "seconds"), [(1, 20), (10, 20), (50, 100), (200, 300), (5000, 300)]
)
def test_watches_of_many_namespaces_are_opened_less_often(namespaces, seconds):
    assert watch_seconds(namespaces) == seconds
