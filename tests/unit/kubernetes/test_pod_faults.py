"""Ends of a pod with a reason of their own: limits of storage, and a node that ran out of a resource."""

import json

import pytest
from support.operator.pods import (
    ATTEMPT,
    JOB,
    NOW,
    a_job,
    a_pod,
    disrupted,
    job_condition,
    observed_job,
    terminated,
)

from finetune_operator.api.conditions import Reason
from finetune_operator.api.status import Outcome
from finetune_operator.core.attempts.endings import NON_RETRYABLE, classify_ending
from finetune_operator.kubernetes.cache.trim import trim_pod
from finetune_operator.kubernetes.translate.pod import ObservedPod

FAILED = job_condition("Failed", "BackoffLimitExceeded")
TOTAL = "Pod ephemeral local storage usage exceeds the total limit of containers 20Mi. "
OF_STAGE = 'Container stage exceeded its local ephemeral storage limit "20Mi". '
LOW = (
    "The node was low on resource: {}. Threshold quantity: 1Gi, available: 900Mi. "
    "Container stage was using 5Gi, request is 0, has larger consumption of {}. "
)
STATES = {
    "as the trainer ends": terminated(75),
    "killed": terminated(137),
    "not observed": terminated(137, reason="ContainerStatusUnknown"),
    "failed itself": terminated(70),
}


def ending_of(message, state, *conditions, limits=None):
    """Return the ending of an evicted pod."""
    status = {"reason": "Evicted", "message": message}
    raw = a_pod(state, *conditions, phase="Failed", status=status)
    raw["metadata"]["labels"]["finetune.dev/stage"] = "train"
    container = {
        "name": "stage",
        "resources": {"limits": limits or {}},
    }
    raw["spec"]["containers"] = [container]
    pod = ObservedPod(trim_pod(raw))
    return classify_ending(ATTEMPT, observed_job(JOB, a_job(FAILED), [pod], NOW))


LIMITS = {
    "pod": (TOTAL, "train.pod.resources.limits.ephemeral-storage to 40Mi"),
    "container": (OF_STAGE, "train.pod.resources.limits.ephemeral-storage to 40Mi"),
    "shared memory": (
        'Usage of EmptyDir volume "shm" exceeds the limit "64Mi". ',
        "raise train.pod.sharedMemory to 128Mi",
    ),
    "another volume": (
        'Usage of EmptyDir volume "envoy" exceeds the limit "1Gi". ',
        "raise the sizeLimit of the volume envoy to 2Gi",
    ),
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
@pytest.mark.parametrize(("message", "fix"), LIMITS.values(), ids=LIMITS)
def test_limit_of_storage_is_named_and_not_retried(message, fix, state):
    ending = ending_of(message, state, limits={"ephemeral-storage": "20Mi"})
    assert (ending.outcome, ending.reason) == (
        Outcome.FAILED,
        Reason.EPHEMERAL_STORAGE_EXCEEDED,
    )
    assert ending.reason in NON_RETRYABLE
    assert ending.message.startswith(message.rstrip(". "))
    assert fix in ending.message


def test_limit_of_storage_keeps_the_words_of_the_process():
    saved = terminated(75, json.dumps({"interruption": {"step": 4, "savedStep": 3}}))
    assert ending_of(TOTAL, saved).message.endswith(
        "stopped at step 4, saved at step 3"
    )


def test_limit_of_another_containers_storage_is_retried():
    message = 'Container logs exceeded its local ephemeral storage limit "20Mi". '
    ending = ending_of(message, terminated(75))
    assert ending.reason is Reason.STAGE_FAILED
    assert "the container logs, which an admission policy may have added" in (
        ending.message
    )


@pytest.mark.parametrize("resource", ["ephemeral-storage", "memory", "inodes", "pids"])
@pytest.mark.parametrize(
    "conditions", [(), (disrupted("TerminationByKubelet"),)], ids=["bare", "marked"]
)
def test_pressure_of_a_node_interrupts_and_names_the_request(resource, conditions):
    text = LOW.format(resource, resource)
    ending = ending_of(text, terminated(137), *conditions)
    assert (ending.outcome, ending.reason) == (
        Outcome.INTERRUPTED,
        Reason.NODE_PRESSURE,
    )
    assert ending.message.startswith("evicted on spot-1: The node was low on resource")
    has_fix = f"train.pod.resources.requests.{resource}" in ending.message
    assert has_fix is (resource in {"memory", "ephemeral-storage"})


def test_other_evictions_stay_interruptions():
    reason = disrupted("EvictionByEvictionAPI", "Eviction API: evicting")
    assert ending_of("", terminated(75), reason).reason is Reason.INTERRUPTED


REJECTED = {
    "reason": "UnexpectedAdmissionError",
    "message": "Pod was rejected: Allocate failed due to requested number of devices unavailable for "
    "nvidia.com/gpu. Requested: 1, Available: 0, which is unexpected",
}
NO_DRIVER = terminated(
    128, "nvidia-container-cli: initialization error: nvml error", "StartError"
)


@pytest.mark.parametrize(
    ("status", "state"),
    [(REJECTED, None), ({}, NO_DRIVER)],
    ids=["kubelet", "runtime"],
)
def test_node_that_gives_no_device_has_a_reason(status, state):
    pod = ObservedPod(trim_pod(a_pod(state, phase="Failed", status=status)))
    job = observed_job(JOB, a_job(FAILED), [pod], NOW)
    ending = classify_ending(ATTEMPT, job)
    assert (ending.outcome, ending.reason) == (
        Outcome.INTERRUPTED,
        Reason.DEVICE_FAILED,
    )
    assert job.failed_node == "spot-1"
    assert "node spot-1 cannot give the pod its devices" in ending.message


def test_typo_in_a_command_is_no_fault_of_a_device():
    state = terminated(128, 'exec: "shh": executable file not found', "StartError")
    pod = ObservedPod(trim_pod(a_pod(state, phase="Failed")))
    ending = classify_ending(ATTEMPT, observed_job(JOB, a_job(FAILED), [pod], NOW))
    assert ending.reason is Reason.STAGE_FAILED
