"""Retry budgets, backoff, timeouts and the requeue interval."""

from datetime import timedelta

import pytest
from support.scenario import Scenario, a_pipeline

from finetune_operator.api.status import ATTEMPTS_KEPT, Outcome
from finetune_operator.core.settings import Settings


def fail(scenario: Scenario, times: int, code: int = 70) -> Scenario:
    for _ in range(times):
        scenario.cluster.fail(scenario.after(1000).start("train"), code)
        scenario.reconcile_until_stable()
    return scenario


def interrupt(scenario: Scenario, times: int) -> Scenario:
    for _ in range(times):
        scenario.lose_node(scenario.start("train"))
        scenario.reconcile_until_stable()
    return scenario


def test_failures_and_interruptions_have_separate_budgets():
    scenario = Scenario(a_pipeline(train={"retries": {"failures": 2, "interruptions": 3}})).run("prepare")
    interrupt(fail(scenario, 2).after(1000), 3)
    assert (scenario.stage("train").failures, scenario.stage("train").interruptions) == (2, 3)
    assert scenario.finish().status.phase == "Succeeded"


def test_stage_fails_when_failure_budget_is_exceeded():
    scenario = fail(Scenario(a_pipeline(train={"retries": {"failures": 2}})).run("prepare"), 3)
    assert scenario.condition("Stalled") == ("True", "RetriesExhausted")
    assert "failed 3 times" in scenario.stage("train").message
    assert scenario.after(1e6).reconcile_until_stable().created_jobs[-1] == "train-a3"


def test_stage_fails_when_interruption_budget_is_exceeded():
    scenario = interrupt(Scenario(a_pipeline(train={"retries": {"interruptions": 2}})).run("prepare"), 3)
    assert scenario.condition("Stalled") == ("True", "RetriesExhausted")
    assert "interrupted 3 times: its node is gone" in scenario.stage("train").message


def test_raised_budget_continues_failed_stage():
    scenario = fail(Scenario(a_pipeline(train={"retries": {"failures": 0}})).run("prepare"), 1)
    assert scenario.status.phase == "Failed"
    scenario.edit(train={"retries": {"failures": 1}})
    assert scenario.after(1000).finish().status.phase == "Succeeded"


def test_backoff_doubles_with_each_failure_up_to_limit():
    scenario = Scenario(a_pipeline(train={"retries": {"failures": 100}})).run("prepare")
    waits = []
    for _ in range(9):
        scenario.cluster.fail(scenario.start("train"), 70)
        scenario.reconcile_until_stable()
        assert scenario.requeue_after
        waits.append(scenario.requeue_after.total_seconds())
        scenario.after(waits[-1] - 1).reconcile_until_stable()
        assert scenario.running is None
        scenario.after(1).reconcile_until_stable()
    assert waits == [10, 20, 40, 80, 160, 320, 600, 600, 600]


def test_backoff_never_overflows():
    assert Settings().backoff(10**9) == timedelta(minutes=10)


def test_status_keeps_newest_ten_attempts_and_their_numbers():
    scenario = interrupt(Scenario().run("prepare"), 15)
    numbers = [attempt.number for attempt in scenario.stage("train").attempts]
    assert numbers == list(range(16 - ATTEMPTS_KEPT + 1, 17))
    assert scenario.stage("train").interruptions == 15
    assert scenario.status.interruptions == 15
    assert len(set(scenario.created_jobs)) == len(scenario.created_jobs)


def test_stage_is_stopped_after_its_timeout():
    scenario = Scenario(a_pipeline(train={"timeoutSeconds": 100})).run("prepare")
    job = scenario.start("train")
    assert scenario.requeue_after == timedelta(seconds=100)
    scenario.after(99).reconcile_until_stable()
    assert not scenario.cluster.jobs[job].asked_to_stop
    scenario.after(1).reconcile_until_stable()
    assert scenario.cluster.jobs[job].asked_to_stop
    scenario.cluster.evict(job, why=None)
    scenario.reconcile_until_stable()
    assert (scenario.stage("train").state, scenario.stage("train").reason) == ("Failed", "DeadlineExceeded")
    assert scenario.attempt("train").outcome == Outcome.STOPPED
    assert scenario.edit(train={"timeoutSeconds": 500}).finish().status.phase == "Succeeded"


