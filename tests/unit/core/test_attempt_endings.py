"""The decision table: how each ending of a Job is classified."""

import pytest
from support.operator.scenario import Scenario, a_pipeline, a_result

from finetune_operator.api.status import Outcome, StageState
from finetune_operator.core.attempts.endings import PERMANENT_REASONS
from finetune_operator.core.observation import JobState
from finetune_trainer.exit_codes import PERMANENT_EXIT_CODES


def ended(end_job) -> Scenario:
    """Start train, and end its Job in the given way."""
    scenario = Scenario().run("prepare")
    end_job(scenario, scenario.start("train"))
    return scenario.reconcile_until_stable()


INTERRUPTIONS = {
    "complete, result not read": lambda scenario, job: scenario.cluster.complete(
        job, None
    ),
    "evicted, checkpoint saved": lambda scenario, job: scenario.cluster.evict(
        job, step=70, saved=70
    ),
    "evicted, killed before it saved": lambda scenario, job: scenario.cluster.fail(
        job, 137, disruption="evicted"
    ),
    "evicted, exit code 0 without a result": lambda scenario, job: (
        scenario.cluster.update_job(
            job,
            state=JobState.COMPLETE,
            exit_code=0,
            disruption="evicted",
            finished_at=scenario.cluster.now,
        )
    ),
    "evicted while failing": lambda scenario, job: scenario.cluster.fail(
        job, 65, disruption="evicted"
    ),
    "node lost": lambda scenario, job: scenario.lose_node(job),
    "exit code 75 without evidence": lambda scenario, job: scenario.cluster.evict(
        job, step=70, saved=70, disruption=None
    ),
    "Job object deleted": lambda scenario, job: scenario.cluster.delete_job(job),
}

FAILURES = {
    "a bug": (70, "StageFailed"),
    "service unavailable": (69, "SourceUnavailable"),
    "any other code": (3, "StageFailed"),
    "SIGKILL, cause unknown": (137, "StageFailed"),
    "SIGTERM, cause unknown": (143, "StageFailed"),
}

PERMANENT = {
    "invalid config": (64, "SpecInvalid"),
    "invalid data": (65, "DataInvalid"),
    "missing source": (66, "SourceNotFound"),
    "rejected credentials": (77, "CredentialsRejected"),
}


@pytest.mark.parametrize("end_job", INTERRUPTIONS.values(), ids=INTERRUPTIONS.keys())
def test_interruption_is_retried_and_is_no_failure(end_job):
    scenario = ended(end_job).pass_interruption_backoff()
    train = scenario.stage("train")
    assert [a.outcome for a in train.attempts] == [Outcome.INTERRUPTED, Outcome.RUNNING]
    assert train.interruptions == 1
    assert train.failures == 0
    assert train.attempts[0].message
    assert scenario.finish().status.phase == "Succeeded"


@pytest.mark.parametrize(("code", "reason"), FAILURES.values(), ids=FAILURES.keys())
def test_failure_is_retried_after_backoff(code, reason):
    scenario = ended(lambda scenario, job: scenario.cluster.fail(job, code))
    train = scenario.stage("train")
    assert [(a.outcome, a.reason, a.exit_code) for a in train.attempts] == [
        (Outcome.FAILED, reason, code)
    ]
    assert train.interruptions == 0
    assert train.failures == 1
    assert train.state == StageState.PENDING
    assert train.reason == "Retrying"
    assert scenario.after(10).finish().status.phase == "Succeeded"


def exit_0_without_result(scenario, job):
    scenario.cluster.update_job(
        job, state=JobState.COMPLETE, exit_code=0, finished_at=scenario.cluster.now
    )


def exit_0_with_result_of_other_identity(scenario, job):
    scenario.cluster.complete(job, a_result("train", "0" * 16))


@pytest.mark.parametrize(
    ("end_job", "message"),
    [
        (exit_0_without_result, "left no result"),
        (exit_0_with_result_of_other_identity, "identity 0000000000000000"),
    ],
)
def test_exit_code_0_without_expected_result_is_a_failure(end_job, message):
    scenario = ended(end_job)
    [attempt] = scenario.stage("train").attempts
    assert attempt.outcome == Outcome.FAILED
    assert attempt.reason == "ResultMissing"
    assert message in attempt.message
    assert (
        scenario.stage("train").interruptions,
        scenario.stage("train").failures,
    ) == (0, 1)


@pytest.mark.parametrize(("code", "reason"), PERMANENT.values(), ids=PERMANENT.keys())
def test_permanent_failure_is_not_retried(code, reason):
    scenario = ended(
        lambda scenario, job: scenario.cluster.fail(job, code, "line 3: no")
    )
    assert (scenario.stage("train").state, scenario.stage("train").reason) == (
        StageState.FAILED,
        reason,
    )
    assert scenario.condition("Stalled") == ("True", reason)
    assert "line 3: no" in scenario.status.conditions[0].message
    assert scenario.after(1e6).reconcile_until_stable().created_jobs == [
        "prepare-a1",
        "train-a1",
    ]


