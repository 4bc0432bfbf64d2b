"""How often a stage is tried, how long it waits in between and how long it may run in all."""

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


def test_failures_and_interruptions_have_budgets_of_their_own():
    scenario = Scenario(a_pipeline(train={"retries": {"failures": 2, "interruptions": 3}})).run("prepare")
    interrupt(fail(scenario, 2).after(1000), 3)
    assert (scenario.stage("train").failures, scenario.stage("train").interruptions) == (2, 3)
    assert scenario.finish().status.phase == "Succeeded"


def test_one_failure_more_than_allowed_ends_it():
    scenario = fail(Scenario(a_pipeline(train={"retries": {"failures": 2}})).run("prepare"), 3)
    assert scenario.condition("Stalled") == ("True", "RetriesExhausted")
    assert "failed 3 times" in scenario.stage("train").message
    assert scenario.after(1e6).reconcile_until_stable().created_jobs[-1] == "train-a3"


def test_one_interruption_more_than_allowed_ends_it():
    scenario = interrupt(Scenario(a_pipeline(train={"retries": {"interruptions": 2}})).run("prepare"), 3)
    assert scenario.condition("Stalled") == ("True", "RetriesExhausted")
    assert "interrupted 3 times: its node is gone" in scenario.stage("train").message


def test_a_larger_budget_lets_it_go_on():
    scenario = fail(Scenario(a_pipeline(train={"retries": {"failures": 0}})).run("prepare"), 1)
    assert scenario.status.phase == "Failed"
    scenario.edit(train={"retries": {"failures": 1}})
    assert scenario.after(1000).finish().status.phase == "Succeeded"


def test_the_wait_doubles_with_each_failure_up_to_a_limit():
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


def test_attempts_are_numbered_for_ever_and_the_newest_ten_are_kept():
    scenario = interrupt(Scenario().run("prepare"), 15)
    numbers = [attempt.number for attempt in scenario.stage("train").attempts]
    assert numbers == list(range(16 - ATTEMPTS_KEPT + 1, 17))
    assert scenario.stage("train").interruptions == 15
    assert scenario.status.interruptions == 15
    assert len(set(scenario.created_jobs)) == len(scenario.created_jobs)


def test_a_stage_is_stopped_when_its_time_is_up():
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


def test_only_time_in_which_it_ran_counts_towards_the_timeout():
    scenario = Scenario(a_pipeline(train={"timeoutSeconds": 100})).run("prepare")
    for _ in range(3):
        scenario.after(1000).reconcile_until_stable()  # waits for a node
        job = scenario.start("train")
        scenario.after(30).lose_node(job)
        scenario.reconcile_until_stable()
    assert scenario.stage("train").active_seconds == 90
    scenario.start("train")
    assert scenario.requeue_after == timedelta(seconds=10)


def test_all_stages_together_have_a_deadline():
    scenario = Scenario(a_pipeline(activeDeadlineSeconds=100)).run("prepare")  # 60 s
    job = scenario.after(5000).start("train")
    assert scenario.requeue_after == timedelta(seconds=40)
    scenario.after(40).reconcile_until_stable()
    scenario.cluster.evict(job, why=None)
    scenario.reconcile_until_stable()
    assert scenario.condition("Finished") == ("True", "DeadlineExceeded")
    assert "activeDeadlineSeconds" in scenario.status.conditions[0].message
    assert scenario.edit(activeDeadlineSeconds=1000).finish().status.phase == "Succeeded"


def test_a_retry_after_the_deadline_gets_the_whole_time_again():
    scenario = Scenario(a_pipeline(activeDeadlineSeconds=60)).run("prepare")
    assert scenario.condition("Finished") == ("True", "DeadlineExceeded")
    scenario.retry("again")
    assert scenario.created_jobs[-1] == "train-a1"
    assert scenario.condition("Finished") == ("False", "Progressing")


def test_what_an_earlier_spec_took_does_not_count_towards_the_timeout():
    scenario = Scenario(a_pipeline(train={"timeoutSeconds": 100})).run("prepare")
    job = scenario.start("train")
    scenario.after(90).edit(train={"lora": {"rank": 4}})
    scenario.cluster.evict(job, why=None)
    scenario.start("train")
    assert scenario.requeue_after == timedelta(seconds=100)


def test_running_work_is_looked_at_now_and_then():
    scenario = Scenario()
    scenario.reconcile()
    assert scenario.requeue_after == Settings().poll_interval


@pytest.mark.parametrize("state", ["finished", "failed", "suspended"])
def test_where_nothing_can_happen_by_itself_nobody_looks(state):
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


def test_nothing_starts_after_the_last_stage_that_is_wanted():
    scenario = Scenario(settings=Settings(until="train")).finish()
    assert scenario.created_jobs == ["prepare-a1", "train-a1"]
    assert scenario.requeue_after is None


def test_a_stage_that_is_not_wanted_is_not_waited_for_either():
    scenario = Scenario(a_pipeline()).run_before("evaluate")
    scenario.cluster.fail(scenario.start("evaluate"), 70)
    scenario.reconcile_until_stable()
    scenario.settings = Settings(until="train")
    scenario.after(1000).reconcile_until_stable()
    assert scenario.requeue_after is None


def test_an_old_attempt_that_is_slow_to_stop_takes_no_time_from_the_new_ones():
    scenario = Scenario(a_pipeline(activeDeadlineSeconds=200)).run("prepare")
    scenario.start("train")
    scenario.after(95).edit(seed=7)
    job = scenario.start("prepare")
    scenario.after(60).reconcile_until_stable()  # with the old training, which has not stopped yet, it would be 215
    assert not scenario.cluster.jobs[job].asked_to_stop
    assert scenario.requeue_after == timedelta(seconds=140)
