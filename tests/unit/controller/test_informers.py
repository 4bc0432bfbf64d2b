"""The books stay right whatever the watches tell while whole lists are read."""

import asyncio
from unittest.mock import patch

import pytest
from support.fake_api import FakeApi
from support.pods import a_job, a_pod, ended, over, running

from finetune_operator.controller import informers as module
from finetune_operator.controller.informers import Informers
from finetune_operator.controller.signals import StopSignal
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.core.pipeline import Key
from finetune_operator.errors import ClusterError
from finetune_operator.kubernetes.cache import ResourceCache
from finetune_operator.kubernetes.client import ApiError

NAME = "demo-train-a1"
PIPELINE = {"metadata": {"namespace": "team", "name": "demo", "uid": "uid-1"}}
WHERE = {
    "pods": "/api/v1/namespaces/{}/pods",
    "jobs": "/apis/batch/v1/namespaces/{}/jobs",
    "finetunepipelines": "/apis/finetune.dev/v1alpha1/namespaces/{}/finetunepipelines",
}
WORDS = '{"interruption": {"step": 40, "savedStep": 40}}'


class Slow(FakeApi):
    """Its lists take a while: what `meanwhile` does is not in the answers to come."""

    def __init__(self):
        super().__init__()
        self.meanwhile = lambda: None
        self.lost = {}
        """Namespaces in which every list is refused, with this status."""

    def add(self, kind, found):
        meta = found["metadata"]
        return self.put(f"{WHERE[kind].format(meta['namespace'])}/{meta['name']}", found)

    async def list(self, path, **query):
        found = [one async for one in super().list(path, **query)]
        for namespace, status in self.lost.items():
            if f"/{namespace}/" in path:
                raise ApiError(status, f"cannot list in {namespace}")
        await asyncio.sleep(0)
        if path.endswith("/pods"):
            self.meanwhile()
        for one in found:
            yield one


class Watched:
    """An API server in which a pipeline trains, its books, and who compares the two."""

    def __init__(self, namespaces=("team",)):
        self.server, self.books, self.queue = Slow(), ResourceCache(), WorkQueue()
        self.watches = Informers(self.server, self.books, self.queue, StopSignal(), namespaces)
        self.is_there("finetunepipelines", PIPELINE)

    def is_there(self, kind, found):
        self.server.add(kind, found)
        self.books.handlers[kind](found)

    def compare(self, meanwhile=lambda: None):
        self.server.meanwhile = meanwhile
        asyncio.run(self.watches.relist())

    @property
    def pod(self):
        return self.books.pods["team", NAME]


def test_the_end_of_a_pod_that_is_told_while_the_pods_are_listed_is_not_forgotten():
    scenario = Watched()
    scenario.is_there("pods", a_pod(running()))
    scenario.compare(lambda: scenario.books.update_pod(a_pod(ended(75, WORDS), phase="Failed")))
    assert (scenario.pod.exit_code, scenario.pod.termination_message.interruption.saved_step) == (75, 40)


def test_a_pod_that_ends_and_goes_while_the_pods_are_listed_stays_gone_with_its_last_words():
    scenario = Watched()
    scenario.is_there("pods", a_pod(running()))
    scenario.compare(lambda: scenario.books.update_pod(a_pod(ended(75, WORDS), phase="Failed"), gone=True))
    assert (scenario.pod.exit_code, scenario.pod.gone) == (75, True)


def test_a_job_that_completes_while_the_lists_are_read_is_complete():
    scenario = Watched()
    scenario.is_there("jobs", a_job())
    complete = a_job(over("Complete"))
    scenario.compare(lambda: scenario.books.update_job(complete))
    assert scenario.books.jobs["team", NAME]["status"] == complete["status"]


def test_a_job_that_is_deleted_while_the_lists_are_read_does_not_come_back():
    scenario = Watched()
    scenario.is_there("jobs", a_job())
    scenario.compare(lambda: scenario.books.update_job(a_job(), gone=True))
    assert scenario.books.jobs == {}


def test_a_pod_that_is_made_while_the_pods_are_listed_is_not_gone():
    scenario = Watched()
    scenario.compare(lambda: scenario.books.update_pod(a_pod(running())))
    assert not scenario.pod.gone


def test_what_is_made_while_the_lists_are_read_is_there_and_what_is_gone_is_looked_at_no_more():
    scenario = Watched()
    new = {"metadata": {"namespace": "team", "name": "new", "uid": "uid-2"}}

    def meanwhile():
        scenario.books.update_pipeline(new)
        scenario.books.update_job(a_job())
        scenario.books.update_pipeline(PIPELINE, gone=True)

    scenario.compare(meanwhile)
    assert set(scenario.books.pipelines) == {Key("team", "new")}
    scenario.server.add("finetunepipelines", new)
    scenario.server.add("jobs", a_job())
    del scenario.server.objects[WHERE["finetunepipelines"].format("team") + "/demo"]
    scenario.compare()
    assert (set(scenario.books.pipelines), set(scenario.books.jobs)) == ({Key("team", "new")}, {("team", NAME)})


