"""The decision table: what is made of every way in which a Job can end."""

import pytest
from support.scenario import Scenario, a_pipeline, a_result

from finetune_operator.api.status import Outcome, StageState
from finetune_operator.core.endings import PERMANENT_REASONS
from finetune_operator.core.observation import JobState
from finetune_trainer.exit_codes import PERMANENT_EXIT_CODES


def ended(how) -> Scenario:
    """Train has started and its Job has ended in some way."""
    scenario = Scenario().run("prepare")
    how(scenario, scenario.start("train"))
    return scenario.reconcile_until_stable()


INTERRUPTIONS = {
    "complete, but nobody read its result": lambda w, job: w.cluster.complete(job, None),
    "evicted, checkpoint saved": lambda w, job: w.cluster.evict(job, step=70, saved=70),
    "evicted, killed before it could save": lambda w, job: w.cluster.fail(job, 137, disruption="evicted"),
    "evicted, and its program ends well without a result": lambda w, job: w.cluster.update_job(
        job, state=JobState.COMPLETE, exit_code=0, disruption="evicted", finished_at=w.cluster.now
    ),
    "evicted while failing": lambda w, job: w.cluster.fail(job, 65, disruption="evicted"),
    "its node is gone": lambda w, job: w.lose_node(job),
    "exit code 75 without any evidence": lambda w, job: w.cluster.evict(job, step=70, saved=70, why=None),
    "its Job object was deleted": lambda w, job: w.cluster.delete_job(job),
}

FAILURES = {
    "a bug": (70, "StageFailed"),
    "a service that does not answer": (69, "SourceUnavailable"),
    "any other code": (3, "StageFailed"),
    "SIGKILL, and nothing says by whom": (137, "StageFailed"),
    "SIGTERM, and nothing says by whom": (143, "StageFailed"),
}

PERMANENT = {
    "the config": (64, "SpecInvalid"),
    "the data": (65, "DataInvalid"),
    "a source that is not there": (66, "SourceNotFound"),
    "credentials": (77, "CredentialsRejected"),
}


@pytest.mark.parametrize("how", INTERRUPTIONS.values(), ids=INTERRUPTIONS.keys())
def test_an_interruption_is_tried_again_at_once_and_is_no_failure(how):
    scenario = ended(how)
    train = scenario.stage("train")
    assert [a.outcome for a in train.attempts] == [Outcome.INTERRUPTED, Outcome.RUNNING]
    assert (train.interruptions, train.failures) == (1, 0)
    assert train.attempts[0].message
    assert scenario.finish().status.phase == "Succeeded"


@pytest.mark.parametrize(("code", "reason"), FAILURES.values(), ids=FAILURES.keys())
def test_a_failure_is_tried_again_after_a_wait(code, reason):
    scenario = ended(lambda w, job: w.cluster.fail(job, code))
    train = scenario.stage("train")
    assert [(a.outcome, a.reason, a.exit_code) for a in train.attempts] == [(Outcome.FAILED, reason, code)]
    assert (train.interruptions, train.failures) == (0, 1)
    assert (train.state, train.reason) == (StageState.PENDING, "Retrying")
    assert scenario.after(10).finish().status.phase == "Succeeded"


def without_a_word(scenario, job):
    scenario.cluster.update_job(job, state=JobState.COMPLETE, exit_code=0, finished_at=scenario.cluster.now)


def with_the_result_of_something_else(scenario, job):
    scenario.cluster.complete(job, a_result("train", "0" * 16))


@pytest.mark.parametrize(
    ("how", "said"),
    [(without_a_word, "left no result"), (with_the_result_of_something_else, "identity 0000000000000000")],
)
def test_a_program_that_ends_well_without_the_result_asked_for_has_failed(how, said):
    scenario = ended(how)
    [attempt] = scenario.stage("train").attempts
    assert (attempt.outcome, attempt.reason) == (Outcome.FAILED, "ResultMissing")
    assert said in attempt.message
    assert (scenario.stage("train").interruptions, scenario.stage("train").failures) == (0, 1)


@pytest.mark.parametrize(("code", "reason"), PERMANENT.values(), ids=PERMANENT.keys())
def test_what_trying_again_cannot_better_is_not_tried_again(code, reason):
    scenario = ended(lambda w, job: w.cluster.fail(job, code, "line 3: no"))
    assert (scenario.stage("train").state, scenario.stage("train").reason) == (StageState.FAILED, reason)
    assert scenario.condition("Stalled") == ("True", reason)
    assert "line 3: no" in scenario.status.conditions[0].message
    assert scenario.after(1e6).reconcile_until_stable().created_jobs == ["prepare-a1", "train-a1"]


def test_a_result_counts_even_if_the_job_was_being_stopped():
    scenario = Scenario().run("prepare")
    scenario.start("train")
    scenario.edit(suspend=True).complete("train")
    assert scenario.stage("train").state == StageState.SUCCEEDED
    assert scenario.attempt("train").outcome == Outcome.SUCCEEDED


def test_out_of_memory_waits_for_other_resources():
    scenario = ended(lambda w, job: w.run_out_of_memory(job))
    assert scenario.stage("train").reason == "OutOfMemory"
    assert "resources.memory" in scenario.stage("train").message
    assert scenario.after(1e6).reconcile_until_stable().created_jobs[-1] == "train-a1"
    scenario.edit(train={"resources": {"memory": "64Gi"}})
    assert scenario.created_jobs[-1] == "train-a2"
    assert scenario.finish().status.phase == "Succeeded"


def test_the_programs_own_words_are_told():
    scenario = ended(lambda w, job: w.cluster.fail(job, 70, "the loss is not a number at step 12"))
    assert scenario.attempt("train").message == "the loss is not a number at step 12"


def test_a_job_that_waits_says_for_what():
    scenario = Scenario().reconcile_until_stable()
    scenario.hold(scenario.attempt("prepare").job, "0/3 nodes have nvidia.com/gpu")
    scenario.reconcile_until_stable()
    assert (scenario.stage("prepare").state, scenario.stage("prepare").reason) == ("Queued", "WaitingForCapacity")
    assert "nvidia.com/gpu" in scenario.status.conditions[0].message


def test_words_of_any_length_fit_into_the_status():
    scenario = Scenario(a_pipeline(train={"retries": {"failures": 0}})).run("prepare")
    scenario.cluster.fail(scenario.start("train"), 70, "x" * 4000)
    assert len(scenario.reconcile_until_stable().stage("train").message) <= 4096
    other = Scenario()
    other.cluster.fail(other.start("prepare"), None, disruption="y" * 30_000)
    assert len(other.reconcile_until_stable().stage("prepare").attempts[0].message) <= 4096
    queued = Scenario().reconcile_until_stable()
    queued.hold(queued.attempt("prepare").job, "z" * 30_000)
    assert len(queued.reconcile_until_stable().stage("prepare").message) <= 4096


def test_every_permanent_exit_code_has_a_reason():
    assert set(PERMANENT_REASONS) == set(PERMANENT_EXIT_CODES)
