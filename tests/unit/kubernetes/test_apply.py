"""Applying actions: what the operator creates, changes and deletes, and which foreign objects it leaves alone."""

import asyncio
from dataclasses import replace

import pytest
from support.operator.cluster_objects import pipeline_object
from support.operator.fake_api import FakeApi
from support.operator.scenario import Scenario, a_pipeline

from finetune_operator.api.conditions import Reason
from finetune_operator.core.metadata import service_name
from finetune_operator.core.observation import ClaimChange
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.core.planning.actions import (
    ChangeWorkspace,
    CreateJob,
    CreateWorkspace,
    DeleteJob,
    DeletePipeline,
    DeleteService,
    ScaleServer,
    StopJob,
    SwitchTraffic,
)
from finetune_operator.errors import Conflict
from finetune_operator.kubernetes.cache.cache import PIPELINES, ResourceCache
from finetune_operator.kubernetes.cluster import KubernetesCluster
from finetune_operator.kubernetes.pipeline_object import parse_pipeline
from finetune_operator.kubernetes.pods.probe import NoProbe
from finetune_operator.kubernetes.pods.progress import NoProgress
from finetune_operator.kubernetes.resources.owner_references import owner_references
from finetune_operator.kubernetes.translate.api_errors import ApiError

JOBS = "/apis/batch/v1/namespaces/team/jobs"
DEPLOYMENTS = "/apis/apps/v1/namespaces/team/deployments"
SERVICES = "/api/v1/namespaces/team/services"
SERVICE = f"{SERVICES}/demo-deploy"
CLAIM = "/api/v1/namespaces/team/persistentvolumeclaims/demo-workspace"
PIPELINE = "/apis/finetune.dev/v1alpha1/namespaces/team/finetunepipelines/demo"
QUOTA = ApiError(403, "exceeded quota: jobs=1", "Forbidden")
UNAVAILABLE = ApiError(503, "not now")


class EmptyCluster:
    """The job templates of a finished pipeline, and a cluster without objects to apply them to."""

    def __init__(self):
        scenario = Scenario(a_pipeline()).finish()
        self.templates = {
            job.template.stage: job.template for job in scenario.cluster.jobs.values()
        }
        self.api = FakeApi()
        self.cache = ResourceCache()
        stored = self.api.put(PIPELINE, pipeline_object())
        self.cache.update(PIPELINES, stored)
        self.pipeline = parse_pipeline(stored)
        self.cluster = KubernetesCluster(self.api, self.cache, NoProgress(), NoProbe())

    def create(self, stage):
        return CreateJob(self.templates[stage])

    def apply(self, *actions, pipeline=None):
        return asyncio.run(self.cluster.apply(pipeline or self.pipeline, actions))

    def names(self, path):
        return sorted(
            where.rpartition("/")[2]
            for where in self.api.objects
            if where.startswith(f"{path}/")
        )

    def traffic_target(self):
        return self.api.objects[SERVICE]["spec"]["selector"]["finetune.dev/server"]

    def start_server(self):
        self.apply(self.create("deploy"))
        [name] = self.names(DEPLOYMENTS)
        return name

    def put_job(self, name, uid):
        owners = owner_references(replace(self.pipeline, uid=uid))
        return self.api.put(
            f"{JOBS}/{name}", {"metadata": {"ownerReferences": owners}, "status": {}}
        )


@pytest.fixture
def env():
    return EmptyCluster()


# Servers and their Service.


def test_service_follows_switch_traffic_to_the_new_server(env):
    first = env.start_server()
    assert env.names(SERVICES) == []
    env.apply(SwitchTraffic("deploy", first))
    assert env.traffic_target() == first
    second = replace(env.templates["deploy"], name="demo-deploy-a2")
    env.apply(CreateJob(second))
    env.apply(SwitchTraffic("deploy", second.name))
    assert env.traffic_target() == second.name
    env.apply(StopJob(first, Reason.SPEC_CHANGED))
    assert env.names(DEPLOYMENTS) == [second.name]


