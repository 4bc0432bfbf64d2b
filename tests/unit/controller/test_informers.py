"""The informers: which namespaces are listed and watched, and which changes are queued."""

import asyncio
from types import SimpleNamespace
from unittest.mock import patch

import kopf
import pytest
from support.operator.cluster_objects import (
    job_of,
    pipeline_object,
    pod_of,
    running_status,
)
from support.operator.informer_scenario import NAME, PATHS, InformerScenario
from support.operator.pods import job_condition, running, terminated

from finetune_operator.controller import kopf_watch as module
from finetune_operator.controller.informers import LISTS_AT_ONCE
from finetune_operator.core.pipeline import Key
from finetune_operator.errors import ClusterError
from finetune_operator.kubernetes.cache.cache import (
    JOBS,
    PIPELINES,
    PODS,
)
from finetune_operator.kubernetes.translate.api_errors import ApiError

INTERRUPTED = '{"interruption": {"step": 40, "savedStep": 40}}'
DEMO = Key("team", "demo")


def ended_pod():
    return pod_of(state=terminated(75, INTERRUPTED))


@pytest.mark.parametrize("gone", [False, True])
def test_pod_that_ends_during_a_list_keeps_its_end(gone):
    scenario = InformerScenario()
    scenario.create(PODS, pod_of(state=running()))
    scenario.list(lambda: scenario.event(PODS, ended_pod(), gone=gone))
    assert (
        scenario.pod.exit_code,
        scenario.pod.termination_message.interruption.saved_step,
    ) == (
        75,
        40,
    )
    assert scenario.pod.gone is gone


def test_job_that_completes_during_a_list_is_complete():
    scenario = InformerScenario()
    scenario.api.during_list = lambda: None
    pages = scenario.api.pages

    async def pages_then_event(path, **query):
        raw = [page async for page in pages(path, **query)]
        if path.endswith("/jobs"):
            scenario.event(JOBS, job_of("demo", "train", job_condition("Complete")))
        for page in raw:
            yield page

    scenario.api.pages = pages_then_event
    scenario.list()
    job = scenario.cache.jobs.get(("team", NAME))
    assert job
    assert scenario.cache.is_over(job)


def test_objects_created_or_deleted_during_a_list_stay_so():
    scenario = InformerScenario()
    scenario.create(PODS, pod_of(state=running()))

    def during_list():
        scenario.event(JOBS, job_of("demo", "evaluate"))
        scenario.event(JOBS, job_of(), gone=True)
        scenario.event(PIPELINES, pipeline_object("new"))

    scenario.list(during_list)
    assert set(scenario.cache.jobs.entries) == {("team", "demo-evaluate-a1")}
    assert set(scenario.cache.pipelines.entries) == {("team", "demo"), ("team", "new")}
    assert not scenario.pod.gone


def test_next_list_removes_what_is_still_missing():
    scenario = InformerScenario()
    scenario.list(lambda: scenario.event(JOBS, job_of("demo", "evaluate")))
    assert len(scenario.cache.jobs) == 2
    scenario.list()
    assert len(scenario.cache.jobs) == 1


def test_list_queues_differences_only():
    scenario = InformerScenario()
    assert scenario.list() == []
    scenario.api.put(
        f"{PATHS[JOBS].format('team')}/{NAME}",
        job_of("demo", "train", job_condition("Complete")),
    )
    assert scenario.list() == [DEMO]
    assert scenario.list() == []


def test_new_leader_queues_finished_pipelines_once_all_is_listed():
    async def scenario():
        informers = InformerScenario()
        done = {"finishedAt": "2030-01-01T00:00:00Z"}
        informers.create(PIPELINES, pipeline_object("a-done", status=done))
        informers.create(JOBS, job_of("a-done") | {"status": {"succeeded": 1}})
        informers.cache.jobs.remove(("team", "a-done-train-a1"), 0)
        await informers.informers.list_first()
        queueing = asyncio.create_task(informers.informers.requeue_all())
        await asyncio.sleep(0)
        before = [await informers.queue.get() for _ in range(len(informers.queue))]
        for reflector in informers.informers.reflectors["team"]:
            await reflector.list()
        await queueing
        return before, [
            await informers.queue.get() for _ in range(len(informers.queue))
        ]

    assert asyncio.run(scenario()) == ([DEMO], [Key("team", "a-done")])