def test_timeout_counts_running_time_only():
    scenario = Scenario(a_pipeline(train={"timeoutSeconds": 100})).run("prepare")
    for _ in range(3):
        scenario.after(1000).reconcile_until_stable()  # waiting for a node
        job = scenario.start("train")
        scenario.after(30).lose_node(job)
        scenario.reconcile_until_stable()
    assert scenario.stage("train").active_seconds == 90
    scenario.start("train")
    assert scenario.requeue_after == timedelta(seconds=10)


def test_active_deadline_limits_all_stages_together():
    scenario = Scenario(a_pipeline(activeDeadlineSeconds=100)).run("prepare")  # 60 s
    job = scenario.after(5000).start("train")
    assert scenario.requeue_after == timedelta(seconds=40)
    scenario.after(40).reconcile_until_stable()
    scenario.cluster.evict(job, why=None)
    scenario.reconcile_until_stable()
    assert scenario.condition("Finished") == ("True", "DeadlineExceeded")
    assert "activeDeadlineSeconds" in scenario.status.conditions[0].message
    assert scenario.edit(activeDeadlineSeconds=1000).finish().status.phase == "Succeeded"


def test_retry_resets_active_deadline():
    scenario = Scenario(a_pipeline(activeDeadlineSeconds=60)).run("prepare")
    assert scenario.condition("Finished") == ("True", "DeadlineExceeded")
    scenario.retry("again")
    assert scenario.created_jobs[-1] == "train-a1"
    assert scenario.condition("Finished") == ("False", "Progressing")


def test_timeout_excludes_attempts_of_earlier_spec():
    scenario = Scenario(a_pipeline(train={"timeoutSeconds": 100})).run("prepare")
    job = scenario.start("train")
    scenario.after(90).edit(train={"lora": {"rank": 4}})
    scenario.cluster.evict(job, why=None)
    scenario.start("train")
    assert scenario.requeue_after == timedelta(seconds=100)


def test_running_pipeline_is_requeued_after_poll_interval():
    scenario = Scenario()
    scenario.reconcile()
    assert scenario.requeue_after == Settings().poll_interval


@pytest.mark.parametrize("state", ["finished", "failed", "suspended"])
def test_idle_pipeline_is_not_requeued(state):
    scenario = Scenario()
    if state == "finished":
        scenario.finish()
    elif state == "failed":
        scenario.cluster.fail(scenario.start("prepare"), 65)
        scenario.reconcile_until_stable()
    else:
        job = scenario.start("prepare")
        scenario.edit(suspend=True).cluster.evict(job, why=None)
        scenario.reconcile_until_stable()
    assert scenario.requeue_after is None


def test_until_starts_no_later_stage():
    scenario = Scenario(settings=Settings(until="train")).finish()
    assert scenario.created_jobs == ["prepare-a1", "train-a1"]
    assert scenario.requeue_after is None


def test_until_requeues_no_backoff_of_later_stage():
    scenario = Scenario(a_pipeline()).run_before("evaluate")
    scenario.cluster.fail(scenario.start("evaluate"), 70)
    scenario.reconcile_until_stable()
    scenario.settings = Settings(until="train")
    scenario.after(1000).reconcile_until_stable()
    assert scenario.requeue_after is None


def test_deadline_excludes_superseded_attempt():
    scenario = Scenario(a_pipeline(activeDeadlineSeconds=200)).run("prepare")
    scenario.start("train")
    scenario.after(95).edit(seed=7)
    job = scenario.start("prepare")
    scenario.after(60).reconcile_until_stable()  # 215 s if the old training, which is still stopping, counted
    assert not scenario.cluster.jobs[job].asked_to_stop
    assert scenario.requeue_after == timedelta(seconds=140)
