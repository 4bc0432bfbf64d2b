"""Observe a Job and its pod, and classify the ending."""

import json
from datetime import UTC, datetime

import pytest
from support.operator.pods import (
    ATTEMPT,
    DELETED,
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
)

from finetune_operator.api.status import Outcome
from finetune_operator.core.attempts.endings import classify_ending
from finetune_operator.core.observation import JobState
from finetune_operator.kubernetes.translate.job import observe_job
from finetune_operator.kubernetes.translate.pod import ObservedPod
from finetune_trainer.contract import Progress

SAVED = json.dumps({"interruption": {"step": 40, "savedStep": 40}})
FAILED = job_condition(
    "Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit"
)
BY_RULE = job_condition(
    "Failed",
    "PodFailurePolicy",
    "Pod team/x has condition DisruptionTarget matching FailJob rule at index 0",
)

ENDINGS = {
    "complete with result": (
        job_condition("Complete"),
        completed(),
        {},
        Outcome.SUCCEEDED,
        "",
        0,
    ),
    "complete, pod not observed": (
        job_condition("Complete"),
        None,
        {},
        Outcome.INTERRUPTED,
        "before the result was read",
        None,
    ),
    "evicted, saved": (
        BY_RULE,
        terminated(75, SAVED),
        {},
        Outcome.INTERRUPTED,
        "saved at step 40",
        75,
    ),
    "evicted, killed": (
        BY_RULE,
        terminated(137),
        {},
        Outcome.INTERRUPTED,
        "DisruptionTarget",
        137,
    ),
    "evicted, pod not observed": (
        BY_RULE,
        None,
        {},
        Outcome.INTERRUPTED,
        "DisruptionTarget",
        None,
    ),
    "out of memory": (
        FAILED,
        terminated(137, reason="OOMKilled"),
        {},
        Outcome.FAILED,
        "its node ran out of memory: set pod.resources.requests.memory",
        137,
    ),
    "internal error": (
        FAILED,
        terminated(70, json.dumps({"failure": {"message": "oh"}})),
        {},
        Outcome.FAILED,
        "oh",
        70,
    ),
    "foreign termination message": (
        FAILED,
        terminated(1, "Traceback: boo"),
        {},
        Outcome.FAILED,
        "Traceback: boo",
        1,
    ),
    "machine restarted": (
        FAILED,
        terminated(255, reason="Unknown"),
        {},
        Outcome.INTERRUPTED,
        "lost track",
        255,
    ),
    "node shutdown": (
        FAILED,
        terminated(143),
        {
            "status": {
                "reason": "Terminated",
                "message": "Pod was terminated in response to imminent node shutdown.",
            }
        },
        Outcome.INTERRUPTED,
        "imminent node shutdown",
        143,
    ),
    "rejected by the kubelet": (
        FAILED,
        terminated(137),
        {
            "status": {
                "reason": "Evicted",
                "message": "Pod was rejected: The node had condition: [MemoryPressure].",
            }
        },
        Outcome.INTERRUPTED,
        "MemoryPressure",
        137,
    ),
    "evicted for ephemeral storage": (
        FAILED,
        terminated(137),
        {
            "status": {
                "reason": "Evicted",
                "message": "Container stage exceeded its local ephemeral storage limit.",
            }
        },
        Outcome.FAILED,
        "raise pod.resources.limits.ephemeral-storage, or write to the workspace",
        137,
    ),
    "pod deleted": (
        FAILED,
        terminated(143),
        DELETED,
        Outcome.INTERRUPTED,
        "the pod was deleted on spot-1",
        143,
    ),
    "pod deleted after a failure": (
        FAILED,
        terminated(65),
        DELETED,
        Outcome.FAILED,
        "",
        65,
    ),
    "killed, cause unknown": (
        FAILED,
        terminated(137),
        {},
        Outcome.FAILED,
        "cause unknown",
        137,
    ),
}