def test_what_was_told_during_one_comparison_is_believed_no_more_than_the_lists_of_the_next():
    scenario = Watched()
    scenario.compare(lambda: scenario.books.update_job(a_job()))
    assert ("team", NAME) in scenario.books.jobs
    scenario.compare()
    assert scenario.books.jobs == {}


def test_no_two_comparisons_overlap():
    scenario, going, most = Watched(), [], []
    begin, sweep = scenario.books.begin_relist, scenario.books.replace
    scenario.books.begin_relist = lambda: (begin(), going.append(1), most.append(len(going)))
    scenario.books.replace = lambda *args, **lists: (going.pop(), sweep(*args, **lists))[1]

    async def twice():
        await asyncio.gather(scenario.watches.relist(), scenario.watches.relist())

    asyncio.run(twice())
    assert (most, going) == ([1, 1], [])


@pytest.mark.parametrize("error", [RecursionError("too deep"), KeyError("metadata"), ClusterError("no answer")])
def test_a_comparison_that_goes_wrong_for_whatever_reason_is_tried_again_and_told_of(error, caplog):
    scenario, errors = Watched(), [error, error]

    def meanwhile():
        if errors:
            raise errors.pop()

    scenario.server.meanwhile = meanwhile
    with patch.object(module, "BASE_RETRY_SECONDS", 0.01):
        asyncio.run(asyncio.wait_for(scenario.watches.relist_with_retry(), 10))
    assert scenario.watches.synced_at is not None
    assert caplog.text.count("the books are compared again") == 2
    assert str(error) in caplog.text


def of(namespace, found):
    """Put it into another namespace."""
    return {**found, "metadata": {**found["metadata"], "namespace": namespace}}


def two_namespaces():
    scenario = Watched(("team", "other"))
    for namespace in ("team", "other"):
        scenario.is_there("finetunepipelines", of(namespace, PIPELINE))
        scenario.is_there("jobs", of(namespace, a_job()))
        scenario.is_there("pods", of(namespace, a_pod(running())))
    return scenario


@pytest.mark.parametrize("status", [401, 403, 404])
def test_of_a_namespace_that_is_lost_the_books_keep_what_they_had_and_the_others_go_on(status, caplog):
    scenario = two_namespaces()
    scenario.server.lost = {"other": status}
    del scenario.server.objects[WHERE["jobs"].format("team") + f"/{NAME}"]
    scenario.compare()
    assert set(scenario.books.jobs) == {("other", NAME)}
    assert not scenario.books.pods["other", NAME].gone
    assert Key("other", "demo") in scenario.books.pipelines
    assert scenario.watches.synced_at is not None
    assert list(scenario.queue._queue) == [Key("team", "demo")]
    assert "the namespace other" in caplog.text


def test_where_no_namespace_can_be_listed_nothing_was_compared():
    scenario = two_namespaces()
    scenario.server.lost = {"team": 403, "other": 403}
    with pytest.raises(ApiError):
        scenario.compare()
    assert scenario.watches.synced_at is None
    assert len(scenario.books.jobs) == 2


def test_a_server_that_is_only_busy_is_waited_for():
    scenario = two_namespaces()
    scenario.server.lost = {"other": 503}
    with pytest.raises(ApiError):
        scenario.compare()
    assert scenario.watches.synced_at is None


def test_only_what_can_be_listed_is_watched_and_the_rest_once_it_is_back():
    scenario, watched = two_namespaces(), []

    async def operator(*, namespaces, stop_flag, **_):
        watched.append(sorted(namespaces))
        await stop_flag.wait()

    async def story():
        scenario.server.lost = {"other": 403}
        await scenario.watches.relist_with_retry()
        watching = asyncio.create_task(scenario.watches.watch())
        for wanted in (1, 2):
            while len(watched) < wanted:  # noqa: ASYNC110  it is told by a list
                await asyncio.sleep(0.01)
            scenario.server.lost = {}
            await scenario.watches.relist()
        await asyncio.sleep(0.1)
        watching.cancel()

    with patch.object(module.kopf, "operator", operator), patch.object(module, "RESTART_SECONDS", 0.01):
        asyncio.run(asyncio.wait_for(story(), 10))
    assert watched == [["team"], ["other", "team"]]
    assert not scenario.watches.signals.requested.is_set()
