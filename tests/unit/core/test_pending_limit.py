"""`maxPendingSeconds`: what only a person can mend holds nodes for a limited time; what passes waits on."""

import pytest
from support.operator.scenario import Scenario, a_pipeline

from finetune_operator.api.conditions import NEEDS_PERSON, READY, Reason
from finetune_operator.api.status import Outcome, StageState
from finetune_operator.core.observation import Blocker, JobState

HOUR = 3600
STARTS = sorted(NEEDS_PERSON - {Reason.SERVER_NOT_READY})
PASSES = (
    Reason.WAITING_FOR_CAPACITY,
    Reason.WAITING_FOR_QUOTA,
    Reason.DEPENDENCY_NOT_READY,
    Reason.POD_REFUSED,
)


def blocked(reason, text="mend it", **prepare):
    scenario = Scenario(a_pipeline(prepare=prepare)).reconcile_until_stable()
    job = scenario.attempt("prepare").job
    scenario.cluster.update_job(job, blocker=Blocker(reason, text))
    return scenario.reconcile_until_stable(), job


def end(scenario, job):
    """Delete the stopped Job, whose pod has ended without a process, as a pod without an image does."""
    scenario.cluster.delete_job(job)
    return scenario.reconcile_until_stable()


@pytest.mark.parametrize("reason", STARTS)
def test_attempt_that_needs_a_person_fails_after_an_hour(reason):
    scenario, job = blocked(reason)
    scenario.after(HOUR - 1).reconcile_until_stable()
    assert not scenario.cluster.jobs[job].asked_to_stop
    assert scenario.requeue_after.total_seconds() <= 1
    scenario.after(1).reconcile_until_stable()
    assert scenario.cluster.jobs[job].asked_to_stop
    end(scenario, job)
    stage = scenario.stage("prepare")
    assert stage.state == StageState.FAILED
    assert stage.reason == reason
    assert "mend it; the attempt has waited for prepare.maxPendingSeconds, 3600 s" in (
        stage.message
    )
    assert scenario.attempt("prepare").outcome is Outcome.FAILED
    assert scenario.status.phase == "Failed"
    assert scenario.condition(READY) == ("False", reason.value)
    assert scenario.created_jobs == ["prepare-a1"]


def test_pod_that_ends_with_a_signal_keeps_the_reason():
    scenario, job = blocked(Reason.IMAGE_PULL_FAILED)
    scenario.after(HOUR).reconcile_until_stable()
    scenario.cluster.fail(job, None, disruption="the pod was deleted")
    scenario.reconcile_until_stable()
    assert scenario.stage("prepare").reason is Reason.IMAGE_PULL_FAILED


def test_retry_after_the_limit_starts_another_attempt():
    scenario, job = blocked(Reason.SECRET_NOT_FOUND)
    scenario.after(HOUR).reconcile_until_stable()
    end(scenario, job).retry("1")
    assert scenario.created_jobs == ["prepare-a1", "prepare-a2"]
    scenario.finish()
    assert scenario.status.phase == "Succeeded"


@pytest.mark.parametrize("reason", PASSES)
def test_wait_for_nodes_quota_or_platform_has_no_limit(reason):
    scenario, job = blocked(reason)
    scenario.after(100 * HOUR).reconcile_until_stable()
    assert not scenario.cluster.jobs[job].asked_to_stop


def test_wait_for_capacity_before_an_error_does_not_count():
    scenario, job = blocked(Reason.WAITING_FOR_CAPACITY)
    scenario.after(100 * HOUR)
    scenario.cluster.update_job(job, blocker=Blocker(Reason.IMAGE_PULL_FAILED, "no"))
    scenario.reconcile_until_stable()
    scenario.after(HOUR - 1).reconcile_until_stable()
    assert not scenario.cluster.jobs[job].asked_to_stop


def test_mended_attempt_goes_on():
    scenario, job = blocked(Reason.IMAGE_PULL_FAILED)
    scenario.after(HOUR - 1).reconcile_until_stable()
    scenario.cluster.update_job(job, blocker=None)
    scenario.reconcile_until_stable()
    scenario.after(10 * HOUR).start("prepare")
    scenario.complete("prepare")
    assert scenario.stage("prepare").state is StageState.SUCCEEDED


def test_volume_whose_zone_has_no_node_has_no_limit():
    """A spot pool in the zone of the volume may be empty for hours."""
    message = "0/3 nodes are available: 3 node(s) didn't match PersistentVolume's node affinity"
    scenario, job = blocked(Reason.VOLUME_NOT_READY, message)
    scenario.cluster.update_job(job, unschedulable_since=scenario.cluster.now)
    scenario.reconcile_until_stable()
    scenario.after(100 * HOUR).reconcile_until_stable()
    assert not scenario.cluster.jobs[job].asked_to_stop


@pytest.mark.parametrize(("limit", "stops"), [(60, True), (0, False)])
def test_limit_can_be_set_and_switched_off(limit, stops):
    scenario, job = blocked(Reason.IMAGE_PULL_FAILED, maxPendingSeconds=limit)
    scenario.after(90).reconcile_until_stable()
    scenario.after(100 * HOUR * (not stops)).reconcile_until_stable()
    assert scenario.cluster.jobs[job].asked_to_stop is stops


def test_server_that_never_gets_ready_fails_after_an_hour():
    scenario = Scenario().run_before("deploy")
    job = scenario.start("deploy")
    scenario.after(HOUR - 1).reconcile_until_stable()
    assert not scenario.cluster.jobs[job].asked_to_stop
    scenario.after(1).reconcile_until_stable()
    assert scenario.cluster.jobs[job].asked_to_stop
    end(scenario, job)
    stage = scenario.stage("deploy")
    assert stage.state == StageState.FAILED
    assert stage.reason == Reason.SERVER_NOT_READY
    assert "deploy.maxPendingSeconds" in stage.message
    assert scenario.status.phase == "Failed"


def test_last_replica_of_a_server_has_an_hour_of_its_own():
    scenario = Scenario().run_before("deploy")
    job = scenario.start("deploy")
    scenario.cluster.update_job(
        job, state=JobState.WAITING, blocker=Blocker(Reason.WAITING_FOR_CAPACITY, "no")
    )
    scenario.after(10 * HOUR).reconcile_until_stable()
    scenario.start("deploy")
    scenario.after(HOUR - 1).reconcile_until_stable()
    assert not scenario.cluster.jobs[job].asked_to_stop


def test_training_that_runs_has_no_pending_limit():
    scenario = Scenario().run_before("train")
    job = scenario.start("train")
    scenario.after(100 * HOUR).reconcile_until_stable()
    assert not scenario.cluster.jobs[job].asked_to_stop
