import pytest
from support.scenario import ORDER, World, a_pipeline, kstatus

from finetune_operator.api.status import Outcome


def test_stages_run_one_after_the_other_and_each_once():
    world = World().finish()
    assert world.created == ["prepare-a1", "train-a1", "evaluate-a1", "push-a1", "deploy-a1"]
    assert set(world.states.values()) == {"Succeeded"}
    assert world.status.phase == "Succeeded"
    assert world.condition("Ready") == ("True", "AllStagesSucceeded")
    assert world.condition("Finished") == ("True", "AllStagesSucceeded")


def test_only_what_is_asked_for_runs():
    world = World(a_pipeline(evaluate=None, push=None, deploy=None)).finish()
    assert world.created == ["prepare-a1", "train-a1"]
    assert world.states == {
        "prepare": "Succeeded",
        "train": "Succeeded",
        "evaluate": "Skipped",
        "push": "Skipped",
        "deploy": "Skipped",
    }
    assert world.condition("Ready") == ("True", "AllStagesSucceeded")


def test_the_first_look_says_everything_before_the_first_job_runs():
    world = World()
    world.look()
    assert [c.type for c in world.status.conditions] == [
        "Ready",
        "Reconciling",
        "Finished",
        "Prepared",
        "Trained",
        "Evaluated",
        "Pushed",
        "Deployed",
    ]
    assert {c.observed_generation for c in world.status.conditions} == {1}
    assert world.attempt("prepare").number == 1


@pytest.mark.parametrize("stage", ORDER)
def test_status_names_the_stage_that_runs(stage):
    world = World().run_before(stage)
    job = world.start(stage)
    world.cluster.progress(job, step=62, total=100, start_step=0)
    world.settle()
    assert (world.status.stage, world.status.attempt, world.status.progress) == (stage, 1, "62%")
    assert world.status.phase == "Running"
    assert kstatus(world.generation, world.status) == "InProgress"


def test_the_published_model_is_in_the_status():
    world = World().finish(push={"uri": "pvc://models/demo", "digest": "sha256:abc"})
    assert world.status.model
    assert (world.status.model.uri, world.status.model.digest) == ("pvc://models/demo", "sha256:abc")


def test_finished_stays_finished_when_the_jobs_are_deleted():
    world = World().finish()
    before = world.told
    for name in list(world.cluster.jobs):
        world.cluster.vanish(name)
    world.after(86_400).settle()
    assert world.told == before


def test_failed_stays_failed_when_the_jobs_are_deleted():
    world = World()
    world.cluster.fail(world.start("prepare"), 65)
    before = world.settle().told
    for name in list(world.cluster.jobs):
        world.cluster.vanish(name)
    world.after(86_400).settle()
    assert world.told == before
    assert world.status.phase == "Failed"


def test_a_pipeline_that_is_gone_is_forgotten():
    world = World()
    del world.cluster.pipelines[world.key]
    world.look()
    assert world.next_look is None
    assert world.cluster.jobs == {}


def test_two_pipelines_of_one_name_after_another_share_no_job():
    world = World().run("prepare")
    world.cluster.submit(world.key, world.spec, uid="11111111-2222-3333-4444-555555555555")
    world.settle()
    assert world.attempt("prepare").outcome == Outcome.RUNNING
    assert len({name for name in world.cluster.jobs if "prepare" in name}) == 2
