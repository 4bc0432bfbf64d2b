"""When a pipeline is reconciled again: the watch events of the operator's own writes wake no pipeline."""

from dataclasses import replace
from datetime import timedelta

import pytest
from support.operator.scenario import Scenario, a_pipeline, a_result

from finetune_operator.api.conditions import Reason
from finetune_operator.api.group import CANCEL_ANNOTATION
from finetune_operator.core.observation import Blocker, ObservedServer


def test_finished_pipeline_asks_for_the_end_of_its_ttl():
    scenario = Scenario(
        a_pipeline(deploy=None, ttlSecondsAfterFinished=100, whenExpired="Delete")
    ).run_before("push")
    job = scenario.start("push")
    scenario.cluster.complete(job, a_result("push", scenario.attempt("push").identity))
    scenario.reconcile()
    assert scenario.status.finished_at == scenario.cluster.now
    assert scenario.requeue_after == timedelta(seconds=100)
    scenario.after(100).reconcile()
    assert scenario.key not in scenario.cluster.pipelines


def test_edit_of_a_finished_pipeline_keeps_its_ttl_running():
    scenario = Scenario(a_pipeline(ttlSecondsAfterFinished=100)).finish()
    scenario.after(10)
    scenario.spec = a_pipeline(ttlSecondsAfterFinished=50)
    scenario.cluster.edit(scenario.key, scenario.spec)
    scenario.reconcile()
    assert scenario.requeue_after == timedelta(seconds=40)


def test_switched_traffic_is_observed_at_once():
    scenario = Scenario().run_before("deploy")
    job = scenario.start("deploy")
    scenario.cluster.complete(
        job, a_result("deploy", scenario.attempt("deploy").identity, long_running=True)
    )
    scenario.reconcile()
    assert scenario.cluster.servers[job].current
    assert scenario.requeue_after
    assert timedelta() < scenario.requeue_after <= timedelta(seconds=1)
    scenario.reconcile()
    assert scenario.status.phase == "Succeeded"


@pytest.mark.parametrize("stage", ["prepare", "train"])
def test_pipeline_without_its_claim_looks_for_it_again(stage):
    """No watch shows the creation of a user's own claim."""
    scenario = Scenario().run_before(stage) if stage != "prepare" else Scenario()
    observe = scenario.cluster.observe
    if stage == "train":
        scenario.cluster.evict(scenario.start("train"))
        scenario.after(60)

    async def without_claim(pipeline):
        observed = await observe(pipeline)
        blocker = Blocker(
            Reason.VOLUME_NOT_READY, "the namespace team has no claim models: create it"
        )
        return replace(observed, workspace=replace(observed.workspace, blocker=blocker))

    scenario.cluster.observe = without_claim
    scenario.reconcile_until_stable()
    assert (scenario.stage(stage).reason, scenario.running) == (
        Reason.VOLUME_NOT_READY,
        None,
    )
    assert scenario.requeue_after == scenario.settings.poll_interval


def running_server_with_traffic(*, earlier: bool) -> tuple[Scenario, str, str | None]:
    """Return a pipeline whose Service points at the server of the running attempt."""
    scenario = Scenario().run_before("deploy")
    old = None
    if earlier:
        old = scenario.start("deploy")
        scenario.complete("deploy", long_running=True).edit(deploy={"engine": "VLLM"})
    new = scenario.start("deploy")
    scenario.cluster.servers = {
        name: replace(server, current=False)
        for name, server in scenario.cluster.servers.items()
    }
    scenario.cluster.servers[new] = ObservedServer("deploy", current=True)
    return scenario, new, old


def test_service_of_a_stopping_attempt_is_deleted():
    scenario, new, _ = running_server_with_traffic(earlier=False)
    scenario.cancel("now")
    assert new not in scenario.cluster.servers
    assert "delete the Service" in scenario.cluster.applied
    assert scenario.cluster.jobs[new].asked_to_stop


def test_service_of_a_stopping_attempt_gets_the_earlier_server():
    scenario, new, old = running_server_with_traffic(earlier=True)
    scenario.cancel("now")
    assert scenario.cluster.jobs[new].asked_to_stop
    assert {
        job: server.current for job, server in scenario.cluster.servers.items()
    } == {old: True}


def test_attempt_waits_until_a_late_job_has_ended():
    """A late request of an earlier leader may create the Job of an attempt that counts as ended."""
    scenario = Scenario().run("prepare")
    previous = scenario.start("train")
    ended = scenario.cluster.jobs[previous].observed
    scenario.cluster.evict(previous)
    scenario.reconcile()
    scenario.cluster.jobs[previous].observed = ended
    scenario.after(60).reconcile_until_stable()
    assert scenario.cluster.jobs[previous].asked_to_stop
    assert (scenario.stage("train").reason, scenario.running) == (
        Reason.WORKSPACE_IN_USE,
        None,
    )
    scenario.cluster.evict(previous)
    scenario.reconcile_until_stable()
    assert scenario.created_jobs[-1] == "train-a2"


def test_stopped_attempt_whose_job_was_refused_is_ended_soon():
    """No event tells that a Job ended which was never created."""
    job = Scenario().reconcile_until_stable().attempt("prepare").job
    scenario = Scenario()
    scenario.cluster.refusals[job] = Blocker(Reason.POD_REFUSED, "no")
    scenario.reconcile_until_stable()
    assert scenario.attempt("prepare").created_at is None
    scenario.cluster.annotate(scenario.key, CANCEL_ANNOTATION, "now")
    scenario.reconcile()
    assert scenario.attempt("prepare").stopping is Reason.CANCELLED
    assert scenario.requeue_after == timedelta(seconds=1)
    scenario.reconcile()
    assert scenario.status.phase == "Cancelled"