def test_changed_job_of_a_finished_pipeline_waits_behind_others():
    scenario = InformerScenario()
    done = {"finishedAt": "2030-01-01T00:00:00Z"}
    scenario.create(PIPELINES, pipeline_object("a-done", status=done))
    scenario.create(PIPELINES, pipeline_object("new"))
    scenario.create(JOBS, job_of("a-done"))

    async def relist():
        await scenario.informers.list()
        scenario.informers._is_complete = True
        for name in ("a-done-train-a1", NAME):
            scenario.api.put(
                f"{PATHS[JOBS].format('team')}/{name}",
                job_of(
                    name.removesuffix("-train-a1"), "train", job_condition("Complete")
                ),
            )
        await scenario.informers.list()
        return [(await scenario.queue.get()).name for _ in range(len(scenario.queue))]

    assert asyncio.run(relist()) == ["demo", "a-done"]


@pytest.mark.parametrize(
    "error",
    [RecursionError("too deep"), KeyError("metadata"), ClusterError("no answer")],
)
def test_failed_list_is_logged_and_retried(error, caplog):
    scenario = InformerScenario()
    errors = [error, error]

    def during_list():
        if errors:
            raise errors.pop()

    scenario.api.during_list = during_list
    with patch.object(module, "BASE_RETRY_SECONDS", 0.01):
        asyncio.run(asyncio.wait_for(scenario.informers.list_with_retry(), 10))
    assert scenario.informers.synced_at is not None
    assert caplog.text.count("the list failed and is retried") == 2
    assert str(error) in caplog.text


def test_new_leader_has_not_synced_before_its_first_list():
    """A replica that led before has the time of a list of then, and its cache is as old."""
    scenario = InformerScenario()
    errors = [ClusterError("no answer")]
    scenario.list()
    known = scenario.informers
    synced = []

    def during_list():
        synced.append(known.synced_at)
        if errors:
            raise errors.pop()

    scenario.api.during_list = during_list
    with patch.object(module, "BASE_RETRY_SECONDS", 0.01):
        asyncio.run(asyncio.wait_for(known.list_first(), 10))
    assert set(synced) == {None}
    assert known.synced_at is not None


def two_namespaces():
    scenario = InformerScenario(("team", "other"))
    scenario.create(PIPELINES, pipeline_object(status=running_status(NAME)), "other")
    scenario.create(JOBS, job_of(), "other")
    for namespace in ("team", "other"):
        scenario.create(PODS, pod_of(state=running()), namespace)
    return scenario


@pytest.mark.parametrize("status", [401, 403, 404])
def test_lost_namespace_keeps_its_cache_and_spares_others(status, caplog):
    scenario = two_namespaces()
    scenario.api.list_errors = {"other": status}
    del scenario.api.objects[PATHS[JOBS].format("team") + f"/{NAME}"]
    assert scenario.list() == [DEMO]
    assert set(scenario.cache.jobs.entries) == {("other", NAME)}
    assert not scenario.cache.pods_of("other", NAME)[0].gone
    assert ("other", "demo") in scenario.cache.pipelines.entries
    assert scenario.informers.synced_at is not None
    assert "cannot list namespace other" in caplog.text


@pytest.mark.parametrize(
    "errors", [{"team": 403, "other": 403}, {"other": 503}], ids=["all lost", "busy"]
)
def test_list_fails_when_nothing_can_be_listed_or_server_is_busy(errors):
    scenario = two_namespaces()
    scenario.api.list_errors = errors
    with pytest.raises(ApiError):
        scenario.list()
    assert scenario.informers.synced_at is None
    assert len(scenario.cache.jobs) == 2


def test_new_leader_lists_several_namespaces_at_once():
    scenario = InformerScenario(tuple(f"team-{number}" for number in range(20)))
    pages = scenario.api.pages
    under_way = 0
    most = 0

    async def slow_pages(path, **query):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.001)
        async for page in pages(path, **query):
            yield page
        under_way -= 1

    scenario.api.pages = slow_pages
    scenario.list()
    assert most == LISTS_AT_ONCE
    assert len(scenario.informers.watched_namespaces) == 20


