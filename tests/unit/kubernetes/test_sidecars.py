"""Containers that admission policies inject into the pods of stages: they outlive, fail, restart or start late."""

from datetime import datetime
from itertools import pairwise

import pytest
from support.operator.pods import (
    ATTEMPT,
    ENDED,
    JOB,
    NOW,
    a_job,
    a_pod,
    completed,
    job_condition,
    observed_job,
    running,
    terminated,
    waiting,
)

from finetune_operator.api.conditions import Reason
from finetune_operator.api.status import Outcome
from finetune_operator.core.attempts.endings import classify_ending
from finetune_operator.core.observation import JobState
from finetune_operator.kubernetes.cache.pod import urgent_facts
from finetune_operator.kubernetes.cache.trim import trim_pod
from finetune_operator.kubernetes.translate.pod import ObservedPod

STOPPING = ATTEMPT.model_copy(update={"stopping": Reason.SIDECAR_RUNNING})
DONE = completed()
FAILED = job_condition("Failed", "BackoffLimitExceeded")
DELETED = {
    "deletionTimestamp": "2030-01-01T00:11:00Z",
    "deletionGracePeriodSeconds": 30,
}


def pod(state, phase, *, plain=None, init=None, **more) -> ObservedPod:
    """Return the trimmed pod with a proxy: as a plain container, or as an init container; `more` is of its status."""
    meta = more.pop("metadata", {})
    raw = a_pod(state, phase=phase, status=more, **meta)
    status = raw["status"]
    if plain:
        proxy = {"name": "proxy", "state": plain}
        status["containerStatuses"] = [proxy, *status.get("containerStatuses", [])]
    if init:
        status["initContainerStatuses"] = [{"name": "proxy", **init}]
    return ObservedPod(trim_pod(raw))


def observed(*pods, job=None):
    return observed_job(JOB, job or a_job(), list(pods), NOW)


@pytest.mark.parametrize(
    ("end", "plain", "phase"),
    [
        (DONE, running(), "Running"),
        (terminated(70), running(), "Running"),
        # The image of the sidecar cannot be pulled.
        (DONE, waiting("ImagePullBackOff"), "Pending"),
    ],
)
def test_plain_container_that_outlives_has_a_reason(end, plain, phase):
    job = observed(pod(end, phase, plain=plain))
    assert job.state is JobState.RUNNING
    assert job.outlived_since == datetime.fromisoformat(ENDED)
    assert job.blocker.reason is Reason.SIDECAR_RUNNING
    assert "the container proxy of pod demo-train-a1-xyz has not" in job.blocker.message


def test_end_of_the_process_alone_is_no_sidecar():
    assert observed(pod(DONE, "Running")).blocker is None
    assert observed(pod(running(), "Running", plain=running())).outlived_since is None
    ended = pod(DONE, "Succeeded", plain=terminated(0))
    assert observed(ended).outlived_since is None


@pytest.mark.parametrize("code", [1, 137])
def test_result_wins_over_a_sidecar_that_fails(code):
    """The phase and the Job are Failed, although the stage has done its work."""
    ended = pod(DONE, "Failed", plain=terminated(code))
    job = observed(ended, job=a_job(FAILED))
    assert classify_ending(ATTEMPT, job).outcome is Outcome.SUCCEEDED


ENDS = {
    "result": (DONE, Outcome.SUCCEEDED, Reason.STAGE_SUCCEEDED),
    "bug": (terminated(70), Outcome.FAILED, Reason.STAGE_FAILED),
    "invalid data": (terminated(65), Outcome.FAILED, Reason.DATA_INVALID),
    "killed": (terminated(137), Outcome.FAILED, Reason.STAGE_FAILED),
    "interrupted": (terminated(75), Outcome.INTERRUPTED, Reason.INTERRUPTED),
    "no result": (terminated(0), Outcome.FAILED, Reason.RESULT_MISSING),
    "memory": (
        terminated(137, reason="OOMKilled"),
        Outcome.FAILED,
        Reason.OUT_OF_MEMORY,
    ),
}


