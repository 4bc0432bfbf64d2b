"""A Job that a queue suspends in the middle of an attempt: what waits, what counts, and what it costs."""

from decimal import Decimal

import pytest
from support.operator.scenario import Scenario, a_pipeline

from finetune_operator.api.conditions import Reason
from finetune_operator.api.placement import PlacementDefaults
from finetune_operator.api.status import Outcome, StageState
from finetune_operator.core.observation import Blocker, JobState
from finetune_operator.core.settings import Settings

PRICED = PlacementDefaults.model_validate(
    {
        "currency": "EUR",
        "nodeClasses": [
            {
                "name": "any",
                "capacity": "OnDemand",
                "price": 3600,
                "nodeSelector": {"a": "b"},
            }
        ],
    }
)
"""A second costs 1 EUR."""
WAITS = Blocker(Reason.WAITING_FOR_QUOTA, "the Job is suspended")


def suspend(scenario, job):
    scenario.cluster.update_job(
        job,
        state=JobState.WAITING,
        suspended_since=scenario.cluster.now,
        resumed_at=None,
        blocker=WAITS,
    )
    return scenario.reconcile_until_stable()


def resume(scenario, job):
    now = scenario.cluster.now
    scenario.cluster.update_job(
        job,
        state=JobState.RUNNING,
        started_at=now,
        suspended_since=None,
        resumed_at=now,
        blocker=None,
    )
    return scenario.reconcile_until_stable()


def running_prepare(**prepare):
    scenario = Scenario(a_pipeline(prepare=prepare))
    scenario.reconcile_until_stable()
    return scenario, scenario.start("prepare")


def test_suspended_stage_waits_and_says_it():
    scenario, job = running_prepare()
    suspend(scenario.after(12), job)
    stage = scenario.stage("prepare")
    assert (stage.state, stage.reason) == (
        StageState.QUEUED,
        Reason.WAITING_FOR_QUOTA,
    )
    assert scenario.status.phase == "Pending"
    assert stage.interruptions == 1


def test_time_limit_counts_no_suspension():
    scenario, job = running_prepare(maxRuntimeSeconds=60)
    suspend(scenario.after(12), job)
    scenario.after(3600).reconcile_until_stable()
    assert not scenario.cluster.jobs[job].asked_to_stop
    resume(scenario, job)
    scenario.after(40).reconcile_until_stable()
    assert not scenario.cluster.jobs[job].asked_to_stop
    scenario.after(10).reconcile_until_stable()
    assert scenario.cluster.jobs[job].asked_to_stop
    scenario.cluster.evict(job, disruption=None)
    scenario.reconcile_until_stable()
    assert scenario.stage("prepare").reason is Reason.DEADLINE_EXCEEDED
    assert scenario.stage("prepare").active_seconds == pytest.approx(62)


def test_cost_of_an_attempt_counts_no_suspension():
    scenario = Scenario(settings=Settings(placement_defaults=PRICED))
    scenario.reconcile_until_stable()
    job = scenario.start("prepare")
    suspend(scenario.after(10), job)
    resume(scenario.after(1000), job)
    scenario.after(20).complete("prepare")
    attempt = scenario.attempt("prepare")
    assert attempt.outcome is Outcome.SUCCEEDED
    assert attempt.seconds == pytest.approx(30)
    assert attempt.suspended_seconds == pytest.approx(1000)
    assert attempt.cost == Decimal(30)


def test_each_suspension_of_a_running_process_is_an_interruption():
    scenario, job = running_prepare()
    for _ in range(3):
        suspend(scenario.after(5), job)
        scenario.after(100).reconcile_until_stable()
        resume(scenario, job)
    assert scenario.stage("prepare").interruptions == 3
    assert scenario.attempt("prepare").suspensions == 3
    scenario.after(5).complete("prepare")
    assert scenario.stage("prepare").active_seconds == pytest.approx(20)
    assert scenario.stage("prepare").interruptions == 3


def test_suspension_before_the_start_is_no_interruption():
    scenario = Scenario().reconcile_until_stable()
    job = scenario.attempt("prepare").job
    suspend(scenario, job)
    resume(scenario.after(100), job)
    assert scenario.stage("prepare").interruptions == 0
    scenario.after(60).complete("prepare")
    assert scenario.attempt("prepare").seconds == pytest.approx(60)


def test_suspension_that_no_operator_saw_counts_once():
    scenario, job = running_prepare()
    scenario.after(500)
    resume(scenario, job)
    scenario.after(10).reconcile_until_stable()
    assert scenario.stage("prepare").interruptions == 1
    assert scenario.attempt("prepare").suspensions == 1


def test_suspensions_beyond_the_budget_fail_the_stage():
    scenario, job = running_prepare(maxInterruptions=1)
    for _ in range(2):
        suspend(scenario.after(5), job)
        resume(scenario.after(5), job)
    assert scenario.cluster.jobs[job].asked_to_stop
    scenario.cluster.evict(job, disruption=None)
    scenario.reconcile_until_stable()
    assert scenario.stage("prepare").state is StageState.FAILED
    assert scenario.stage("prepare").reason is Reason.RETRIES_EXHAUSTED


def test_cancelled_while_suspended_has_the_time_that_it_ran():
    scenario, job = running_prepare()
    suspend(scenario.after(12), job)
    scenario.after(500).cancel("now")
    scenario.cluster.delete_job(job)
    scenario.reconcile_until_stable()
    attempt = scenario.attempt("prepare")
    assert attempt.outcome is Outcome.STOPPED
    assert attempt.seconds == pytest.approx(12)


def test_steps_of_an_attempt_begin_with_its_first_process():
    scenario = Scenario().run_before("train")
    job = scenario.start("train")
    scenario.cluster.progress(job, 40, total=100, start_step=0, saved_step=40)
    suspend(scenario.after(60), job)
    resume(scenario.after(60), job)
    scenario.cluster.progress(job, 60, total=100, start_step=40, saved_step=60)
    scenario.after(60).reconcile_until_stable()
    assert scenario.attempt("train").start_step == 0
    assert scenario.attempt("train").last_step == 60
