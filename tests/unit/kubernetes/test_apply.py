"""What the operator makes, changes and deletes; and what it leaves alone, for it is somebody else's."""

import asyncio
from dataclasses import replace

import pytest
from support.fake_api import FakeApi
from support.pods import a_pod, over
from support.scenario import Scenario, a_pipeline

from finetune_operator.api.conditions import Reason
from finetune_operator.core.metadata import service_name
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.core.plan import CreateJob, StopJob, SwitchTraffic
from finetune_operator.errors import ClusterError, Conflict
from finetune_operator.kubernetes.cache import ResourceCache
from finetune_operator.kubernetes.client import ApiError
from finetune_operator.kubernetes.cluster import KubernetesCluster
from finetune_operator.kubernetes.pods.probe import NoProbe
from finetune_operator.kubernetes.pods.progress import NoProgress
from finetune_operator.kubernetes.resources.owner_references import owner_references

JOBS = "/apis/batch/v1/namespaces/team/jobs"
DEPLOYMENTS = "/apis/apps/v1/namespaces/team/deployments"
SERVICES = "/api/v1/namespaces/team/services"
SERVICE = f"{SERVICES}/demo-deploy"


class Stage:
    """A finished pipeline's templates, and a cluster in which nothing is."""

    def __init__(self, **changes):
        scenario = Scenario(a_pipeline(**changes)).finish()
        self.templates = {job.template.stage: job.template for job in scenario.cluster.jobs.values()}
        self.pipeline = Pipeline(Key("team", "demo"), "uid-1", 1, a_pipeline(**changes))
        self.store, self.books = FakeApi(), ResourceCache()
        self.cluster = KubernetesCluster(self.store, self.books, NoProgress(), NoProbe())

    def create(self, stage):
        return CreateJob(self.templates[stage])

    def do(self, *actions, pipeline=None):
        asyncio.run(self.cluster.apply(pipeline or self.pipeline, actions))

    def refused(self):
        return asyncio.run(self.cluster.observe(self.pipeline)).blocked

    def names(self, path):
        return sorted(where.rpartition("/")[2] for where in self.store.objects if where.startswith(f"{path}/"))

    def routed_to(self):
        return self.store.objects[SERVICE]["spec"]["selector"]["finetune.dev/server"]


@pytest.fixture
def stage():
    return Stage()


def test_a_server_is_put_behind_the_service_and_taken_from_it(stage):
    stage.do(stage.create("deploy"))
    [first] = stage.names(DEPLOYMENTS)
    assert stage.names(SERVICES) == []
    stage.do(SwitchTraffic("deploy", first))
    assert stage.routed_to() == first
    second = replace(stage.templates["deploy"], name="demo-deploy-a2")
    stage.do(CreateJob(second))
    stage.do(SwitchTraffic("deploy", second.name))
    assert stage.routed_to() == second.name
    stage.do(StopJob(first, Reason.SPEC_CHANGED))
    assert stage.names(DEPLOYMENTS) == [second.name]


def test_the_server_that_has_the_requests_by_now_is_not_deleted_whatever_the_books_said(stage):
    stage.do(stage.create("deploy"))
    [name] = stage.names(DEPLOYMENTS)
    stage.do(SwitchTraffic("deploy", name))
    stage.books.services.clear()
    with pytest.raises(Conflict):
        stage.do(StopJob(name, Reason.SPEC_CHANGED))
    assert stage.names(DEPLOYMENTS) == [name]
    without = replace(stage.pipeline, spec=a_pipeline(deploy=None))
    stage.do(StopJob(name, Reason.SPEC_CHANGED), pipeline=without)
    assert (stage.names(DEPLOYMENTS), stage.names(SERVICES)) == ([], [])


def test_a_service_that_is_somebody_elses_is_left_alone_and_named(stage):
    stage.do(stage.create("deploy"))
    theirs = stage.store.put(SERVICE, {"spec": {"selector": {"app": "theirs"}}})
    name = stage.templates["deploy"].name
    with pytest.raises(ClusterError, match="was not made for this pipeline"):
        stage.do(SwitchTraffic("deploy", name))
    assert stage.store.objects[SERVICE] == theirs
    assert stage.refused()[name].reason is Reason.DEPENDENCY_NOT_READY


