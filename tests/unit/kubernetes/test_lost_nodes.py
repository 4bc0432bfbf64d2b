"""Pods on lost nodes: since when a node counts as lost, and what the operator deletes to replace their attempt."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from support.operator.cluster_objects import pipeline_object, running_status
from support.operator.fake_api import FakeApi
from support.operator.pods import (
    JOB,
    NOW,
    a_job,
    a_pod,
    completed,
    disrupted,
    observed_job,
    running,
)

from finetune_operator.api.conditions import Reason
from finetune_operator.core.planning.actions import ReplaceLost
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
from finetune_operator.kubernetes.resources.owner_references import owner_references
from finetune_operator.kubernetes.translate.pod import ObservedPod

JOB_PATH = f"/apis/batch/v1/namespaces/team/jobs/{JOB}"
POD_PATH = "/api/v1/namespaces/team/pods"
RUNNING = running_status(JOB)
PIPELINE = "/apis/finetune.dev/v1alpha1/namespaces/team/finetunepipelines/demo"


def deleted(seconds):
    """Return the metadata of a pod whose grace period ended so many seconds before NOW."""
    return {"deletionTimestamp": (NOW - timedelta(seconds=seconds)).isoformat()}


@pytest.mark.parametrize(
    ("pod", "since"),
    [
        (a_pod(running()), None),
        (a_pod(running(), **deleted(59)), None),
        (a_pod(running(), **deleted(60)), timedelta()),
        (a_pod(running(), **deleted(100)), timedelta(seconds=40)),
        (a_pod(completed(), phase="Succeeded", **deleted(100)), None),
    ],
    ids=["runs", "ends", "lost now", "lost", "has ended"],
)
def test_node_is_lost_a_minute_after_the_grace_period(pod, since):
    job = observed_job(JOB, a_job(), [ObservedPod(pod)], NOW)
    assert job.lost_since == (None if since is None else NOW - since)


class Clocks:
    """A cache whose clock starts at NOW, and an API server whose clock is before or behind it."""

    def __init__(self, ahead):
        self.ahead = ahead
        self.now = NOW
        self.cache = ResourceCache()
        self.cache.clock = lambda: self.now
        self.cache.update(PIPELINES, {**pipeline_object(), "status": RUNNING})
        self.receive(1, a_pod(running()))

    def receive(self, version, pod):
        pod["metadata"]["resourceVersion"] = str(version)
        self.cache.update(PODS, pod)

    def delete(self, version=2, grace=30):
        """Delete the pod: the API server adds the grace period to the time of its own clock."""
        ends_at = self.now + self.ahead + timedelta(seconds=grace)
        meta = {
            "deletionTimestamp": ends_at.isoformat(),
            "deletionGracePeriodSeconds": grace,
        }
        self.receive(version, a_pod(running(), **meta))
        return meta

    def after(self, seconds):
        self.now += timedelta(seconds=seconds)
        pods = self.cache.pods_of("team", JOB)
        return observed_job(JOB, a_job(), pods, self.now)


@pytest.mark.parametrize("hours", [-3, 0, 3])
def test_node_is_lost_by_the_operators_own_clock(hours):
    """A clock of the API server that is hours behind would end a pod in its grace period, and lose what it saves."""
    clocks = Clocks(timedelta(hours=hours))
    meta = clocks.delete()
    assert clocks.after(0).lost_since is None
    assert clocks.after(89).lost_since is None
    job = clocks.after(1)
    assert job.lost_since == clocks.now
    assert job.blocker.reason is Reason.NODE_LOST
    # A later version of the same deletion does not begin anew.
    clocks.receive(3, a_pod(running(), disrupted("Taint"), **meta))
    assert clocks.after(10).lost_since == clocks.now - timedelta(seconds=10)


def test_shorter_grace_period_begins_when_it_is_seen():
    clocks = Clocks(timedelta())
    clocks.delete(grace=600)
    assert clocks.after(300).lost_since is None
    clocks.delete(version=3, grace=10)
    assert clocks.after(69).lost_since is None
    assert clocks.after(1).lost_since == clocks.now


class Cluster:
    """A pipeline's Job with two pods, of which one is on a lost node."""

    def __init__(self, owner=None):
        self.api = FakeApi()
        cache = ResourceCache()
        stored = self.api.put(PIPELINE, pipeline_object())
        cache.update(PIPELINES, stored)
        self.pipeline = parse_pipeline(stored)
        owners = owner_references(self.pipeline)
        if owner:
            owners = [{**owners[0], "uid": owner}]
        job = {**a_job(), "spec": {"completions": 2}}
        job["metadata"]["ownerReferences"] = owners
        cache.update(JOBS, self.api.put(JOB_PATH, job))
        long_ago = datetime.now(UTC) - timedelta(hours=1)
        lost = {"deletionTimestamp": long_ago.isoformat()}
        cache.clock = lambda: long_ago
        for index, more in enumerate([{}, lost]):
            name = f"{JOB}-{index}"
            pod = a_pod(running(), name=name, uid=f"u{index}", **more)
            index_label = {"batch.kubernetes.io/job-completion-index": str(index)}
            pod["metadata"]["labels"] |= index_label
            cache.update(PODS, self.api.put(f"{POD_PATH}/{name}", pod))
        self.cluster = KubernetesCluster(self.api, cache, NoProgress(), NoProbe())

    def replace(self):
        asyncio.run(self.cluster.apply(self.pipeline, [ReplaceLost(JOB)]))


def test_job_is_deleted_before_its_pods_on_lost_nodes():
    env = Cluster()
    env.replace()
    assert env.api.writes == [
        f"delete {JOB_PATH} Foreground",
        f"delete {POD_PATH}/{JOB}-1 Background",
    ]


def test_job_of_another_owner_keeps_its_pods():
    env = Cluster(owner="another")
    env.replace()
    assert env.api.writes == []