def test_namespace_is_watched_once_it_can_be_listed():
    scenario = two_namespaces()
    watched = []

    async def operator(*, namespaces, **_):
        watched.append(sorted(namespaces))
        await asyncio.Event().wait()

    async def scenario_of_loss():
        scenario.api.list_errors = {"other": 403}
        await scenario.informers.list_with_retry()
        watching = asyncio.create_task(scenario.informers.watch())
        for starts in (1, 2):
            while len(watched) < starts:  # noqa: ASYNC110  the fake operator appends to a list
                await asyncio.sleep(0.01)
            scenario.api.list_errors = {}
            await scenario.informers.list()
        await asyncio.sleep(0.1)
        watching.cancel()

    with (
        patch.object(kopf, "operator", operator),
        patch.object(module, "BASE_RETRY_SECONDS", 0.01),
    ):
        asyncio.run(asyncio.wait_for(scenario_of_loss(), 10))
    assert watched == [["team"], ["other", "team"]]
    jobs = [path for path, _ in scenario.api.watched if path.endswith("/jobs")]
    assert jobs.count(PATHS[JOBS].format("other")) == 1
    assert not scenario.informers.kopf_watch.signals.requested.is_set()


def test_watches_survive_an_outage_after_kopf_has_ended():
    scenario = two_namespaces()
    starts = []

    async def operator(**_):
        starts.append(1)
        if len(starts) == 1:
            scenario.api.list_errors = {"team": 503, "other": 503}
            raise RuntimeError("a minute of 503")
        await asyncio.Event().wait()

    async def outage():
        await scenario.informers.list_with_retry()
        watching = asyncio.create_task(scenario.informers.watch())
        await asyncio.sleep(0.1)
        assert len(starts) == 1
        assert not watching.done(), "the outage has ended the operator"
        assert scenario.informers.silent_watch(0.01) == PIPELINES
        scenario.api.list_errors = {}
        while len(starts) < 2:  # noqa: ASYNC110  the fake operator appends to a list
            await asyncio.sleep(0.01)
        assert scenario.informers.silent_watch(10) == ""
        await asyncio.sleep(0.1)
        assert scenario.informers.silent_watch(0.01) != PIPELINES
        watching.cancel()

    with (
        patch.object(kopf, "operator", operator),
        patch.object(module, "BASE_RETRY_SECONDS", 0.01),
    ):
        asyncio.run(asyncio.wait_for(outage(), 10))


def handler_of(scenario):
    """Return the function that kopf calls with each event of a pipeline."""
    [handler] = scenario.informers.kopf_watch.registry()._watching._handlers
    return lambda kind, raw: handler.fn(event={"type": kind, "object": raw})


def delivered(scenario, kind, raw, *, processing=False):
    """Deliver an event of the pipeline, and return what is queued now and later."""

    async def deliver():
        if processing:
            scenario.queue.add(DEMO)
            assert await scenario.queue.get() == DEMO
        scenario.api.version += 1
        raw["metadata"]["resourceVersion"] = str(scenario.api.version)
        await handler_of(scenario)(kind, raw)
        queue = scenario.queue
        return SimpleNamespace(now=len(queue) == 1, later=DEMO in queue._delayed)

    return asyncio.run(deliver())


def foreign_status():
    return pipeline_object(status=running_status(NAME) | {"phase": "Hacked"})


def test_status_of_another_program_is_queued():
    queued = delivered(InformerScenario(), "MODIFIED", foreign_status())
    assert queued.now is False
    assert queued.later is True


def test_status_that_a_worker_is_writing_is_not_queued():
    queued = delivered(
        InformerScenario(), "MODIFIED", foreign_status(), processing=True
    )
    assert queued.now is False
    assert queued.later is False


def test_edit_and_deletion_are_queued_at_once():
    assert delivered(InformerScenario(), "MODIFIED", pipeline_object(generation=2)).now
    scenario = InformerScenario()
    assert delivered(scenario, "DELETED", pipeline_object()).now
    assert len(scenario.cache.pipelines) == 0
