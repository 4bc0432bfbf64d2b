"""A process whose pod goes on because of other containers: the operator stops the Job, and the process's end counts."""

import pytest
from support.operator.scenario import Scenario, a_pipeline

from finetune_operator.api.conditions import Reason
from finetune_operator.api.status import Outcome
from finetune_operator.core.observation import Blocker, PodFault

SIDECAR = Blocker(Reason.SIDECAR_RUNNING, "the container proxy has not ended")


def outlived(**train) -> Scenario:
    """Return a training whose process has just ended, and whose sidecar has not."""
    scenario = Scenario(a_pipeline(train=train)).run("prepare")
    job = scenario.start("train")
    scenario.after(60)
    scenario.cluster.update_job(
        job, outlived_since=scenario.cluster.now, blocker=SIDECAR, exit_code=0
    )
    return scenario.reconcile_until_stable()


def asked_to_stop(scenario: Scenario) -> bool:
    return scenario.cluster.jobs[scenario.attempt("train").job].asked_to_stop


def test_sidecar_is_stopped_after_30_s_with_a_reason():
    scenario = outlived()
    assert scenario.stage("train").reason is Reason.SIDECAR_RUNNING
    assert not asked_to_stop(scenario)
    assert scenario.requeue_after
    assert scenario.requeue_after.total_seconds() == pytest.approx(30)
    scenario.after(30).reconcile_until_stable()
    assert asked_to_stop(scenario)
    assert scenario.attempt("train").stopping is Reason.SIDECAR_RUNNING


def test_result_counts_after_the_stop_of_a_sidecar():
    scenario = outlived().after(30).reconcile_until_stable().complete("train")
    train = scenario.stage("train")
    assert train.state == "Succeeded"
    assert train.failures == 0
    assert train.interruptions == 0
    assert scenario.finish().status.phase == "Succeeded"


@pytest.mark.parametrize(
    ("code", "outcome", "counts"),
    [(70, Outcome.FAILED, (1, 0)), (75, Outcome.INTERRUPTED, (0, 1))],
)
def test_failure_counts_after_the_stop_of_a_sidecar(code, outcome, counts):
    """If it did not, a stage that always fails would be repeated for ever."""
    scenario = outlived().after(30).reconcile_until_stable()
    scenario.cluster.fail(scenario.attempt("train").job, code)
    train = scenario.reconcile_until_stable().stage("train")
    assert train.attempts[0].outcome is outcome
    assert (train.failures, train.interruptions) == counts


def test_deadline_does_not_stop_a_process_that_has_ended():
    """The result is there; only the sidecar uses the time."""
    scenario = outlived(maxRuntimeSeconds=70).after(20).reconcile_until_stable()
    assert not asked_to_stop(scenario)
    assert scenario.after(10).reconcile_until_stable().attempt("train").stopping == (
        "SidecarRunning"
    )


FAULTS = {
    "storage": (Reason.EPHEMERAL_STORAGE_EXCEEDED, False),
    "init container": (Reason.INIT_CONTAINER_FAILED, False),
    "node": (Reason.NODE_PRESSURE, True),
}


@pytest.mark.parametrize(("reason", "interrupts"), FAULTS.values(), ids=FAULTS)
def test_fault_has_its_reason_and_its_budget(reason, interrupts):
    scenario = Scenario().run("prepare")
    fault = PodFault(reason, "raise the limit", interrupts)
    scenario.cluster.fail(scenario.start("train"), 75, fault=fault, disruption=None)
    train = scenario.pass_interruption_backoff().stage("train")
    assert train.attempts[0].reason == reason
    assert train.failures == int(not interrupts)
    assert train.attempts[0].message == "raise the limit"
    is_final = reason is Reason.EPHEMERAL_STORAGE_EXCEEDED
    assert (scenario.condition("Stalled") is not None) is is_final


def test_result_wins_over_a_fault():
    scenario = Scenario().run("prepare")
    attempt = scenario.attempt("train")
    scenario.start("train")
    fault = PodFault(Reason.NODE_PRESSURE, "evicted", interrupts=True)
    scenario.cluster.update_job(attempt.job, fault=fault)
    assert scenario.complete("train").stage("train").state == "Succeeded"