def test_server_is_scaled_in_its_deployment(env):
    name = env.start_server()
    before = env.api.objects[f"{DEPLOYMENTS}/{name}"]["spec"]["template"]
    env.apply(ScaleServer(name, 3))
    spec = env.api.objects[f"{DEPLOYMENTS}/{name}"]["spec"]
    assert spec["replicas"] == 3
    assert spec["template"] == before
    observed = asyncio.run(env.cluster.servers.observe(env.pipeline))
    assert observed[name].replicas == 3


def test_switched_traffic_is_observed_without_a_watch_event(env):
    name = env.start_server()
    env.apply(SwitchTraffic("deploy", name))
    reads = len(env.api.reads)
    observed = asyncio.run(env.cluster.servers.observe(env.pipeline))
    assert observed[name].current is True
    assert len(env.api.reads) == reads


def test_deleted_service_is_only_the_pipelines_own(env):
    env.apply(SwitchTraffic("deploy", env.start_server()))
    env.apply(DeleteService(), pipeline=replace(env.pipeline, uid="another"))
    assert SERVICE in env.api.objects
    env.apply(DeleteService())
    assert SERVICE not in env.api.objects


def test_foreign_service_blocks_and_is_not_changed(env):
    name = env.start_server()
    env.api.put(SERVICE, {"spec": {"selector": {"app": "foreign"}}})
    refused = env.apply(SwitchTraffic("deploy", name))
    assert refused[name].reason is Reason.DEPENDENCY_NOT_READY
    assert "was not created for this pipeline" in refused[name].message
    assert env.api.objects[SERVICE]["spec"]["selector"] == {"app": "foreign"}


@pytest.mark.parametrize(
    ("first", "other"),
    [("a.b", "a-b"), ("1a", "p1a"), ("1a", "p-1a"), ("a.b", "a.b-x")],
)
def test_service_names_are_unique_and_valid(first, other):
    assert service_name(first) != service_name(other)
    for name in (first, other, "x" * 253, f"{'9.' * 100}9"):
        assert len(service_name(name)) <= 63
        assert service_name(name)[0].isalpha()
        assert "." not in service_name(name)


# Errors and refusals.


@pytest.mark.parametrize("error", [QUOTA, UNAVAILABLE], ids=["refusal", "error"])
def test_nothing_is_created_and_all_is_stopped_after_an_error(env, error):
    server = env.start_server()
    stray = "demo-stray"
    env.put_job(stray, env.pipeline.uid)
    env.api.rejected_creates["jobs"] = error
    actions = [
        env.create("prepare"),
        env.create("train"),
        StopJob(server, Reason.CANCELLED),
    ]
    actions += [DeleteService(), StopJob(stray, Reason.CANCELLED), DeletePipeline()]
    if error is QUOTA:
        refused = env.apply(*actions)
        assert {name: blocker.reason for name, blocker in refused.items()} == {
            env.templates["prepare"].name: Reason.WAITING_FOR_QUOTA
        }
    else:
        with pytest.raises(ApiError, match="not now"):
            env.apply(*actions)
    assert env.names(DEPLOYMENTS) == []
    assert env.names(JOBS) == []
    assert PIPELINE in env.api.objects


def test_failed_stop_does_not_prevent_the_other_stops(env):
    server = env.start_server()
    env.put_job("demo-stray", env.pipeline.uid)
    env.api.rejected_deletes["demo-stray"] = UNAVAILABLE
    with pytest.raises(ApiError, match="not now"):
        env.apply(
            StopJob("demo-stray", Reason.CANCELLED),
            StopJob(server, Reason.CANCELLED),
            env.create("train"),
        )
    assert env.names(DEPLOYMENTS) == []
    assert env.names(JOBS) == ["demo-stray"]


