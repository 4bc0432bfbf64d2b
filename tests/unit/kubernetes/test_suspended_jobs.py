"""A Job that a queue suspends: as its objects show it, through the cache's reduction of them."""

from datetime import UTC, datetime

import pytest
from support.operator.pods import (
    DELETED,
    JOB,
    NOW,
    a_job,
    a_pod,
    completed,
    observed_job,
    running,
    terminated,
)

from finetune_operator.api.conditions import Reason
from finetune_operator.core.observation import JobState
from finetune_operator.kubernetes.cache.trim import trim_job, trim_pod
from finetune_operator.kubernetes.translate.pod import ObservedPod

STOPPED_AT = datetime(2030, 1, 1, 0, 10, tzinfo=UTC)
RESUMED_AT = datetime(2030, 1, 1, 0, 15, tzinfo=UTC)
SAVED = '{"interruption": {"step": 40, "savedStep": 40}}'


def suspended(status="True", *, suspend=True):
    condition = {
        "type": "Suspended",
        "status": status,
        "lastTransitionTime": "2030-01-01T00:15:00Z",
    }
    return {**a_job(condition), "spec": {"suspend": suspend}}


def observed(job, *pods):
    trimmed = [ObservedPod(trim_pod(pod.raw), gone=pod.gone) for pod in pods]
    return observed_job(JOB, trim_job(job), trimmed, NOW)


def ended_pod(*, gone=True):
    return ObservedPod(
        a_pod(terminated(75, SAVED), phase="Failed", **DELETED), gone=gone
    )


@pytest.mark.parametrize("gone", [True, False])
def test_suspended_job_without_live_pod_waits_for_quota(gone):
    job = observed(suspended(), ended_pod(gone=gone))
    assert job.state is JobState.WAITING
    assert job.blocker.reason is Reason.WAITING_FOR_QUOTA
    assert JOB in job.blocker.message
    assert job.suspended_since == STOPPED_AT
    assert job.message.interruption.saved_step == 40


def test_suspended_job_whose_pod_was_killed_waits_for_quota():
    pod = ObservedPod(a_pod(terminated(137), phase="Failed", **DELETED), gone=True)
    assert observed(suspended(), pod).state is JobState.WAITING


def test_suspended_job_without_any_pod_waits_for_quota():
    job = observed(suspended())
    assert job.blocker.reason is Reason.WAITING_FOR_QUOTA
    assert job.started_at is None


def test_suspended_job_runs_until_its_pod_has_ended():
    job = observed(suspended(), ObservedPod(a_pod(running(), **DELETED)))
    assert job.state is JobState.RUNNING
    assert job.suspended_since is None


def test_suspended_job_with_a_result_is_complete():
    pod = ObservedPod(a_pod(completed(), phase="Succeeded"), gone=True)
    assert observed(suspended(), pod).state is JobState.COMPLETE


@pytest.mark.parametrize("status", ["True", "False"])
def test_resumed_job_waits_until_its_next_pod_starts(status):
    """The controller may not have noticed the end of the suspension yet."""
    job = observed(suspended(status, suspend=False), ended_pod())
    assert job.state is JobState.WAITING
    assert job.suspended_since is None
    assert job.started_at is None


def test_resumed_job_runs_with_its_next_pod():
    pod = a_pod(running(), creationTimestamp="2030-01-01T00:15:00Z")
    job = observed(suspended("False", suspend=False), ObservedPod(pod))
    assert job.state is JobState.RUNNING
    assert job.resumed_at == RESUMED_AT


def test_pod_lost_after_a_suspension_is_an_interruption():
    pod = a_pod(
        terminated(137),
        phase="Failed",
        creationTimestamp="2030-01-01T00:15:02Z",
        **DELETED,
    )
    job = suspended("False", suspend=False)
    job["status"]["conditions"].append(
        {
            "type": "Failed",
            "status": "True",
            "reason": "BackoffLimitExceeded",
            "lastTransitionTime": "2030-01-01T00:16:00Z",
        }
    )
    seen = observed(job, ObservedPod(pod, gone=True))
    assert seen.state is JobState.FAILED
    assert "deleted" in seen.disruption
