"""Applying actions: what the operator creates, changes and deletes, and which foreign objects it leaves alone."""

import asyncio
from dataclasses import replace

import pytest
from support.fake_api import FakeApi
from support.pods import a_pod, job_condition
from support.scenario import Scenario, a_pipeline

from finetune_operator.api.conditions import Reason
from finetune_operator.core.metadata import service_name
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.core.plan import CreateJob, StopJob, SwitchTraffic
from finetune_operator.errors import ClusterError, Conflict
from finetune_operator.kubernetes.cache import ResourceCache
from finetune_operator.kubernetes.cluster import KubernetesCluster
from finetune_operator.kubernetes.pods.probe import NoProbe
from finetune_operator.kubernetes.pods.progress import NoProgress
from finetune_operator.kubernetes.resources.owner_references import owner_references
from finetune_operator.kubernetes.translate.api_errors import ApiError

JOBS = "/apis/batch/v1/namespaces/team/jobs"
DEPLOYMENTS = "/apis/apps/v1/namespaces/team/deployments"
SERVICES = "/api/v1/namespaces/team/services"
SERVICE = f"{SERVICES}/demo-deploy"


class EmptyCluster:
    """The job templates of a finished pipeline, and a cluster without objects to apply them to."""

    def __init__(self, **changes):
        scenario = Scenario(a_pipeline(**changes)).finish()
        self.templates = {job.template.stage: job.template for job in scenario.cluster.jobs.values()}
        self.pipeline = Pipeline(Key("team", "demo"), "uid-1", 1, a_pipeline(**changes))
        self.api, self.cache = FakeApi(), ResourceCache()
        self.cluster = KubernetesCluster(self.api, self.cache, NoProgress(), NoProbe())

    def create(self, stage):
        return CreateJob(self.templates[stage])

    def apply(self, *actions, pipeline=None):
        asyncio.run(self.cluster.apply(pipeline or self.pipeline, actions))

    def blocked(self):
        return asyncio.run(self.cluster.observe(self.pipeline)).blocked

    def names(self, path):
        return sorted(where.rpartition("/")[2] for where in self.api.objects if where.startswith(f"{path}/"))

    def traffic_target(self):
        return self.api.objects[SERVICE]["spec"]["selector"]["finetune.dev/server"]


@pytest.fixture
def env():
    return EmptyCluster()


def test_service_follows_switch_traffic_to_the_new_server(env):
    env.apply(env.create("deploy"))
    [first] = env.names(DEPLOYMENTS)
    assert env.names(SERVICES) == []
    env.apply(SwitchTraffic("deploy", first))
    assert env.traffic_target() == first
    second = replace(env.templates["deploy"], name="demo-deploy-a2")
    env.apply(CreateJob(second))
    env.apply(SwitchTraffic("deploy", second.name))
    assert env.traffic_target() == second.name
    env.apply(StopJob(first, Reason.SPEC_CHANGED))
    assert env.names(DEPLOYMENTS) == [second.name]


def test_server_with_traffic_is_not_stopped_on_a_stale_cache(env):
    """The Service is read from the API server; without a deploy stage, server and Service are deleted."""
    env.apply(env.create("deploy"))
    [name] = env.names(DEPLOYMENTS)
    env.apply(SwitchTraffic("deploy", name))
    env.cache.services.clear()
    with pytest.raises(Conflict):
        env.apply(StopJob(name, Reason.SPEC_CHANGED))
    assert env.names(DEPLOYMENTS) == [name]
    without = replace(env.pipeline, spec=a_pipeline(deploy=None))
    env.apply(StopJob(name, Reason.SPEC_CHANGED), pipeline=without)
    assert (env.names(DEPLOYMENTS), env.names(SERVICES)) == ([], [])


def test_foreign_service_blocks_and_is_not_changed(env):
    env.apply(env.create("deploy"))
    foreign = env.api.put(SERVICE, {"spec": {"selector": {"app": "foreign"}}})
    name = env.templates["deploy"].name
    with pytest.raises(ClusterError, match="was not created for this pipeline"):
        env.apply(SwitchTraffic("deploy", name))
    assert env.api.objects[SERVICE] == foreign
    assert env.blocked()[name].reason is Reason.DEPENDENCY_NOT_READY