def test_first_of_several_errors_is_raised(env):
    for name, text in (("demo-one", "first"), ("demo-two", "second")):
        env.put_job(name, env.pipeline.uid)
        env.api.rejected_deletes[name] = ApiError(503, text)
    with pytest.raises(ApiError, match="first"):
        env.apply(
            StopJob("demo-one", Reason.CANCELLED), StopJob("demo-two", Reason.CANCELLED)
        )


def test_refused_change_of_the_claim_stops_no_stage(env):
    env.apply(CreateWorkspace())
    env.api.rejected_patches["requests"] = ApiError(
        403, "only dynamically provisioned pvc can be resized", "Forbidden"
    )
    grow = ChangeWorkspace(
        ClaimChange(
            "workspace.size", {"spec": {"resources": {"requests": {"storage": "9Ti"}}}}
        )
    )
    retain = ChangeWorkspace(
        ClaimChange(
            "workspace.whenDeleted", {"metadata": {"ownerReferences": [{"uid": "x"}]}}
        )
    )
    refused = env.apply(grow, retain, env.create("train"))
    assert set(refused) == {"workspace.size"}
    assert env.names(JOBS) == [env.templates["train"].name]
    assert env.api.objects[CLAIM]["metadata"]["ownerReferences"] == [{"uid": "x"}]


def test_job_is_not_created_without_its_claim(env):
    env.api.rejected_creates["persistentvolumeclaims"] = QUOTA
    assert set(env.apply(CreateWorkspace(), env.create("prepare"))) == {"workspace"}
    assert env.names(JOBS) == []


# Jobs.


def test_own_job_that_exists_is_taken_over(env):
    name = env.templates["train"].name
    env.put_job(name, env.pipeline.uid)
    assert env.apply(env.create("train")) == {}
    assert env.cache.jobs.get(("team", name))["metadata"]["uid"] == f"uid-of-{name}"


def test_foreign_job_of_the_same_name_is_a_refusal(env):
    name = env.templates["train"].name
    env.put_job(name, "another")
    refused = env.apply(env.create("train"))
    assert refused[name].reason is Reason.DEPENDENCY_NOT_READY
    assert "is not owned by this pipeline: delete it" in refused[name].message


def test_created_job_is_observed_without_a_watch_event(env):
    env.apply(env.create("train"))
    observed = asyncio.run(env.cluster.observe_children(env.pipeline))
    assert env.templates["train"].name in observed.jobs


@pytest.mark.parametrize(
    ("action", "propagation"),
    [
        (StopJob("demo-x", Reason.CANCELLED), "Foreground"),
        (DeleteJob("demo-x"), "Background"),
    ],
    ids=["stop", "delete"],
)
def test_deleted_job_is_only_the_pipelines_own(env, action, propagation):
    env.put_job("demo-x", "another")
    env.apply(action)
    assert env.names(JOBS) == ["demo-x"]
    env.cache.jobs.remove(("team", "demo-x"))
    env.put_job("demo-x", env.pipeline.uid)
    env.apply(action)
    assert env.names(JOBS) == []
    assert env.api.writes[-1] == f"delete {JOBS}/demo-x {propagation}"


def test_job_of_another_uid_than_the_cached_one_is_not_deleted(env):
    env.cache.update("jobs", env.put_job("demo-x", env.pipeline.uid))
    env.api.put(f"{JOBS}/demo-x", {"metadata": {"uid": "newer"}})
    with pytest.raises(Conflict):
        env.apply(DeleteJob("demo-x"))
    assert env.names(JOBS) == ["demo-x"]


def test_job_that_is_being_deleted_is_not_deleted_again(env):
    job = env.put_job("demo-x", env.pipeline.uid)
    job["metadata"] |= {"deletionTimestamp": "2030-01-01T00:00:00Z"}
    env.cache.update("jobs", env.api.put(f"{JOBS}/demo-x", job))
    env.apply(StopJob("demo-x", Reason.CANCELLED))
    assert env.names(JOBS) == ["demo-x"]


