"""Observe the Jobs of a pipeline: what the cache has, what is read from the API server, and what is believed."""

import asyncio

import pytest
from support.operator.cluster_objects import (
    job_of,
    pipeline_object,
    pod_of,
    running_status,
)
from support.operator.fake_api import FakeApi
from support.operator.pods import (
    ENDED,
    JOB,
    completed,
    job_condition,
    running,
    terminated,
)

from finetune_operator.api.conditions import Reason
from finetune_operator.core.observation import JobState
from finetune_operator.kubernetes.cache.cache import (
    JOBS,
    PIPELINES,
    PODS,
    ResourceCache,
)
from finetune_operator.kubernetes.cluster import KubernetesCluster
from finetune_operator.kubernetes.pipeline_object import parse_pipeline
from finetune_operator.kubernetes.pods.probe import NoProbe
from finetune_operator.kubernetes.pods.progress import NoProgress

JOB_PATH = f"/apis/batch/v1/namespaces/team/jobs/{JOB}"
POD_PATH = f"/api/v1/namespaces/team/pods/{JOB}-xyz"


class Observed:
    """A pipeline whose attempt of train runs, with these objects in the cache."""

    def __init__(self, *, seen=True, jobs=(), pods=()):
        self.api = FakeApi()
        self.cache = ResourceCache()
        self.cluster = KubernetesCluster(self.api, self.cache, NoProgress(), NoProbe())
        attempt = {"createdAt": ENDED} if seen else {}
        actual = pipeline_object(status=running_status(JOB, **attempt))
        self.pipeline = parse_pipeline(actual)
        for kind, objects in ((PIPELINES, [actual]), (JOBS, jobs), (PODS, pods)):
            for child in objects:
                self.cache.update(kind, child)

    def jobs(self):
        return asyncio.run(self.cluster.observe_children(self.pipeline)).jobs


def succeeded(**more):
    pod = pod_of(state=completed(), version=5, **more)
    pod["status"]["phase"] = "Succeeded"
    return pod


def test_cached_job_and_pod_are_observed_without_a_request():
    observed = Observed(jobs=[job_of()], pods=[pod_of(state=running())])
    assert observed.jobs()[JOB].state is JobState.RUNNING
    assert observed.api.reads == []


def test_pods_result_is_believed_before_its_job_is_complete():
    job = Observed(jobs=[job_of()], pods=[succeeded()]).jobs()[JOB]
    assert job.state == JobState.COMPLETE
    assert job.message.result.stage == "train"


def test_pod_whose_owner_is_another_job_is_not_believed():
    """Its author may write any label and any name of an owner, but cannot know a Job's uid beforehand."""
    pod = succeeded()
    pod["metadata"]["ownerReferences"][0]["uid"] = "forged"
    job = Observed(jobs=[job_of()], pods=[pod]).jobs()[JOB]
    assert job.state == JobState.WAITING
    assert job.message is None


def test_job_that_the_cache_has_missed_is_read():
    observed = Observed()
    observed.api.put(JOB_PATH, job_of())
    assert observed.jobs()[JOB].state is JobState.WAITING
    assert observed.cache.jobs.get(("team", JOB))


def test_end_of_a_missed_pod_is_read():
    observed = Observed(jobs=[job_of("demo", "train", job_condition("Failed"))])
    pod = pod_of(state=terminated(65, "bad data"))
    pod["status"]["phase"] = "Failed"
    observed.api.put(POD_PATH, pod)
    assert observed.jobs()[JOB].exit_code == 65


def test_job_that_was_never_seen_costs_no_request():
    observed = Observed(seen=False)
    assert observed.jobs() == {}
    assert observed.api.reads == []


def test_job_that_is_gone_without_a_trace_is_missing():
    assert Observed().jobs() == {}


def test_own_job_that_no_attempt_has_is_observed():
    """A late request of an earlier leader has created it."""
    observed = Observed(
        jobs=[job_of(), job_of("demo", "prepare")], pods=[pod_of(state=running())]
    )
    assert observed.jobs()["demo-prepare-a1"].live


def test_job_of_an_earlier_pipeline_of_the_same_name_is_not_own():
    earlier = job_of(
        "demo",
        "prepare",
        ownerReferences=[{"kind": "FineTunePipeline", "uid": "earlier"}],
    )
    assert set(Observed(jobs=[job_of(), earlier]).jobs()) == {JOB}


@pytest.mark.parametrize(
    ("kind", "name", "pods"), [("Job", JOB, []), ("Pod", f"{JOB}-xyz", [pod_of()])]
)
def test_warning_event_explains_a_process_that_does_not_start(kind, name, pods):
    observed = Observed(jobs=[job_of()], pods=pods)
    involved = {"namespace": "team", "kind": kind, "name": name}
    event = {
        "metadata": {},
        "type": "Warning",
        "involvedObject": involved,
        "lastTimestamp": ENDED,
    }
    message = (
        "pods is forbidden: exceeded quota: team, requested: pods=1"
        if kind == "Job"
        else "MountVolume.SetUp failed for volume pvc-1"
    )
    observed.cache.update("events", event | {"message": message})
    expected = Reason.WAITING_FOR_QUOTA if kind == "Job" else Reason.VOLUME_NOT_READY
    assert observed.jobs()[JOB].blocker.reason is expected


def test_pods_watch_behind_the_jobs_watch_loses_no_result():
    observed = Observed(
        jobs=[job_of("demo", "train", job_condition("Complete"))],
        pods=[pod_of(state=running(), version=3)],
    )
    observed.api.put(POD_PATH, succeeded())
    job = observed.jobs()[JOB]
    assert job.state == JobState.COMPLETE
    assert job.message.result.stage == "train"
