"""A pipeline without disruptions, from the first reconcile to the end."""

from typing import Any

import pytest
from support.operator.kstatus import kstatus
from support.operator.scenario import ORDER, Scenario, a_pipeline

from finetune_operator.api.status import Outcome


def test_stages_run_once_in_order():
    scenario = Scenario().finish()
    assert scenario.created_jobs == [
        "prepare-a1",
        "train-a1",
        "evaluate-a1",
        "push-a1",
        "deploy-a1",
    ]
    assert set(scenario.states.values()) == {"Succeeded"}
    assert scenario.status.phase == "Succeeded"
    assert scenario.condition("Ready") == ("True", "AllStagesSucceeded")
    assert scenario.condition("Finished") == ("True", "AllStagesSucceeded")


def test_only_requested_stages_run():
    scenario = Scenario(a_pipeline(evaluate=None, push=None, deploy=None)).finish()
    assert scenario.created_jobs == ["prepare-a1", "train-a1"]
    assert scenario.states == {
        "prepare": "Succeeded",
        "train": "Succeeded",
        "evaluate": "Skipped",
        "push": "Skipped",
        "deploy": "Skipped",
    }
    assert scenario.condition("Ready") == ("True", "AllStagesSucceeded")


def test_first_reconcile_writes_the_complete_status():
    scenario = Scenario()
    scenario.reconcile()
    assert [c.type for c in scenario.status.conditions] == [
        "Ready",
        "Reconciling",
        "Finished",
        "Prepared",
        "Trained",
        "Evaluated",
        "Pushed",
        "Deployed",
    ]
    assert {c.observed_generation for c in scenario.status.conditions} == {1}
    assert scenario.attempt("prepare").number == 1


@pytest.mark.parametrize("stage", ORDER)
def test_status_shows_running_stage(stage):
    scenario = Scenario().run_before(stage)
    job = scenario.start(stage)
    scenario.cluster.progress(job, step=62, total=100, start_step=0)
    scenario.reconcile_until_stable()
    assert (
        scenario.status.stage,
        scenario.status.attempt,
        scenario.status.progress,
    ) == (
        stage,
        1,
        "62%",
    )
    assert scenario.status.phase == "Running"
    assert kstatus(scenario) == "InProgress"


def published(form: str, digest: str) -> dict[str, Any]:
    """Return the record of one target of push."""
    uri = f"pvc://models/{digest}"
    return {
        "target": "pvc://models/demo",
        "uri": uri,
        "format": form,
        "digest": f"sha256:{digest}",
        "size": 9,
    }


def test_the_published_model_is_in_the_status():
    merged = published("Merged", "abc")
    adapter = published("Adapter", "def")
    scenario = Scenario().finish(push={"published": [adapter, merged]})
    assert scenario.status.model
    assert (scenario.status.model.uri, scenario.status.model.digest) == (
        "pvc://models/abc",
        "sha256:abc",
    )


def test_finished_pipeline_ignores_deleted_jobs():
    scenario = Scenario().finish()
    before = scenario.change_counts
    for name in list(scenario.cluster.jobs):
        scenario.cluster.delete_job(name)
    scenario.after(86_400).reconcile_until_stable()
    assert scenario.change_counts == before


def test_failed_pipeline_ignores_deleted_jobs():
    scenario = Scenario()
    scenario.cluster.fail(scenario.start("prepare"), 65)
    before = scenario.reconcile_until_stable().change_counts
    for name in list(scenario.cluster.jobs):
        scenario.cluster.delete_job(name)
    scenario.after(86_400).reconcile_until_stable()
    assert scenario.change_counts == before
    assert scenario.status.phase == "Failed"


def test_deleted_pipeline_is_not_requeued():
    scenario = Scenario()
    del scenario.cluster.pipelines[scenario.key]
    scenario.reconcile()
    assert scenario.requeue_after is None
    assert scenario.cluster.jobs == {}


def test_recreated_pipeline_of_same_name_gets_new_jobs():
    scenario = Scenario().run("prepare")
    old = scenario.attempt("train").job
    scenario.cluster.delete(scenario.key)
    scenario.cluster.submit(
        scenario.key, scenario.spec, uid="11111111-2222-3333-4444-555555555555"
    )
    assert scenario.reconcile_until_stable().condition("Prepared") == (
        "Unknown",
        "WorkspaceInUse",
    )
    assert scenario.stage("prepare").attempts == ()
    scenario.cluster.evict(old, disruption=None)
    scenario.reconcile_until_stable()
    assert scenario.attempt("prepare").outcome == Outcome.RUNNING
    assert len({name for name in scenario.cluster.jobs if "prepare" in name}) == 2