@pytest.mark.parametrize(
    "change", [{"uid": "newer"}, {"resource_version": "1"}], ids=str
)
def test_pipeline_that_has_changed_is_not_deleted(env, change):
    with pytest.raises(Conflict):
        env.apply(DeletePipeline(), pipeline=replace(env.pipeline, **change))
    assert PIPELINE in env.api.objects
    env.apply(DeletePipeline())
    assert PIPELINE not in env.api.objects


# The status.


def status_with_progress():
    scenario = Scenario().run("prepare")
    scenario.cluster.progress(scenario.start("train"), step=3, note="something invalid")
    return scenario.reconcile_until_stable().status


def test_written_status_is_trusted_without_a_read(env):
    status = status_with_progress()
    written = asyncio.run(env.cluster.write_status(env.pipeline, status))
    assert asyncio.run(env.cluster.read(Key("team", "demo"))) == written
    assert written.status == status
    again = asyncio.run(env.cluster.write_status(written, env.pipeline.status))
    assert int(again.resource_version) > int(written.resource_version)
    assert env.api.reads == []


def test_conflict_reads_what_another_client_has_written(env):
    newer = pipeline_object(generation=2)
    env.api.put(PIPELINE, newer)
    with pytest.raises(Conflict):
        asyncio.run(env.cluster.write_status(env.pipeline, status_with_progress()))
    read = asyncio.run(env.cluster.read(Key("team", "demo")))
    assert read.generation == 2
    asyncio.run(env.cluster.write_status(read, status_with_progress()))
    assert env.api.objects[PIPELINE]["status"]["stages"]


def test_status_of_a_deleted_pipeline_is_a_conflict(env):
    del env.api.objects[PIPELINE]
    with pytest.raises(Conflict, match="was deleted"):
        asyncio.run(env.cluster.write_status(env.pipeline, status_with_progress()))


def test_rejected_status_is_written_without_progress(env, caplog):
    env.api.rejected_patches["something invalid"] = ApiError(
        422, "status.stages.train.progress: Invalid value"
    )
    asyncio.run(env.cluster.write_status(env.pipeline, status_with_progress()))
    [stored] = [
        stage
        for stage in env.api.objects[PIPELINE]["status"]["stages"]
        if stage["name"] == "train"
    ]
    assert stored["attempts"]
    assert "progress" not in stored
    assert "without progress" in caplog.text


def test_status_is_not_rewritten_after_another_error(env):
    env.api.rejected_patches["status"] = UNAVAILABLE
    with pytest.raises(ApiError, match="not now"):
        asyncio.run(env.cluster.write_status(env.pipeline, status_with_progress()))
    assert env.api.objects[PIPELINE]["status"] == {}


def test_pipeline_that_is_being_deleted_is_not_read(env):
    deleting = pipeline_object(deletionTimestamp="2030-01-01T00:00:00Z")
    env.cache.update(PIPELINES, env.api.put(PIPELINE, deleting))
    assert asyncio.run(env.cluster.read(Key("team", "demo"))) is None


def test_late_deletion_of_a_namesake_keeps_the_new_pipeline(env):
    """The deletion event of an earlier pipeline of the same name has an older version."""
    env.cache.remove(PIPELINES, pipeline_object(version=1, uid="old"))
    assert asyncio.run(env.cluster.read(Key("team", "demo"))).uid == env.pipeline.uid


def test_foreign_job_of_an_attempt_is_not_observed(env):
    """The creation of the pipeline's own Job is refused, and a cancel or an edit ends the attempt."""
    scenario = Scenario()
    scenario.reconcile_until_stable()
    job = scenario.attempt("prepare").job
    env.cache.update("jobs", env.put_job(job, "another"))
    pipeline: Pipeline = replace(env.pipeline, status=scenario.status)
    assert asyncio.run(env.cluster.observe_children(pipeline)).jobs == {}