@pytest.mark.parametrize("case", ENDINGS.values(), ids=ENDINGS)
def test_ending_is_classified(case):
    condition, state, more, outcome, text, code = case
    pod = ObservedPod(a_pod(state, phase="Failed", **more)) if state else None
    job = observed_job(JOB, a_job(condition), [pod] if pod else [], NOW)
    ending = classify_ending(ATTEMPT, job)
    assert (ending.outcome, job.exit_code) == (outcome, code)
    assert text in ending.message


def test_out_of_memory_pod_names_its_own_limit():
    """The message has the limit of the pod: a LimitRange may have set it, and the spec may have been edited since."""
    pod = a_pod(terminated(137, reason="OOMKilled"), phase="Failed")
    pod["metadata"]["labels"]["finetune.dev/stage"] = "train"
    pod["spec"]["containers"] = [
        {"name": "stage", "resources": {"limits": {"memory": "256Mi"}}}
    ]
    ending = classify_ending(
        ATTEMPT, observed_job(JOB, a_job(FAILED), [ObservedPod(pod)], NOW)
    )
    assert (
        ending.message
        == "killed at its limit 256Mi: raise train.pod.resources.limits.memory to 512Mi"
    )


def test_disruption_names_the_cause_and_the_node():
    pod = ObservedPod(
        a_pod(
            terminated(75),
            disrupted("EvictionByEvictionAPI", "Eviction API: evicting"),
            phase="Failed",
        )
    )
    assert observed_job(JOB, a_job(FAILED), [pod], NOW).disruption == (
        "EvictionByEvictionAPI on spot-1: Eviction API: evicting"
    )


def test_deleted_job_runs_until_its_pod_is_gone():
    assert (
        observed_job(JOB, None, [ObservedPod(a_pod(running()))], NOW).state
        is JobState.RUNNING
    )
    ended = ObservedPod(a_pod(terminated(75, SAVED), phase="Failed"), gone=True)
    assert observed_job(JOB, None, [ended], NOW).exit_code == 75


def test_pods_result_completes_a_job_without_conditions():
    succeeded = a_pod(completed(), phase="Succeeded")
    assert (
        observed_job(JOB, a_job(), [ObservedPod(succeeded)], NOW).state
        is JobState.COMPLETE
    )
    without_result = a_pod(terminated(0, "", "Completed"), phase="Succeeded")
    assert (
        observed_job(JOB, a_job(), [ObservedPod(without_result)], NOW).state
        is JobState.RUNNING
    )


def test_job_deleted_after_success_has_succeeded():
    pod = ObservedPod(a_pod(completed(), phase="Succeeded"), gone=True)
    job = observed_job(JOB, None, [pod], NOW)
    assert classify_ending(ATTEMPT, job).outcome is Outcome.SUCCEEDED


def test_deleted_job_without_evidence_is_none():
    assert observe_job(JOB, None, [], NOW) is None
    assert (
        observe_job(JOB, None, [ObservedPod(a_pod(running()), gone=True)], NOW) is None
    )


def test_final_progress_wins_over_the_polled_progress():
    progress = {
        "stage": "train",
        "updatedAt": "2030-01-01T00:00:00Z",
        "step": 41,
        "startStep": 7,
    }
    message = json.dumps(
        {"interruption": {"step": 41, "savedStep": 41}, "progress": progress}
    )
    polled = Progress(
        stage="train", updated_at=datetime(2030, 1, 1, tzinfo=UTC), step=30
    )
    job = observed_job(
        JOB,
        a_job(job_condition("Failed")),
        [ObservedPod(a_pod(terminated(75, message), phase="Failed"))],
        NOW,
        progress=polled,
    )
    assert job.progress
    assert job.progress.step == 41
    assert job.progress.start_step == 7
    without = observed_job(
        JOB,
        a_job(job_condition("Failed")),
        [ObservedPod(a_pod(terminated(75, SAVED), phase="Failed"))],
        NOW,
        progress=polled,
    )
    assert without.progress == polled