@pytest.mark.parametrize(("one", "other"), [("a.b", "a-b"), ("1a", "p1a"), ("1a", "p-1a"), ("a.b", "a.b-x")])
def test_no_two_pipelines_share_a_service(one, other):
    assert service_name(one) != service_name(other)
    for name in (one, other, "x" * 253, f"{'9.' * 100}9"):
        assert len(service_name(name)) <= 63
        assert service_name(name)[0].isalpha()
        assert "." not in service_name(name)


def test_what_is_refused_keeps_nothing_else_from_being_done(stage):
    stage.do(stage.create("deploy"))
    [server] = stage.names(DEPLOYMENTS)
    stage.store.reject["jobs"] = ApiError(403, "exceeded quota: jobs=1", "Forbidden")
    with pytest.raises(ApiError, match="quota"):
        stage.do(stage.create("train"), StopJob(server, Reason.SPEC_CHANGED))
    assert stage.names(DEPLOYMENTS) == []
    assert stage.refused()[stage.templates["train"].name].reason is Reason.WAITING_FOR_QUOTA


def test_a_refusal_that_is_worded_otherwise_each_time_is_told_once_and_forgotten_when_it_is_over(stage):
    name = stage.templates["train"].name
    for words in ("denied, request 1", "denied, request 2"):
        stage.store.reject["jobs"] = ApiError(403, words, "Forbidden")
        with pytest.raises(ApiError):
            stage.do(stage.create("train"))
        assert "request 1" in stage.refused()[name].message
    stage.store.reject.clear()
    stage.do(stage.create("train"))
    assert stage.refused() == {}


def test_no_attempt_begins_beside_a_job_of_the_one_before(stage):
    scenario = Scenario().run("prepare")
    before = scenario.start("train")
    scenario.cluster.evict(before)
    scenario.reconcile_until_stable()
    second = scenario.attempt("train").job
    pipeline = replace(stage.pipeline, status=scenario.status)
    template = replace(stage.templates["train"], name=second)
    late = {"metadata": {"ownerReferences": owner_references(pipeline)}, "status": {}}
    stage.store.put(f"{JOBS}/{before}", late)
    with pytest.raises(ClusterError, match="still there"):
        stage.do(CreateJob(template), pipeline=pipeline)
    assert stage.names(JOBS) == []
    assert f"delete {JOBS}/{before} Foreground" in stage.store.writes
    stage.store.put(f"{JOBS}/{before}", {**late, "status": {"conditions": [over("Failed")]}})
    stage.do(CreateJob(template), pipeline=pipeline)
    assert second in stage.names(JOBS)


def test_a_pipeline_that_was_made_anew_is_not_forgotten_with_the_old_one(stage):
    new = {"metadata": {"namespace": "team", "name": "demo", "uid": "new"}}
    stage.books.update_pipeline(new)
    stage.books.update_pod(a_pod())
    stage.books.update_pipeline({"metadata": {**new["metadata"], "uid": "old"}}, gone=True)
    assert stage.books.pipelines == {Key("team", "demo"): new}
    assert len(stage.books.pods) == 1
    stage.books.update_pipeline(new, gone=True)
    assert (stage.books.pipelines, stage.books.pods) == ({}, {})


def test_a_status_that_is_refused_is_written_without_progress_and_the_work_goes_on(stage, caplog):
    where = "/apis/finetune.dev/v1alpha1/namespaces/team/finetunepipelines/demo"
    stage.store.put(where, {})
    scenario = Scenario().run("prepare")
    scenario.cluster.progress(scenario.start("train"), step=3, note="something inedible")
    scenario.reconcile_until_stable()
    stage.store.unchangeable["inedible"] = ApiError(422, "status.stages.train.progress: Invalid value")
    asyncio.run(stage.cluster.write_status(stage.pipeline, scenario.status))
    kept = stage.store.objects[where]["status"]["stages"]["train"]
    assert kept["attempts"]
    assert "progress" not in kept
    assert "without progress" in caplog.text


def test_a_status_that_is_refused_for_another_reason_is_not_written_twice(stage):
    stage.store.unchangeable["status"] = ApiError(503, "not now")
    with pytest.raises(ApiError, match="not now"):
        asyncio.run(stage.cluster.write_status(stage.pipeline, Scenario().reconcile_until_stable().status))