def test_result_of_stopping_job_counts():
    scenario = Scenario().run("prepare")
    scenario.start("train")
    scenario.edit(suspend=True).complete("train")
    assert scenario.stage("train").state == StageState.SUCCEEDED
    assert scenario.attempt("train").outcome == Outcome.SUCCEEDED


def test_out_of_memory_is_retried_only_with_new_resources():
    scenario = ended(lambda scenario, job: scenario.run_out_of_memory(job))
    assert scenario.stage("train").reason == "OutOfMemory"
    assert scenario.after(1e6).reconcile_until_stable().created_jobs[-1] == "train-a1"
    scenario.edit(train={"pod": {"resources": {"limits": {"memory": "64Gi"}}}})
    assert scenario.created_jobs[-1] == "train-a2"
    assert scenario.finish().status.phase == "Succeeded"


@pytest.mark.parametrize(
    ("limit", "proposed"),
    [
        ("256Mi", "512Mi"),
        ("1.5Gi", "3.0Gi"),
        ("4Gi", "8Gi"),
        ("900M", "1800M"),
        ("1073741824", "2147483648"),
    ],
)
def test_out_of_memory_names_the_limit_and_its_double(limit, proposed):
    """The message is a value of the field that it names: with it the stage succeeds."""
    scenario = Scenario(
        a_pipeline(train={"pod": {"resources": {"limits": {"memory": limit}}}})
    ).run("prepare")
    scenario.run_out_of_memory(scenario.start("train"))
    train = scenario.reconcile_until_stable().stage("train")
    assert (
        train.message
        == f"killed at its limit {limit}: raise train.pod.resources.limits.memory to {proposed}"
    )
    assert train.failures == 1
    assert train.interruptions == 0
    scenario.edit(train={"pod": {"resources": {"limits": {"memory": proposed}}}})
    assert scenario.finish().status.phase == "Succeeded"


def test_out_of_memory_without_a_limit_names_the_node():
    scenario = ended(lambda scenario, job: scenario.run_out_of_memory(job))
    message = scenario.stage("train").message
    assert (
        "its node ran out of memory: set train.pod.resources.requests.memory" in message
    )


def test_out_of_memory_keeps_the_words_of_the_process():
    scenario = ended(
        lambda scenario, job: scenario.cluster.fail(
            job, 70, "a worker died", out_of_memory=True
        )
    )
    assert scenario.stage("train").message.endswith("; a worker died")


@pytest.mark.parametrize("disruption", [None, "evicted"])
def test_out_of_memory_decides_before_exit_code_0(disruption):
    """A child process may be killed for memory while its parent exits with 0: the stage must not run again so."""
    scenario = ended(
        lambda scenario, job: scenario.cluster.update_job(
            job,
            state=JobState.COMPLETE,
            exit_code=0,
            out_of_memory=True,
            disruption=disruption,
            finished_at=scenario.cluster.now,
        )
    )
    assert (scenario.attempt("train").outcome, scenario.attempt("train").reason) == (
        Outcome.FAILED,
        "OutOfMemory",
    )
    assert scenario.after(1e6).reconcile_until_stable().created_jobs[-1] == "train-a1"


def test_termination_message_becomes_attempt_message():
    scenario = ended(
        lambda scenario, job: scenario.cluster.fail(
            job, 70, "the loss is not a number at step 12"
        )
    )
    assert scenario.attempt("train").message == "the loss is not a number at step 12"


def test_queued_job_reports_its_blocker():
    scenario = Scenario().reconcile_until_stable()
    scenario.hold(scenario.attempt("prepare").job, "0/3 nodes have nvidia.com/gpu")
    scenario.reconcile_until_stable()
    assert (scenario.stage("prepare").state, scenario.stage("prepare").reason) == (
        "Queued",
        "WaitingForCapacity",
    )
    assert "nvidia.com/gpu" in scenario.status.conditions[0].message


def test_long_messages_are_truncated():
    scenario = Scenario(a_pipeline(train={"maxFailures": 0})).run("prepare")
    scenario.cluster.fail(scenario.start("train"), 70, "x" * 4000)
    assert len(scenario.reconcile_until_stable().stage("train").message) <= 4096
    other = Scenario()
    other.cluster.fail(other.start("prepare"), None, disruption="y" * 30_000)
    assert (
        len(other.reconcile_until_stable().stage("prepare").attempts[0].message) <= 4096
    )
    queued = Scenario().reconcile_until_stable()
    queued.hold(queued.attempt("prepare").job, "z" * 30_000)
    assert len(queued.reconcile_until_stable().stage("prepare").message) <= 4096


def test_every_permanent_exit_code_has_a_reason():
    assert set(PERMANENT_REASONS) == set(PERMANENT_EXIT_CODES)
