"""`kubectl get` tells what happens now: no Running without a process, and the last error between two attempts."""

import pytest
from support.operator.scenario import Scenario, a_pipeline

from finetune_operator.api.conditions import READY, Reason
from finetune_operator.api.status import StageState
from finetune_operator.core.observation import Blocker

BLOCKERS = (
    Reason.IMAGE_PULL_FAILED,
    Reason.SECRET_NOT_FOUND,
    Reason.WAITING_FOR_QUOTA,
    Reason.WAITING_FOR_CAPACITY,
    Reason.CONTAINER_NOT_STARTED,
    Reason.POD_REFUSED,
)


def message(scenario):
    conditions = {condition.type: condition for condition in scenario.status.conditions}
    return conditions[READY].message


@pytest.mark.parametrize("reason", BLOCKERS)
def test_blocked_pipeline_is_pending_with_its_reason(reason):
    scenario = Scenario().reconcile_until_stable()
    job = scenario.attempt("prepare").job
    scenario.cluster.update_job(job, blocker=Blocker(reason, "blocked: mend it"))
    scenario.reconcile_until_stable()
    assert scenario.status.phase == "Pending"
    assert scenario.condition(READY) == ("False", reason.value)
    assert "mend it" in message(scenario)


def test_queued_pipeline_is_pending_and_runs_with_its_process():
    scenario = Scenario().reconcile_until_stable()
    assert scenario.status.phase == "Pending"
    scenario.start("prepare")
    assert scenario.status.phase == "Running"
    scenario.complete("prepare")
    assert scenario.status.phase == "Pending"
    assert scenario.status.stage == "train"


def test_stopping_an_attempt_that_never_ran_is_pending():
    scenario = Scenario().reconcile_until_stable()
    scenario.cancel("now")
    assert scenario.stage("prepare").state is StageState.QUEUED
    assert scenario.status.phase == "Pending"


def test_retrying_shows_the_last_failure_and_the_pause():
    scenario = Scenario().reconcile_until_stable()
    job = scenario.start("prepare")
    scenario.cluster.fail(job, 69, "FAIL_WITH is set")
    scenario.reconcile_until_stable()
    assert scenario.condition(READY) == ("False", Reason.RETRYING.value)
    text = "attempt 1 failed: FAIL_WITH is set; the next attempt starts 10 s later"
    assert f"prepare: {text}" in message(scenario)
    written = scenario.change_counts
    scenario.after(5).reconcile_until_stable()
    assert scenario.change_counts == written


def test_retrying_shows_the_last_interruption():
    scenario = Scenario().reconcile_until_stable()
    job = scenario.start("prepare")
    scenario.cluster.evict(job, disruption="EvictionByEvictionAPI on spot-1")
    scenario.reconcile_until_stable()
    assert "attempt 1 was interrupted: EvictionByEvictionAPI" in message(scenario)


def test_retrying_without_a_message_shows_the_reason():
    scenario = Scenario(a_pipeline(prepare={"maxFailures": 2})).reconcile_until_stable()
    job = scenario.start("prepare")
    scenario.cluster.evict(job, disruption=None)
    scenario.reconcile_until_stable()
    assert "attempt 1 was interrupted" in message(scenario)
