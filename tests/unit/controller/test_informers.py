"""The cache stays correct when watch events arrive during a relist, and when a relist fails."""

import asyncio
from unittest.mock import patch

import pytest
from support.fake_api import FakeApi
from support.pods import a_job, a_pod, job_condition, running, terminated

from finetune_operator.controller import informers as module
from finetune_operator.controller.informers import Informers
from finetune_operator.controller.signals import StopSignal
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.core.pipeline import Key
from finetune_operator.errors import ClusterError
from finetune_operator.kubernetes.cache import ResourceCache
from finetune_operator.kubernetes.translate.api_errors import ApiError

NAME = "demo-train-a1"
PIPELINE = {"metadata": {"namespace": "team", "name": "demo", "uid": "uid-1"}}
PATHS = {
    "pods": "/api/v1/namespaces/{}/pods",
    "jobs": "/apis/batch/v1/namespaces/{}/jobs",
    "finetunepipelines": "/apis/finetune.dev/v1alpha1/namespaces/{}/finetunepipelines",
}
INTERRUPTED = '{"interruption": {"step": 40, "savedStep": 40}}'


class SlowApi(FakeApi):
    """A fake API whose lists take a while: what `during_list` changes is not in the lists already being read."""

    def __init__(self):
        super().__init__()
        self.during_list = lambda: None
        self.list_errors = {}
        """Namespaces in which every list fails, with the status code."""

    def add(self, kind, item):
        meta = item["metadata"]
        return self.put(f"{PATHS[kind].format(meta['namespace'])}/{meta['name']}", item)

    async def list(self, path, **query):
        items = [item async for item in super().list(path, **query)]
        for namespace, status in self.list_errors.items():
            if f"/{namespace}/" in path:
                raise ApiError(status, f"cannot list in {namespace}")
        await asyncio.sleep(0)
        if path.endswith("/pods"):
            self.during_list()
        for item in items:
            yield item


class InformerScenario:
    """An API server with a pipeline, and the informers with their cache and their queue."""

    def __init__(self, namespaces=("team",)):
        self.api, self.cache, self.queue = SlowApi(), ResourceCache(), WorkQueue()
        self.informers = Informers(self.api, self.cache, self.queue, StopSignal(), namespaces)
        self.create("finetunepipelines", PIPELINE)

    def create(self, kind, item):
        self.api.add(kind, item)
        self.cache.handlers[kind](item)

    def relist(self, during_list=lambda: None):
        self.api.during_list = during_list
        asyncio.run(self.informers.relist())

    @property
    def pod(self):
        return self.cache.pods["team", NAME]


def test_pod_that_ends_during_relist_keeps_its_end():
    scenario = InformerScenario()
    scenario.create("pods", a_pod(running()))
    scenario.relist(lambda: scenario.cache.update_pod(a_pod(terminated(75, INTERRUPTED), phase="Failed")))
    assert (scenario.pod.exit_code, scenario.pod.termination_message.interruption.saved_step) == (75, 40)


def test_pod_deleted_during_relist_keeps_its_end():
    scenario = InformerScenario()
    scenario.create("pods", a_pod(running()))
    scenario.relist(lambda: scenario.cache.update_pod(a_pod(terminated(75, INTERRUPTED), phase="Failed"), gone=True))
    assert (scenario.pod.exit_code, scenario.pod.gone) == (75, True)


def test_job_that_completes_during_relist_is_complete():
    scenario = InformerScenario()
    scenario.create("jobs", a_job())
    complete = a_job(job_condition("Complete"))
    scenario.relist(lambda: scenario.cache.update_job(complete))
    assert scenario.cache.jobs["team", NAME]["status"] == complete["status"]


def test_job_deleted_during_relist_stays_deleted():
    scenario = InformerScenario()
    scenario.create("jobs", a_job())
    scenario.relist(lambda: scenario.cache.update_job(a_job(), gone=True))
    assert scenario.cache.jobs == {}


def test_pod_created_during_relist_is_not_gone():
    scenario = InformerScenario()
    scenario.relist(lambda: scenario.cache.update_pod(a_pod(running())))
    assert not scenario.pod.gone


def test_relist_keeps_newer_creations_and_deletions():
    scenario = InformerScenario()
    new = {"metadata": {"namespace": "team", "name": "new", "uid": "uid-2"}}

    def during_list():
        scenario.cache.update_pipeline(new)
        scenario.cache.update_job(a_job())
        scenario.cache.update_pipeline(PIPELINE, gone=True)

    scenario.relist(during_list)
    assert set(scenario.cache.pipelines) == {Key("team", "new")}
    scenario.api.add("finetunepipelines", new)
    scenario.api.add("jobs", a_job())
    del scenario.api.objects[PATHS["finetunepipelines"].format("team") + "/demo"]
    scenario.relist()
    assert (set(scenario.cache.pipelines), set(scenario.cache.jobs)) == ({Key("team", "new")}, {("team", NAME)})


