"""Observe a server and its pods, and find what makes it fail or blocks it."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from support.operator.fake_api import FakeApi
from support.operator.pods import (
    Object,
    a_pod,
    controller_reference,
    running,
    terminated,
    unschedulable,
)
from support.operator.server_objects import PIPELINE, deployment_of
from typing_extensions import override

from finetune_operator.api.conditions import Reason
from finetune_operator.core.observation import JobState
from finetune_operator.kubernetes.cache.cache import DEPLOYMENTS, PODS, ResourceCache
from finetune_operator.kubernetes.cache.change import NO_CHANGE
from finetune_operator.kubernetes.pods.probe import NoProbe, ProbeResult
from finetune_operator.kubernetes.servers import Servers, replica_failure
from finetune_operator.kubernetes.translate.pod import ObservedPod

NOW = datetime(2030, 1, 1, 0, 10, tzinfo=UTC)


def servers_of(deployment: Object, *pods: Object, probes: Any = None) -> Servers:
    """Return Servers whose cache holds these objects."""
    cache = ResourceCache()
    name = deployment["metadata"]["name"]
    cache.update(DEPLOYMENTS, deployment)
    for number, pod in enumerate(pods):
        owner = controller_reference("ReplicaSet", f"{name}-5d")
        meta = {
            "labels": {"finetune.dev/server": name},
            "uid": f"uid-{number}",
            "ownerReferences": [owner],
        }
        cache.update(
            PODS,
            {
                **pod,
                "metadata": {**pod["metadata"], "name": f"{name}-{number}", **meta},
            },
        )
    return Servers(FakeApi(), cache, probes or NoProbe())


def observed(
    *pods: Object,
    ready: int = 0,
    replicas: int = 1,
    probes: Any = None,
    conditions: tuple[Object, ...] = (),
):
    """Return the attempt as observed from these pods."""
    deployment = deployment_of(replicas=replicas)
    deployment["status"] = {"readyReplicas": ready, "conditions": list(conditions)}
    servers = servers_of(deployment, *pods, probes=probes)
    name = deployment["metadata"]["name"]
    return asyncio.run(servers.observe_attempt(PIPELINE, name, NOW))


class Probed(NoProbe):
    """A probe that has ended for every pod."""

    def __init__(self, result: ProbeResult) -> None:
        self._result = result

    @override
    def result(self, pod: ObservedPod) -> ProbeResult:
        return self._result


@pytest.mark.parametrize(("is_permanent", "code"), [(True, 64), (False, None)])
def test_answer_that_fails_ends_the_attempt(is_permanent, code):
    probes = Probed(ProbeResult(failure="no text", is_permanent=is_permanent))
    pod = a_pod(running())
    pod["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    job = observed(pod, ready=1, probes=probes)
    assert (job.state, job.exit_code) == (JobState.FAILED, code)
    assert job.message.failure.message == "no text"


def init_status(state: Object, restarts: int = 0) -> Object:
    return {
        "status": {
            "initContainerStatuses": [
                {"name": "verify", "restartCount": restarts, **state}
            ]
        }
    }


def test_server_that_loads_its_model_is_running():
    assert observed(a_pod(running())).state is JobState.RUNNING


def test_model_that_differs_from_push_fails_the_attempt():
    job = observed(
        a_pod(
            None,
            phase="Pending",
            **init_status({"lastState": terminated(66, "holds another model")}),
        )
    )
    assert (job.state, job.exit_code) == (JobState.FAILED, 66)
    assert "holds another model" in job.message.failure.message


@pytest.mark.parametrize(
    ("restarts", "state"), [(1, JobState.RUNNING), (3, JobState.FAILED)]
)
@pytest.mark.parametrize("code", [0, 1])
def test_crash_loop_fails_after_three_restarts(restarts, state, code):
    pod = a_pod(running())
    pod["status"]["containerStatuses"][0] |= {
        "restartCount": restarts,
        "lastState": terminated(code, "no such option"),
    }
    assert observed(pod).state is state


def test_crash_loop_of_the_verification_fails():
    job = observed(
        a_pod(
            None,
            phase="Pending",
            **init_status({"lastState": terminated(1, "PermissionError")}, restarts=3),
        )
    )
    assert job.state is JobState.FAILED
    assert "PermissionError" in job.message.failure.message


def test_image_pull_error_of_the_init_container_is_a_blocker():
    waiting = {
        "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    }
    pod = a_pod(
        {"waiting": {"reason": "PodInitializing"}},
        phase="Pending",
        **init_status(waiting),
    )
    assert observed(pod).blocker.reason is Reason.IMAGE_PULL_FAILED


def test_unschedulable_replica_is_the_blocker():
    scheduled = a_pod(running())
    unscheduled = a_pod(None, unschedulable("0/3 nodes"), phase="Pending")
    for pods in ((scheduled, unscheduled), (unscheduled, scheduled)):
        job = observed(*pods, replicas=2, ready=1)
        assert (job.state is JobState.FAILED, job.blocker and job.blocker.reason) in {
            (False, None),
            (False, Reason.WAITING_FOR_CAPACITY),
        }
    ready = a_pod(running(), {"type": "Ready", "status": "True"})
    job = observed(ready, unscheduled, replicas=2, ready=1)
    assert job.blocker.reason is Reason.WAITING_FOR_CAPACITY


def test_deployment_without_its_labels_counts_as_deleted():
    deployment = deployment_of()
    del deployment["metadata"]["labels"]["finetune.dev/stage"]
    servers = servers_of(deployment)
    assert asyncio.run(servers.observe(PIPELINE)) == {}
    assert (
        asyncio.run(
            servers.observe_attempt(PIPELINE, deployment["metadata"]["name"], NOW)
        )
        is None
    )


def test_pod_with_foreign_controller_is_not_cached():
    """The labels are not enough: the operator sends requests to the pods in its cache."""
    cache = ResourceCache()
    foreign = a_pod(running())
    foreign["metadata"] |= {
        "labels": {"finetune.dev/server": deployment_of()["metadata"]["name"]},
        "ownerReferences": [],
    }
    assert cache.update(PODS, foreign) == NO_CHANGE
    assert list(cache.all_pods()) == []


def test_out_of_memory_server_is_not_restarted():
    pod = a_pod(running())
    pod["status"]["containerStatuses"][0] |= {
        "restartCount": 1,
        "lastState": terminated(137, reason="OOMKilled"),
    }
    assert observed(pod).out_of_memory


def test_replica_that_a_quota_refuses_is_the_blocker():
    """Beside a ready replica, whose time until it was ready is over."""
    refused = {
        "type": "ReplicaFailure",
        "status": "True",
        "message": "exceeded quota: pods=1",
    }
    ready = a_pod(running(), {"type": "Ready", "status": "True"})
    job = observed(ready, replicas=2, ready=1, conditions=(refused,))
    assert job.state is JobState.WAITING
    assert job.blocker.reason is Reason.WAITING_FOR_QUOTA


def test_replica_failure_is_read_from_the_condition():
    failed = {
        "type": "ReplicaFailure",
        "status": "True",
        "message": "exceeded quota: pods=1",
    }
    assert (
        replica_failure({"status": {"conditions": [failed]}})
        == "exceeded quota: pods=1"
    )
    assert (
        replica_failure({"status": {"conditions": [{**failed, "status": "False"}]}})
        == ""
    )
    assert replica_failure(None) == ""
