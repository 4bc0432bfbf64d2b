"""Suspend, cancel and retry."""

import pytest
from support.operator.kstatus import kstatus
from support.operator.scenario import ORDER, Scenario, a_pipeline

from finetune_operator.api.status import Outcome


@pytest.mark.parametrize("stage", ORDER)
def test_suspend_stops_attempt_and_resume_starts_a_new_one(stage):
    scenario = Scenario().run_before(stage)
    job = scenario.start(stage)
    scenario.edit(suspend=True)
    assert scenario.cluster.jobs[job].asked_to_stop
    assert (scenario.status.phase, scenario.condition("Reconciling")) == (
        "Suspended",
        ("True", "Suspended"),
    )
    scenario.cluster.evict(job, step=5, saved=5, disruption=None)
    scenario.after(1000).reconcile_until_stable()
    assert (scenario.attempt(stage).outcome, scenario.attempt(stage).reason) == (
        Outcome.STOPPED,
        "Suspended",
    )
    assert (scenario.stage(stage).state, scenario.stage(stage).reason) == (
        "Pending",
        "Suspended",
    )
    assert scenario.condition("Reconciling") is None
    assert scenario.condition("Finished") == ("False", "Suspended")
    scenario.edit(suspend=False)
    assert scenario.created_jobs[-1] == f"{stage}-a2"
    assert scenario.stage(stage).interruptions == 0
    assert scenario.finish().status.phase == "Succeeded"


def test_suspended_pipeline_starts_no_next_stage():
    scenario = Scenario()
    scenario.start("prepare")
    scenario.edit(suspend=True).complete("prepare")
    assert scenario.created_jobs == ["prepare-a1"]
    assert scenario.edit(suspend=False).created_jobs == ["prepare-a1", "train-a1"]


def test_pipeline_created_suspended_starts_nothing():
    scenario = Scenario(a_pipeline(suspend=True)).reconcile_until_stable()
    assert scenario.created_jobs == []
    assert scenario.status.phase == "Suspended"


def test_suspending_finished_pipeline_keeps_it_ready():
    scenario = Scenario().finish().edit(suspend=True)
    assert scenario.condition("Ready") == ("True", "AllStagesSucceeded")


def test_resume_waits_until_stopping_job_has_ended():
    scenario = Scenario()
    job = scenario.start("prepare")
    scenario.edit(suspend=True).edit(suspend=False)
    assert scenario.created_jobs == ["prepare-a1"]
    scenario.cluster.evict(job, disruption=None)
    assert scenario.reconcile_until_stable().created_jobs == [
        "prepare-a1",
        "prepare-a2",
    ]


def killed_before_apply(scenario: Scenario) -> Scenario:
    """Reconcile once, but kill the operator after the status is written and before any action."""

    def kill(moment: str) -> None:
        if moment == "before apply":
            raise ZeroDivisionError

    scenario.cluster.inject_fault = kill
    with pytest.raises(ZeroDivisionError):
        scenario.reconcile()
    scenario.cluster.inject_fault = lambda moment: None
    return scenario


def test_recorded_stop_is_executed_after_resume():
    """The operator records a stop, is killed before it sends SIGTERM, and the user resumes meanwhile."""
    scenario = Scenario()
    job = scenario.start("prepare")
    scenario.cluster.edit(scenario.key, a_pipeline(suspend=True))
    killed_before_apply(scenario)
    assert not scenario.cluster.jobs[job].asked_to_stop
    scenario.edit(suspend=False)
    assert scenario.cluster.jobs[job].asked_to_stop
    scenario.cluster.evict(job, disruption=None)
    assert scenario.finish().status.phase == "Succeeded"


def test_stopping_attempt_without_job_ends_it_at_once():
    scenario = killed_before_apply(Scenario())
    scenario.edit(suspend=True)
    assert scenario.cluster.jobs == {}
    assert scenario.attempt("prepare").outcome == Outcome.STOPPED
    assert scenario.edit(suspend=False).created_jobs == ["prepare-a2"]


@pytest.mark.parametrize("stage", ORDER)
def test_cancelled_pipeline_stays_stopped_until_retry(stage):
    scenario = Scenario().run_before(stage)
    job = scenario.start(stage)
    scenario.cancel("now")
    assert scenario.cluster.jobs[job].asked_to_stop
    scenario.cluster.evict(job, disruption=None)
    scenario.after(1e6).reconcile_until_stable()
    assert scenario.status.phase == "Cancelled"
    assert scenario.condition("Finished") == ("True", "Cancelled")
    assert kstatus(scenario) == "Failed"
    assert scenario.created_jobs[-1] == f"{stage}-a1"
    scenario.retry("now")
    assert scenario.finish().status.phase == "Succeeded"