def test_next_relist_wins_over_events_of_the_previous_one():
    scenario = InformerScenario()
    scenario.relist(lambda: scenario.cache.update_job(a_job()))
    assert ("team", NAME) in scenario.cache.jobs
    scenario.relist()
    assert scenario.cache.jobs == {}


def test_relists_do_not_overlap():
    scenario, active, counts = InformerScenario(), [], []
    begin, replace = scenario.cache.begin_relist, scenario.cache.replace
    scenario.cache.begin_relist = lambda: (begin(), active.append(1), counts.append(len(active)))
    scenario.cache.replace = lambda *args, **lists: (active.pop(), replace(*args, **lists))[1]

    async def twice():
        await asyncio.gather(scenario.informers.relist(), scenario.informers.relist())

    asyncio.run(twice())
    assert (counts, active) == ([1, 1], [])


@pytest.mark.parametrize("error", [RecursionError("too deep"), KeyError("metadata"), ClusterError("no answer")])
def test_failed_relist_is_logged_and_retried(error, caplog):
    scenario, errors = InformerScenario(), [error, error]

    def during_list():
        if errors:
            raise errors.pop()

    scenario.api.during_list = during_list
    with patch.object(module, "BASE_RETRY_SECONDS", 0.01):
        asyncio.run(asyncio.wait_for(scenario.informers.relist_with_retry(), 10))
    assert scenario.informers.synced_at is not None
    assert caplog.text.count("the relist failed and is retried") == 2
    assert str(error) in caplog.text


def in_namespace(namespace, item):
    """Return a copy of an object in another namespace."""
    return {**item, "metadata": {**item["metadata"], "namespace": namespace}}


def two_namespaces():
    scenario = InformerScenario(("team", "other"))
    for namespace in ("team", "other"):
        scenario.create("finetunepipelines", in_namespace(namespace, PIPELINE))
        scenario.create("jobs", in_namespace(namespace, a_job()))
        scenario.create("pods", in_namespace(namespace, a_pod(running())))
    return scenario


@pytest.mark.parametrize("status", [401, 403, 404])
def test_lost_namespace_keeps_its_cache_and_spares_others(status, caplog):
    scenario = two_namespaces()
    scenario.api.list_errors = {"other": status}
    del scenario.api.objects[PATHS["jobs"].format("team") + f"/{NAME}"]
    scenario.relist()
    assert set(scenario.cache.jobs) == {("other", NAME)}
    assert not scenario.cache.pods["other", NAME].gone
    assert Key("other", "demo") in scenario.cache.pipelines
    assert scenario.informers.synced_at is not None
    assert list(scenario.queue._queue) == [Key("team", "demo")]
    assert "cannot list namespace other" in caplog.text


def test_relist_fails_when_no_namespace_can_be_listed():
    scenario = two_namespaces()
    scenario.api.list_errors = {"team": 403, "other": 403}
    with pytest.raises(ApiError):
        scenario.relist()
    assert scenario.informers.synced_at is None
    assert len(scenario.cache.jobs) == 2


def test_relist_fails_when_api_server_is_busy():
    scenario = two_namespaces()
    scenario.api.list_errors = {"other": 503}
    with pytest.raises(ApiError):
        scenario.relist()
    assert scenario.informers.synced_at is None


def test_namespace_is_watched_once_it_can_be_listed():
    scenario, watched = two_namespaces(), []

    async def operator(*, namespaces, stop_flag, **_):
        watched.append(sorted(namespaces))
        await stop_flag.wait()

    async def scenario_of_loss():
        scenario.api.list_errors = {"other": 403}
        await scenario.informers.relist_with_retry()
        watching = asyncio.create_task(scenario.informers.watch())
        for starts in (1, 2):
            while len(watched) < starts:  # noqa: ASYNC110  the fake operator appends to a list
                await asyncio.sleep(0.01)
            scenario.api.list_errors = {}
            await scenario.informers.relist()
        await asyncio.sleep(0.1)
        watching.cancel()

    with patch.object(module.kopf, "operator", operator), patch.object(module, "RESTART_SECONDS", 0.01):
        asyncio.run(asyncio.wait_for(scenario_of_loss(), 10))
    assert watched == [["team"], ["other", "team"]]
    assert not scenario.informers.signals.requested.is_set()
