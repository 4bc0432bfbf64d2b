import pytest
from support.scenario import ORDER, Scenario, a_pipeline, kstatus

from finetune_operator.api.status import Outcome


def test_stages_run_one_after_the_other_and_each_once():
    scenario = Scenario().finish()
    assert scenario.created_jobs == ["prepare-a1", "train-a1", "evaluate-a1", "push-a1", "deploy-a1"]
    assert set(scenario.states.values()) == {"Succeeded"}
    assert scenario.status.phase == "Succeeded"
    assert scenario.condition("Ready") == ("True", "AllStagesSucceeded")
    assert scenario.condition("Finished") == ("True", "AllStagesSucceeded")


def test_only_what_is_asked_for_runs():
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


def test_the_first_look_says_everything_before_the_first_job_runs():
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
def test_status_names_the_stage_that_runs(stage):
    scenario = Scenario().run_before(stage)
    job = scenario.start(stage)
    scenario.cluster.progress(job, step=62, total=100, start_step=0)
    scenario.reconcile_until_stable()
    assert (scenario.status.stage, scenario.status.attempt, scenario.status.progress) == (stage, 1, "62%")
    assert scenario.status.phase == "Running"
    assert kstatus(scenario.generation, scenario.status) == "InProgress"


def test_the_published_model_is_in_the_status():
    scenario = Scenario().finish(push={"uri": "pvc://models/demo", "digest": "sha256:abc"})
    assert scenario.status.model
    assert (scenario.status.model.uri, scenario.status.model.digest) == ("pvc://models/demo", "sha256:abc")


def test_finished_stays_finished_when_the_jobs_are_deleted():
    scenario = Scenario().finish()
    before = scenario.statuses
    for name in list(scenario.cluster.jobs):
        scenario.cluster.delete_job(name)
    scenario.after(86_400).reconcile_until_stable()
    assert scenario.statuses == before


def test_failed_stays_failed_when_the_jobs_are_deleted():
    scenario = Scenario()
    scenario.cluster.fail(scenario.start("prepare"), 65)
    before = scenario.reconcile_until_stable().statuses
    for name in list(scenario.cluster.jobs):
        scenario.cluster.delete_job(name)
    scenario.after(86_400).reconcile_until_stable()
    assert scenario.statuses == before
    assert scenario.status.phase == "Failed"


def test_a_pipeline_that_is_gone_is_forgotten():
    scenario = Scenario()
    del scenario.cluster.pipelines[scenario.key]
    scenario.reconcile()
    assert scenario.requeue_after is None
    assert scenario.cluster.jobs == {}


def test_two_pipelines_of_one_name_after_another_share_no_job():
    scenario = Scenario().run("prepare")
    scenario.cluster.submit(scenario.key, scenario.spec, uid="11111111-2222-3333-4444-555555555555")
    scenario.reconcile_until_stable()
    assert scenario.attempt("prepare").outcome == Outcome.RUNNING
    assert len({name for name in scenario.cluster.jobs if "prepare" in name}) == 2