def test_cancelled_pipeline_stays_cancelled_after_edit():
    scenario = Scenario().reconcile_until_stable().cancel("now")
    scenario.cluster.evict(scenario.attempt("prepare").job, disruption=None)
    scenario.reconcile_until_stable().edit(train={"lora": {"rank": 4}})
    assert scenario.status.phase == "Cancelled"


def test_handled_token_has_no_effect_until_it_changes():
    """The annotations stay on the object, so only a new value is a new request."""
    scenario = Scenario().reconcile_until_stable().cancel("1")
    scenario.cluster.evict(scenario.attempt("prepare").job, disruption=None)
    scenario.reconcile_until_stable().retry("1")
    assert scenario.created_jobs[-1] == "prepare-a2"
    scenario.cancel("1").retry("1")
    assert scenario.status.cancelled is False
    assert not scenario.cluster.jobs[scenario.attempt("prepare").job].asked_to_stop
    scenario.cancel("2")
    assert scenario.status.cancelled is True


def test_cancelling_finished_pipeline_changes_nothing():
    scenario = Scenario().finish().cancel("now")
    assert scenario.status.phase == "Succeeded"


def test_retry_reruns_failed_stage_only():
    scenario = Scenario().run("prepare")
    scenario.cluster.fail(scenario.start("train"), 77)
    scenario.reconcile_until_stable().retry("1")
    assert scenario.created_jobs == ["prepare-a1", "train-a1", "train-a2"]
    assert scenario.finish().status.phase == "Succeeded"


@pytest.mark.parametrize("code", [65, 66])
def test_retry_after_missing_input_reruns_its_producer_first(code):
    """The producer verifies its output: exit codes 65 and 66 mean damaged or missing input."""
    scenario = Scenario().run("prepare")
    scenario.cluster.fail(scenario.start("train"), code, "there are no packed rows")
    scenario.reconcile_until_stable().retry("1")
    assert scenario.created_jobs == ["prepare-a1", "train-a1", "prepare-a2"]
    assert scenario.run("prepare").created_jobs[-1] == "train-a2"
    assert scenario.finish().status.phase == "Succeeded"


def test_retry_that_repeats_prepare_keeps_what_training_cost():
    scenario = Scenario().run("prepare", modelDigest="sha256:model")
    identity = scenario.stage("train").identity
    assert scenario.config("train").model_digest == "sha256:model"
    scenario.lose_node(scenario.start("train"))
    scenario.run("train")
    scenario.cluster.fail(scenario.start("evaluate"), 66, "there is no adapter")
    scenario.reconcile_until_stable().retry("1")
    assert scenario.running == "prepare"
    assert (
        scenario.stage("train").identity,
        scenario.stage("train").interruptions,
    ) == (
        identity,
        1,
    )


def test_other_base_model_gives_training_another_identity():
    first, other = (
        Scenario().run("prepare", modelDigest=f"sha256:{name}").stage("train").identity
        for name in "ab"
    )
    assert first != other


def test_retry_after_lost_workspace_reruns_all_stages():
    scenario = Scenario().run("prepare").run("train")
    scenario.cluster.fail(scenario.start("evaluate"), 66, "there is no adapter")
    scenario.reconcile_until_stable().retry("1")
    assert scenario.created_jobs[3:] == ["prepare-a2"]
    assert scenario.finish().created_jobs[3:6] == [
        "prepare-a2",
        "train-a2",
        "evaluate-a2",
    ]


def test_retry_resets_budgets():
    scenario = Scenario(a_pipeline(train={"maxFailures": 1})).run("prepare")
    for token in ("1", "2", "3"):
        for _ in range(2):
            scenario.cluster.fail(scenario.after(1000).start("train"), 70)
            scenario.reconcile_until_stable()
        assert scenario.status.phase == "Failed"
        scenario.retry(token)
        assert scenario.condition("Finished") == ("False", "Progressing")
    assert scenario.stage("train").failures == 6


def test_retry_skips_backoff():
    scenario = Scenario()
    scenario.cluster.fail(scenario.start("prepare"), 70)
    assert scenario.reconcile_until_stable().running is None
    scenario.retry("now")
    assert scenario.running == "prepare"


def test_retry_during_attempt_still_counts_its_outcome():
    scenario = Scenario()
    job = scenario.start("prepare")
    scenario.retry("now")
    scenario.cluster.fail(job, 65)
    scenario.reconcile_until_stable()
    assert scenario.status.phase == "Failed"
    assert scenario.created_jobs == ["prepare-a1"]


@pytest.mark.parametrize("token", ["", "x"])
def test_each_token_is_handled_once_even_an_empty_one(token):
    scenario = Scenario()
    scenario.cluster.fail(scenario.start("prepare"), 65)
    scenario.reconcile_until_stable().retry(token)
    assert scenario.created_jobs[-1] == "prepare-a2"
    scenario.cluster.fail(scenario.start("prepare"), 65)
    assert scenario.reconcile_until_stable().status.phase == "Failed"
    scenario.cancel(token)
    assert scenario.status.cancelled
