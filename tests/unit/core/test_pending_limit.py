"""`maxPendingSeconds`: what only a person can mend holds nodes for a limited time; what passes waits on."""

from datetime import timedelta

import pytest
from support.operator.scenario import Scenario, a_pipeline

from finetune_operator.api.conditions import NEEDS_PERSON, READY, Reason
from finetune_operator.api.status import Outcome, StageState
from finetune_operator.core.observation import Blocker, JobState
from finetune_operator.core.workspace import WORKSPACE

HOUR = 3600
STARTS = sorted(NEEDS_PERSON - {Reason.SERVER_NOT_READY})
PASSES = (
    Reason.WAITING_FOR_CAPACITY,
    Reason.WAITING_FOR_QUOTA,
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


def test_sidecar_that_fails_again_and_again_has_the_limit():
    """Between two failures nothing is wrong for a moment, and the stage's own process never runs."""
    scenario, job = blocked(Reason.SIDECAR_FAILED)
    for _ in range(59):
        scenario.after(50)
        scenario.cluster.update_job(job, blocker=None)
        scenario.reconcile_until_stable().after(10)
        failed = Blocker(Reason.SIDECAR_FAILED, "mend it")
        scenario.cluster.update_job(job, blocker=failed)
        scenario.reconcile_until_stable()
    assert not scenario.cluster.jobs[job].asked_to_stop
    scenario.after(60).reconcile_until_stable()
    assert scenario.cluster.jobs[job].asked_to_stop
    end(scenario, job)
    assert scenario.stage("prepare").reason is Reason.SIDECAR_FAILED


def test_process_that_runs_ends_the_wait():
    """A queue may suspend the Job later, and its next pod has the whole time again."""
    scenario, job = blocked(Reason.IMAGE_PULL_FAILED)
    scenario.after(HOUR - 1).start("prepare")
    scenario.reconcile_until_stable()
    assert scenario.attempt("prepare").blocked_at is None
    again = Blocker(Reason.IMAGE_PULL_FAILED, "no")
    scenario.cluster.update_job(job, state=JobState.WAITING, blocker=again)
    scenario.reconcile_until_stable().after(HOUR - 1).reconcile_until_stable()
    assert not scenario.cluster.jobs[job].asked_to_stop


def test_wait_for_nodes_after_an_error_begins_anew():
    scenario, job = blocked(Reason.IMAGE_PULL_FAILED)
    scenario.after(HOUR - 1)
    for reason in (Reason.WAITING_FOR_CAPACITY, Reason.IMAGE_PULL_FAILED):
        scenario.cluster.update_job(job, blocker=Blocker(reason, "no"))
        scenario.reconcile_until_stable().after(60)
    scenario.reconcile_until_stable()
    assert not scenario.cluster.jobs[job].asked_to_stop


FIRST_JOB = Scenario().reconcile_until_stable().attempt("prepare").job
REFUSALS = {
    "a policy": (Reason.POD_REFUSED, True),
    "a webhook that is down": (Reason.DEPENDENCY_NOT_READY, True),
    "a quota": (Reason.WAITING_FOR_QUOTA, False),
}


@pytest.mark.parametrize(("reason", "ends"), REFUSALS.values(), ids=REFUSALS)
@pytest.mark.parametrize("subject", [FIRST_JOB, WORKSPACE])
def test_refused_job_or_claim_fails_after_an_hour(subject, reason, ends):
    """A quota may have room when another workload ends, so only people can tell whether its wait is too long."""
    scenario = Scenario()
    scenario.cluster.refusals[subject] = Blocker(reason, "mend it")
    scenario.reconcile_until_stable().after(HOUR - 1).reconcile_until_stable()
    assert scenario.attempt("prepare").outcome is Outcome.RUNNING
    scenario.after(2).reconcile_until_stable()
    stage = scenario.stage("prepare")
    assert scenario.created_jobs == []
    assert stage.reason is reason
    assert (stage.state is StageState.FAILED) is ends
    if ends:
        assert "prepare.maxPendingSeconds, 3600 s: then retry" in stage.message
        del scenario.cluster.refusals[subject]
        scenario.retry("1").finish()
        assert scenario.status.phase == "Succeeded"


def test_refusal_that_comes_and_goes_has_the_limit():
    scenario = Scenario()
    refusals = scenario.cluster.refusals
    for minute in range(61):
        reason = (Reason.POD_REFUSED, Reason.DEPENDENCY_NOT_READY)[minute % 2]
        refusals[FIRST_JOB] = Blocker(reason, "mend it")
        scenario.reconcile_until_stable().after(60)
    scenario.reconcile_until_stable()
    assert scenario.stage("prepare").state is StageState.FAILED


def test_server_evicted_before_it_is_ready_has_the_limit():
    """Its pod is evicted again and again, and each new pod starts anew."""
    scenario = Scenario().run_before("deploy")
    job = scenario.start("deploy")
    for _ in range(7):
        scenario.reconcile_until_stable().after(500)
        scenario.cluster.update_job(job, state=JobState.WAITING, started_at=None)
        scenario.reconcile_until_stable().after(10).start("deploy")
    assert not scenario.cluster.jobs[job].asked_to_stop
    scenario.after(60).reconcile_until_stable()
    assert scenario.cluster.jobs[job].asked_to_stop


@pytest.mark.parametrize("node_ahead", [-5 * HOUR, 5 * HOUR])
def test_clock_of_the_node_does_not_move_a_servers_limit(node_ahead):
    scenario = Scenario().run_before("deploy")
    job = scenario.start("deploy")
    start = scenario.cluster.now + timedelta(seconds=node_ahead)
    scenario.cluster.update_job(job, started_at=start)
    scenario.reconcile_until_stable().after(HOUR - 1).reconcile_until_stable()
    assert not scenario.cluster.jobs[job].asked_to_stop
    scenario.after(1).reconcile_until_stable()
    assert scenario.cluster.jobs[job].asked_to_stop


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