@pytest.mark.parametrize(("one", "other"), [("a.b", "a-b"), ("1a", "p1a"), ("1a", "p-1a"), ("a.b", "a.b-x")])
def test_service_names_are_unique_and_valid(one, other):
    assert service_name(one) != service_name(other)
    for name in (one, other, "x" * 253, f"{'9.' * 100}9"):
        assert len(service_name(name)) <= 63
        assert service_name(name)[0].isalpha()
        assert "." not in service_name(name)


def test_rejected_action_does_not_prevent_the_others(env):
    env.apply(env.create("deploy"))
    [server] = env.names(DEPLOYMENTS)
    env.api.rejected_creates["jobs"] = ApiError(403, "exceeded quota: jobs=1", "Forbidden")
    with pytest.raises(ApiError, match="quota"):
        env.apply(env.create("train"), StopJob(server, Reason.SPEC_CHANGED))
    assert env.names(DEPLOYMENTS) == []
    assert env.blocked()[env.templates["train"].name].reason is Reason.WAITING_FOR_QUOTA


def test_rejection_keeps_its_first_message_until_success(env):
    """Some policies word each rejection anew; a new message would change the status at every reconcile."""
    name = env.templates["train"].name
    for message in ("denied, request 1", "denied, request 2"):
        env.api.rejected_creates["jobs"] = ApiError(403, message, "Forbidden")
        with pytest.raises(ApiError):
            env.apply(env.create("train"))
        assert "request 1" in env.blocked()[name].message
    env.api.rejected_creates.clear()
    env.apply(env.create("train"))
    assert env.blocked() == {}


def test_attempt_waits_until_the_previous_job_has_finished(env):
    """A late request of an earlier leader may create the Job of an attempt that counts as ended."""
    scenario = Scenario().run("prepare")
    previous = scenario.start("train")
    scenario.cluster.evict(previous)
    scenario.reconcile_until_stable()
    second = scenario.attempt("train").job
    pipeline = replace(env.pipeline, status=scenario.status)
    template = replace(env.templates["train"], name=second)
    late = {"metadata": {"ownerReferences": owner_references(pipeline)}, "status": {}}
    env.api.put(f"{JOBS}/{previous}", late)
    with pytest.raises(ClusterError, match="still exists"):
        env.apply(CreateJob(template), pipeline=pipeline)
    assert env.names(JOBS) == []
    assert f"delete {JOBS}/{previous} Foreground" in env.api.writes
    env.api.put(f"{JOBS}/{previous}", {**late, "status": {"conditions": [job_condition("Failed")]}})
    env.apply(CreateJob(template), pipeline=pipeline)
    assert second in env.names(JOBS)


def test_deletion_of_a_namesake_keeps_the_new_pipeline(env):
    """The late deletion event of an earlier pipeline of the same name has another uid."""
    new = {"metadata": {"namespace": "team", "name": "demo", "uid": "new"}}
    env.cache.update_pipeline(new)
    env.cache.update_pod(a_pod())
    env.cache.update_pipeline({"metadata": {**new["metadata"], "uid": "old"}}, gone=True)
    assert env.cache.pipelines == {Key("team", "demo"): new}
    assert len(env.cache.pods) == 1
    env.cache.update_pipeline(new, gone=True)
    assert (env.cache.pipelines, env.cache.pods) == ({}, {})


def test_rejected_status_is_written_without_progress(env, caplog):
    where = "/apis/finetune.dev/v1alpha1/namespaces/team/finetunepipelines/demo"
    env.api.put(where, {})
    scenario = Scenario().run("prepare")
    scenario.cluster.progress(scenario.start("train"), step=3, note="something invalid")
    scenario.reconcile_until_stable()
    env.api.rejected_patches["something invalid"] = ApiError(422, "status.stages.train.progress: Invalid value")
    asyncio.run(env.cluster.write_status(env.pipeline, scenario.status))
    stored = env.api.objects[where]["status"]["stages"]["train"]
    assert stored["attempts"]
    assert "progress" not in stored
    assert "without progress" in caplog.text


def test_status_is_not_rewritten_after_another_error(env):
    env.api.rejected_patches["status"] = ApiError(503, "not now")
    with pytest.raises(ApiError, match="not now"):
        asyncio.run(env.cluster.write_status(env.pipeline, Scenario().reconcile_until_stable().status))
