"""Retry budgets, backoff, timeouts and the requeue interval."""

from datetime import timedelta

import pytest
from support.operator.scenario import Scenario, a_pipeline

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
    return scenario.pass_interruption_backoff()


def test_failures_and_interruptions_have_separate_budgets():
    scenario = Scenario(
        a_pipeline(train={"maxFailures": 2, "maxInterruptions": 3})
    ).run("prepare")
    interrupt(fail(scenario, 2).after(1000), 3)
    assert (
        scenario.stage("train").failures,
        scenario.stage("train").interruptions,
    ) == (2, 3)
    assert scenario.finish().status.phase == "Succeeded"


def test_ten_evictions_leave_the_failure_budget_untouched():
    """With no failure to spare, a stage that is evicted ten times succeeds."""
    spec = a_pipeline(train={"maxFailures": 0, "maxInterruptions": 10})
    scenario = Scenario(spec).run("prepare")
    for step in range(1, 11):
        scenario.cluster.evict(scenario.start("train"), step * 10, step * 10)
        scenario.reconcile_until_stable()
    assert (
        scenario.stage("train").failures,
        scenario.stage("train").interruptions,
    ) == (0, 10)
    assert scenario.finish().status.phase == "Succeeded"


def test_eviction_after_ten_exceeds_only_its_own_budget():
    scenario = interrupt(
        Scenario(a_pipeline(train={"maxFailures": 0, "maxInterruptions": 10})).run(
            "prepare"
        ),
        11,
    )
    assert (
        scenario.stage("train").failures,
        scenario.stage("train").interruptions,
    ) == (0, 11)
    assert "interrupted 11 times" in scenario.stage("train").message


def test_crashing_script_leaves_interruption_budget_untouched():
    """With no interruption to spare, a crashing script uses up its own budget alone."""
    scenario = fail(
        Scenario(a_pipeline(train={"maxFailures": 3, "maxInterruptions": 0})).run(
            "prepare"
        ),
        3,
        code=1,
    )
    assert (
        scenario.stage("train").failures,
        scenario.stage("train").interruptions,
    ) == (3, 0)
    assert scenario.stage("train").state == "Pending"
    assert fail(scenario, 1, code=1).condition("Stalled") == (
        "True",
        "RetriesExhausted",
    )
    assert "failed 4 times" in scenario.stage("train").message
    assert scenario.stage("train").interruptions == 0


def test_stage_fails_when_failure_budget_is_exceeded():
    scenario = fail(Scenario(a_pipeline(train={"maxFailures": 2})).run("prepare"), 3)
    assert scenario.condition("Stalled") == ("True", "RetriesExhausted")
    assert "failed 3 times" in scenario.stage("train").message
    assert scenario.after(1e6).reconcile_until_stable().created_jobs[-1] == "train-a3"


def test_stage_fails_when_interruption_budget_is_exceeded():
    scenario = interrupt(
        Scenario(a_pipeline(train={"maxInterruptions": 2})).run("prepare"), 3
    )
    assert scenario.condition("Stalled") == ("True", "RetriesExhausted")
    assert "interrupted 3 times: its node is gone" in scenario.stage("train").message


def test_raised_budget_continues_failed_stage():
    scenario = fail(Scenario(a_pipeline(train={"maxFailures": 0})).run("prepare"), 1)
    assert scenario.status.phase == "Failed"
    scenario.edit(train={"maxFailures": 1})
    assert scenario.after(1000).finish().status.phase == "Succeeded"


def test_backoff_doubles_with_each_failure_up_to_limit():
    scenario = Scenario(a_pipeline(train={"maxFailures": 100})).run("prepare")
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
    scenario = Scenario(a_pipeline(train={"maxRuntimeSeconds": 100})).run("prepare")
    job = scenario.start("train")
    assert scenario.requeue_after == timedelta(seconds=100)
    scenario.after(99).reconcile_until_stable()
    assert not scenario.cluster.jobs[job].asked_to_stop
    scenario.after(1).reconcile_until_stable()
    assert scenario.cluster.jobs[job].asked_to_stop
    scenario.cluster.evict(job, disruption=None)
    scenario.reconcile_until_stable()
    assert (scenario.stage("train").state, scenario.stage("train").reason) == (
        "Failed",
        "DeadlineExceeded",
    )
    assert scenario.attempt("train").outcome == Outcome.STOPPED
    assert (
        scenario.edit(train={"maxRuntimeSeconds": 500}).finish().status.phase
        == "Succeeded"
    )


def run_until_finished(scenario: Scenario) -> Scenario:
    """Run training until the operator stops it, again and again, at most ten times."""
    for _ in range(10):
        if scenario.reconcile_until_stable().status.finished_at:
            break
        job = scenario.start("train")
        while not scenario.cluster.jobs[job].asked_to_stop:
            scenario.after(5).reconcile_until_stable()
        scenario.after(2).cluster.evict(job, disruption=None)
    return scenario