@pytest.mark.parametrize(("end", "outcome", "reason"), ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("has_job", [True, False])
def test_stopped_sidecar_leaves_the_ending_of_the_process(
    end, outcome, reason, has_job
):
    """The operator has deleted the Job 30 s after the process, and with it the sidecar."""
    ended = pod(end, "Failed", plain=terminated(137), metadata=DELETED)
    gone = ObservedPod(ended.raw, gone=True)
    job = observed_job(JOB, a_job(FAILED) if has_job else None, [gone], NOW)
    ending = classify_ending(STOPPING, job)
    assert ending.outcome == outcome
    assert ending.reason == reason


def test_failure_names_the_sidecar_that_had_failed():
    ended = pod(terminated(69), "Failed", plain=terminated(1, "no certificate"))
    ending = classify_ending(ATTEMPT, observed(ended, job=a_job(FAILED)))
    assert ending.reason is Reason.SOURCE_UNAVAILABLE
    assert ending.message.endswith(
        "; container proxy failed (exit code 1): no certificate, which may be the cause"
    )


def test_plain_container_that_fails_is_named_in_a_running_stage():
    job = observed(pod(running(), "Running", plain=terminated(1)))
    assert job.blocker.reason is Reason.SIDECAR_FAILED
    assert job.blocker.message.startswith(
        "container proxy failed (exit code 1), so the process goes on: run `kubectl"
    )


CRASHED = {"terminated": {"exitCode": 3, "reason": "Error"}}


@pytest.mark.parametrize(
    "init",
    [
        {"state": waiting("CrashLoopBackOff"), "lastState": CRASHED},
        {"state": running(), "lastState": CRASHED, "restartCount": 1},
        {"state": CRASHED},
    ],
)
def test_native_sidecar_that_fails_again_keeps_it_waiting(init):
    job = observed(pod(waiting("PodInitializing"), "Pending", init=init))
    assert job.state == JobState.WAITING
    assert job.blocker.reason == Reason.SIDECAR_FAILED
    assert job.needs_person, "maxPendingSeconds limits the wait"
    assert "init container proxy failed (exit code 3), so the process cannot start" in (
        job.blocker.message
    )


def test_native_sidecar_that_restarts_once_is_no_problem():
    init = {"state": running(), "lastState": CRASHED, "restartCount": 1}
    job = observed(pod(running(), "Running", init={**init, "started": True}))
    assert job.blocker is None


@pytest.mark.parametrize(
    ("since", "failed"),
    [("2030-01-01T00:19:59Z", True), ("2030-01-01T00:18:00Z", False)],
)
def test_sidecar_that_crashes_again_and_again_does_not_flap(since, failed):
    """Between two crashes it runs for a moment, which is no recovery."""
    init = {
        "state": {"running": {"startedAt": since}},
        "lastState": CRASHED,
        "restartCount": 4,
        "started": True,
    }
    job = observed(pod(running(), "Running", init=init))
    reason = job.blocker and job.blocker.reason
    assert (reason is Reason.SIDECAR_FAILED) == failed


@pytest.mark.parametrize(
    ("minute", "reason"),
    [(1, Reason.PROGRESSING), (6, Reason.CONTAINER_NOT_STARTED)],
)
def test_native_sidecar_that_starts_late_is_named(minute, reason):
    """After five minutes it needs a person, so that the wait has a limit."""
    init = {"state": running(), "started": False}
    late = pod(waiting("PodInitializing"), "Pending", init=init)
    job = observed_job(JOB, a_job(), [late], NOW.replace(minute=minute))
    assert job.blocker
    assert job.blocker.reason is reason
    assert job.blocker.message.startswith("waits for the init container proxy")
    assert job.needs_person is (reason is not Reason.PROGRESSING)


@pytest.mark.parametrize("reason", ["Error", "OOMKilled"])
def test_init_container_that_fails_has_a_reason(reason):
    init = {"state": terminated(2, "no route to vault", reason)}
    ended = pod(waiting("PodInitializing"), "Failed", init=init)
    ending = classify_ending(ATTEMPT, observed(ended, job=a_job(FAILED)))
    assert (ending.outcome, ending.reason) == (
        Outcome.FAILED,
        Reason.INIT_CONTAINER_FAILED,
    )
    assert ending.message.startswith("init container proxy failed (exit code 2")
    assert "no route to vault" in ending.message
    assert "kubectl logs demo-train-a1-xyz -c proxy" in ending.message


def test_native_sidecar_killed_after_the_process_is_no_failure():
    init = {"state": terminated(137), "started": False}
    ended = pod(terminated(70), "Failed", init=init)
    ending = classify_ending(ATTEMPT, observed(ended, job=a_job(FAILED)))
    assert ending.reason is Reason.STAGE_FAILED


def test_each_change_of_a_sidecar_wakes_its_pipeline():
    states = [
        pod(running(), "Running", plain=running()),
        pod(running(), "Running", plain=terminated(1)),
        pod(terminated(70), "Running", plain=running()),
        pod(terminated(70), "Failed", plain=terminated(0)),
    ]
    facts = [urgent_facts(state.raw) for state in states]
    assert all(before != after for before, after in pairwise(facts))


def of_several(index, state, phase, **more) -> ObservedPod:
    other = pod(state, phase, **more)
    other.raw["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] = str(
        index
    )
    other.raw["metadata"] |= {"name": f"p{index}", "uid": f"u{index}"}
    return other


def job_of_two(*conditions):
    return {**a_job(*conditions), "spec": {"completions": 2}}


@pytest.mark.parametrize(
    ("first", "second", "outlived"),
    [
        (DONE, running(), True),
        (running(), terminated(70), True),
        # It waits for the first, as it does without a sidecar.
        (running(), terminated(0), False),
    ],
)
def test_process_of_several_that_ends_the_attempt_decides(first, second, outlived):
    """Kubernetes sees neither end, because the pods go on."""
    job = observed(
        of_several(0, first, "Running", plain=running()),
        of_several(1, second, "Running", plain=running()),
        job=job_of_two(),
    )
    assert bool(job.outlived_since) is outlived


def test_result_of_the_first_wins_over_the_others_deletion():
    deleted = {**DELETED, "deletionTimestamp": "2030-01-01T00:11:30Z"}
    first = of_several(0, DONE, "Failed", plain=terminated(137), metadata=deleted)
    second = of_several(1, terminated(137), "Failed", metadata=deleted)
    gone = [ObservedPod(other.raw, gone=True) for other in (first, second)]
    job = observed_job(JOB, None, gone, NOW)
    assert classify_ending(STOPPING, job).outcome is Outcome.SUCCEEDED
