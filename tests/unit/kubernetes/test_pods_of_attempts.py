"""An attempt of several pods is one process: its start, its end, its result and its blocker."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from support.operator.pods import (
    ATTEMPT,
    DELETED,
    ENDED,
    JOB,
    NOW,
    a_job,
    a_pod,
    completed,
    disrupted,
    job_condition,
    observed_job,
    running,
    terminated,
    unschedulable,
    waiting,
)

from finetune_operator.api.conditions import Reason
from finetune_operator.api.status import Outcome
from finetune_operator.core.attempts.endings import classify_ending
from finetune_operator.core.observation import JobState
from finetune_operator.kubernetes.translate.pod import ObservedPod

DONE = completed()
QUIET = terminated(0, "", "Completed")
SAVED = terminated(75, json.dumps({"interruption": {"step": 40, "savedStep": 40}}))
STOPPED = terminated(75, json.dumps({"interruption": {}}))
BUG = terminated(70, json.dumps({"failure": {"message": "CUDA error"}}))
OUT_OF_MEMORY = terminated(137, reason="OOMKilled")
EVICTED = disrupted("EvictionByEvictionAPI", "evicting")
FAILED = job_condition(
    "Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit"
)
BY_RULE = job_condition(
    "Failed", "PodFailurePolicy", "Pod team/x has condition DisruptionTarget"
)
FULL = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."


def indexed_job(*conditions, pods=2):
    return {**a_job(*conditions), "spec": {"completions": pods}}


def pod(index, state=None, *conditions, phase="Failed", node="", gone=False, **meta):
    """Return the pod of an index; it runs on a node of the same number unless `node` is none."""
    labels = {
        "batch.kubernetes.io/job-name": JOB,
        "batch.kubernetes.io/job-completion-index": str(index),
    }
    actual = a_pod(
        state,
        *conditions,
        phase=phase,
        name=f"{JOB}-{index}-x",
        uid=f"u{index}",
        labels=labels,
        **meta,
    )
    actual["spec"]["nodeName"] = "" if node is None else node or f"spot-{index}"
    return ObservedPod(actual, gone=gone)


def ended(*pods, condition=FAILED, count=2):
    job = observed_job(JOB, indexed_job(condition, pods=count), pods, NOW)
    ending = classify_ending(ATTEMPT, job)
    return ending.outcome, ending.message, job


ENDINGS = {
    "one evicted": (
        (pod(0, SAVED), pod(1, STOPPED, EVICTED)),
        Outcome.INTERRUPTED,
        "pod 1: EvictionByEvictionAPI on spot-1: evicting; stopped at step 40, saved at step 40",
    ),
    "both evicted, the second first": (
        (
            pod(0, SAVED, EVICTED | {"lastTransitionTime": "2030-01-01T00:09:05Z"}),
            pod(1, STOPPED, EVICTED | {"lastTransitionTime": "2030-01-01T00:09:00Z"}),
        ),
        Outcome.INTERRUPTED,
        "pod 1: EvictionByEvictionAPI on spot-1",
    ),
    "evicted, another one crashes": (
        (pod(0, BUG), pod(1, terminated(137), EVICTED)),
        Outcome.INTERRUPTED,
        "pod 1: EvictionByEvictionAPI",
    ),
    "one out of memory": (
        (pod(0, SAVED), pod(1, OUT_OF_MEMORY)),
        Outcome.FAILED,
        "pod 1: killed for memory",
    ),
    "out of memory, another one evicted": (
        (pod(0, SAVED, EVICTED), pod(1, OUT_OF_MEMORY)),
        Outcome.FAILED,
        "pod 1: killed for memory",
    ),
    "one crashes, the others are stopped": (
        (pod(0, SAVED), pod(1, BUG)),
        Outcome.FAILED,
        "pod 1: CUDA error",
    ),
    "one crashes, the other is killed with its Job": (
        (pod(0, terminated(137), **DELETED), pod(1, BUG)),
        Outcome.FAILED,
        "pod 1: CUDA error",
    ),
    "killed without evidence, the other with its Job": (
        (pod(0, terminated(137), **DELETED), pod(1, terminated(137))),
        Outcome.FAILED,
        "pod 1: killed by a signal",
    ),
    "one deleted": (
        (pod(0, SAVED), pod(1, terminated(143), **DELETED)),
        Outcome.INTERRUPTED,
        "pod 1: the pod was deleted on spot-1; stopped at step 40",
    ),
    "all stopped": (
        (pod(0, SAVED), pod(1, STOPPED)),
        Outcome.INTERRUPTED,
        "stopped at step 40, saved at step 40",
    ),
    "its own data": (
        (
            pod(0, STOPPED),
            pod(1, terminated(65, '{"failure": {"message": "a row is too long"}}')),
        ),
        Outcome.FAILED,
        "pod 1: a row is too long",
    ),
    "a worker fails after the result": (
        (pod(0, DONE, phase="Succeeded"), pod(1, BUG)),
        Outcome.SUCCEEDED,
        "",
    ),
    "the machine of one restarts": (
        (pod(0, SAVED), pod(1, terminated(255, reason="Unknown"))),
        Outcome.INTERRUPTED,
        "pod 1: the kubelet lost track of the container on spot-1",
    ),
    "one is never seen": ((pod(0, SAVED),), Outcome.INTERRUPTED, "stopped at step 40"),
}


@pytest.mark.parametrize(("pods", "outcome", "text"), ENDINGS.values(), ids=ENDINGS)
def test_ending_has_the_cause_and_names_its_pod(pods, outcome, text):
    actual, message, _ = ended(*pods)
    assert actual is outcome
    assert message.startswith(text)


def test_unseen_eviction_is_known_from_the_job():
    """The other pod exits with 75, too, and may be counted by the Job before the evicted pod."""
    assert ended(pod(0, SAVED), condition=BY_RULE)[:2] == (
        Outcome.INTERRUPTED,
        "Pod team/x has condition DisruptionTarget; stopped at step 40, saved at step 40",
    )


def test_steps_and_node_are_those_of_the_first_pod():
    message: dict[str, Any] = {"interruption": {"step": 40, "savedStep": 40}}
    message["progress"] = {
        "stage": "train",
        "updatedAt": "2030-01-01T00:00:00Z",
        "step": 40,
        "startStep": 7,
    }
    _, _, job = ended(pod(0, terminated(75, json.dumps(message))), pod(1, BUG))
    assert (job.message.interruption.saved_step, job.message.failure.message) == (
        40,
        "CUDA error",
    )
    assert (job.progress.start_step, job.node, job.exit_code) == (7, "spot-0", 70)


def test_result_counts_when_no_other_process_is_left():
    """All others end in a moment, and a claim has one writer. The Job may be Complete a second later."""
    first = pod(0, DONE, phase="Succeeded")
    both = [first, pod(1, QUIET, phase="Succeeded")]
    assert (
        observed_job(
            JOB, indexed_job(), [first, pod(1, running(), phase="Running")], NOW
        ).state
        is JobState.RUNNING
    )
    assert observed_job(JOB, indexed_job(), [first], NOW).state is not JobState.COMPLETE
    job = observed_job(JOB, indexed_job(), both, NOW)
    assert classify_ending(ATTEMPT, job).outcome is Outcome.SUCCEEDED


def test_success_of_the_others_alone_is_no_result():
    pods = [pod(0, running(), phase="Running"), pod(1, QUIET, phase="Succeeded")]
    assert observed_job(JOB, indexed_job(), pods, NOW).state is JobState.RUNNING


def test_complete_job_without_its_first_pod_runs_again():
    """The Job controller stopped the other pod, so its exit code has no meaning."""
    outcome, message, _ = ended(
        pod(1, terminated(143)), condition=job_condition("Complete")
    )
    assert (outcome, "before the result was read" in message) == (
        Outcome.INTERRUPTED,
        True,
    )


def test_attempt_starts_with_its_last_pod():
    late = {"running": {"startedAt": "2030-01-01T00:03:00Z"}}
    first = pod(0, running(), phase="Running")
    waits = observed_job(
        JOB,
        indexed_job(),
        [first, pod(1, waiting("ContainerCreating"), phase="Pending")],
        NOW,
    )
    assert waits.state == JobState.WAITING
    assert waits.started_at is None
    runs = observed_job(JOB, indexed_job(), [first, pod(1, late, phase="Running")], NOW)
    assert (runs.state, runs.started_at) == (
        JobState.RUNNING,
        datetime(2030, 1, 1, 0, 3, tzinfo=UTC),
    )
    assert (
        observed_job(
            JOB, indexed_job(pods=3), [first, pod(1, late, phase="Running")], NOW
        ).started_at
        is None
    )


def test_attempt_ends_with_its_last_pod():
    later = {
        "terminated": {**STOPPED["terminated"], "finishedAt": "2030-01-01T00:10:25Z"}
    }
    *_, job = ended(pod(0, SAVED), pod(1, later))
    assert job.finished_at == datetime.fromisoformat(ENDED).replace(second=25)


def test_deleted_job_runs_until_all_of_its_pods_are_gone():
    stopped = pod(0, SAVED, gone=True)
    assert (
        observed_job(
            JOB, None, [stopped, pod(1, running(), phase="Running")], NOW
        ).state
        is JobState.RUNNING
    )
    assert (
        observed_job(JOB, None, [stopped, pod(1, STOPPED)], NOW).state
        is JobState.FAILED
    )


def scheduling(message, since="2030-01-01T00:02:00Z"):
    return unschedulable(message) | {"lastTransitionTime": since}


def blocked(*pods, count=3, warnings=None):
    return observed_job(
        JOB, indexed_job(pods=count), pods, NOW, warnings=warnings or {}
    )


def test_blocker_names_the_pod_and_how_many_have_no_node():
    first, *rest = (
        pod(index, None, scheduling(FULL), phase="Pending", node=None)
        for index in (0, 1, 2)
    )
    job = blocked(pod(0, running(), phase="Running"), *rest)
    assert job.blocker.reason is Reason.WAITING_FOR_CAPACITY
    assert job.blocker.message.startswith(f"2 of 3 pods have no node; pod 1: {FULL}")
    assert (
        job.incomplete_since
        == job.unschedulable_since
        == datetime(2030, 1, 1, 0, 2, tzinfo=UTC)
    )
    assert blocked(first, *rest).incomplete_since is None, "no pod holds a node"


def test_blocker_that_needs_people_comes_first():
    full = pod(0, None, scheduling(FULL), phase="Pending", node=None)
    job = blocked(
        full, pod(1, waiting("ErrImagePull", "no such image"), phase="Pending"), count=2
    )
    assert (job.blocker.reason, job.blocker.message[:20]) == (
        Reason.IMAGE_PULL_FAILED,
        "pod 1: no such image",
    )


def test_pods_that_do_not_exist_are_counted():
    job = blocked(
        pod(0, running(), phase="Running"), warnings={JOB: "exceeded quota: gpus"}
    )
    assert job.blocker.reason is Reason.WAITING_FOR_QUOTA
    assert job.blocker.message.startswith("2 of 3 pods do not exist: exceeded quota")
    assert job.incomplete_since == job.created_at


def test_lost_node_of_any_pod_is_told():
    lost = pod(1, running(), phase="Running", deletionTimestamp="2030-01-01T00:10:00Z")
    job = blocked(pod(0, SAVED), lost, count=2)
    assert job.state == JobState.RUNNING
    assert job.blocker.reason == Reason.NODE_LOST
    assert job.blocker.message.startswith("pod 1: node spot-1 does not answer")


def test_attempt_with_nodes_for_all_is_complete():
    assert (
        blocked(
            *(pod(index, running(), phase="Running") for index in range(3))
        ).incomplete_since
        is None
    )
    starting = [
        pod(index, waiting("ContainerCreating"), phase="Pending") for index in range(3)
    ]
    assert blocked(*starting).incomplete_since is None