@pytest.mark.parametrize("ahead", [-3600, -20, 0, 20, 99, 101, 3600])
@pytest.mark.parametrize(
    "limit",
    [{"train": {"maxRuntimeSeconds": 100}}, {"maxRuntimeSeconds": 160}],
    ids=str,
)
def test_deadline_ends_the_stage_with_any_clock_skew(ahead, limit):
    """An operator ahead of the kubelet once started Job after Job: by the kubelet's times there was time left."""
    scenario = Scenario(a_pipeline(**limit)).run("prepare")
    scenario.operator_ahead = timedelta(seconds=ahead)
    run_until_finished(scenario)
    assert scenario.condition("Finished") == ("True", "DeadlineExceeded")
    assert scenario.created_jobs == ["prepare-a1", "train-a1"]


@pytest.mark.parametrize(
    "raised",
    [{"train": {"maxRuntimeSeconds": 5000}}, {"train": {"maxRuntimeSeconds": None}}],
    ids=str,
)
@pytest.mark.parametrize("ahead", [-20, 0, 20])
def test_raised_timeout_continues_under_clock_skew(ahead, raised):
    scenario = Scenario(a_pipeline(train={"maxRuntimeSeconds": 100})).run("prepare")
    scenario.operator_ahead = timedelta(seconds=ahead)
    run_until_finished(scenario).edit(**raised)
    assert scenario.created_jobs[-1] == "train-a2"
    scenario.start("train")
    assert scenario.after(60).complete("train").finish().status.phase == "Succeeded"


def test_lower_timeout_after_the_stop_names_the_time_used():
    scenario = Scenario(a_pipeline(train={"maxRuntimeSeconds": 100})).run("prepare")
    run_until_finished(scenario)
    assert (
        "ran for 102 s; train.maxRuntimeSeconds is 100: raise it"
        in scenario.stage("train").message
    )
    scenario.edit(train={"maxRuntimeSeconds": 101})
    assert scenario.stage("train").state == "Failed"
    assert scenario.retry("again").created_jobs[-1] == "train-a2"


def test_new_leader_with_another_clock_ends_the_stage():
    """The new leader's clock is right: the first attempt ran 80 s, so one more may run 20 s, and no third."""
    scenario = Scenario(a_pipeline(train={"maxRuntimeSeconds": 100})).run("prepare")
    scenario.operator_ahead = timedelta(seconds=20)
    job = scenario.start("train")
    scenario.after(80).reconcile()
    assert scenario.cluster.jobs[job].asked_to_stop
    scenario.operator_ahead = timedelta()
    scenario.cluster.evict(job, disruption=None)
    run_until_finished(scenario)
    assert scenario.created_jobs[1:] == ["train-a1", "train-a2"]
    assert scenario.stage("train").active_seconds < 110


def test_timeout_counts_running_time_only():
    scenario = Scenario(a_pipeline(train={"maxRuntimeSeconds": 100})).run("prepare")
    for _ in range(3):
        scenario.after(1000).reconcile_until_stable()  # waiting for a node
        job = scenario.start("train")
        scenario.after(30).lose_node(job)
        scenario.reconcile_until_stable()
    assert scenario.stage("train").active_seconds == 90
    scenario.start("train")
    assert scenario.requeue_after == timedelta(seconds=10)


def test_active_deadline_limits_all_stages_together():
    scenario = Scenario(a_pipeline(maxRuntimeSeconds=100)).run("prepare")  # 60 s
    job = scenario.after(5000).start("train")
    assert scenario.requeue_after == timedelta(seconds=40)
    scenario.after(40).reconcile_until_stable()
    scenario.cluster.evict(job, disruption=None)
    scenario.reconcile_until_stable()
    assert scenario.condition("Finished") == ("True", "DeadlineExceeded")
    assert "maxRuntimeSeconds" in scenario.status.conditions[0].message
    assert scenario.edit(maxRuntimeSeconds=1000).finish().status.phase == "Succeeded"


def test_retry_resets_active_deadline():
    scenario = Scenario(a_pipeline(maxRuntimeSeconds=60)).run("prepare")
    assert scenario.condition("Finished") == ("True", "DeadlineExceeded")
    scenario.retry("again")
    assert scenario.created_jobs[-1] == "train-a1"
    assert scenario.condition("Finished") == ("False", "Progressing")


def test_timeout_excludes_attempts_of_earlier_spec():
    scenario = Scenario(a_pipeline(train={"maxRuntimeSeconds": 100})).run("prepare")
    job = scenario.start("train")
    scenario.after(90).edit(train={"lora": {"rank": 4}})
    scenario.cluster.evict(job, disruption=None)
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
        scenario.edit(suspend=True).cluster.evict(job, disruption=None)
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
    scenario = Scenario(a_pipeline(maxRuntimeSeconds=200)).run("prepare")
    old = scenario.start("train")
    scenario.after(95).edit(seed=7)
    scenario.cluster.evict(old, disruption=None)
    job = scenario.start("prepare")
    scenario.after(
        60
    ).reconcile_until_stable()  # 215 s if the superseded training counted
    assert not scenario.cluster.jobs[job].asked_to_stop
    assert scenario.requeue_after == timedelta(seconds=140)
