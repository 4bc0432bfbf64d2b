"""What an edit of the spec runs again, and what it lets stand."""

import pytest
from support.scenario import ORDER, World, a_pipeline

from finetune_operator.api.status import Outcome

WHOLE = [f"{stage}-a1" for stage in ORDER]


def rerun(world: World, **changes) -> list[str]:
    """Edit a finished pipeline, let it finish again and give what ran."""
    before = len(world.created)
    world.edit(**changes).finish()
    assert world.status.phase == "Succeeded"
    return world.created[before:]


@pytest.mark.parametrize(
    ("changes", "again"),
    [
        ({"evaluate": {"tasks": {"exam": {"limit": 10}}}}, ["evaluate", "push", "deploy"]),
        ({"train": {"lora": {"rank": 4}}}, ["train", "evaluate", "push", "deploy"]),
        ({"prepare": {"contextLength": 64}}, list(ORDER)),
        ({"seed": 7}, list(ORDER)),
        ({"model": {"revision": "abc"}}, list(ORDER)),
        ({"push": {"target": "pvc://models/other"}}, ["push", "deploy"]),
        ({"deploy": {"prompt": "Who?"}}, ["deploy"]),
        ({"deploy": {"resources": {"memory": "64Gi"}}}, ["deploy"]),  # how a server runs is part of what it is
        ({"deploy": {"replicas": 3}}, ["deploy"]),
        ({"evaluate": {"gate": {"threshold": 0.1}}}, []),
        ({"push": {"when": "GatePassed"}}, []),
        ({"train": {"resources": {"memory": "64Gi"}}}, []),
        ({"train": {"checkpoint": {"everySteps": 7}}}, []),
        ({"train": {"retries": {"failures": 9}, "timeoutSeconds": 9000}}, []),
        ({"activeDeadlineSeconds": 100_000}, []),
        ({"workspace": {"size": "1Gi"}}, []),
    ],
)
def test_after_the_end_only_what_depends_on_an_edit_runs_again(changes, again):
    assert rerun(World().finish(), **changes) == [f"{stage}-a2" for stage in again]


@pytest.mark.parametrize("stage", [stage for stage in ORDER if stage != "deploy"])
def test_other_resources_stop_the_running_attempt_and_the_next_one_resumes(stage):
    world = World().run_before(stage)
    job = world.start(stage)
    identity = world.stage(stage).identity
    world.edit(**{stage: {"resources": {"memory": "64Gi"}}})
    assert world.cluster.jobs[job].asked_to_stop
    assert len(world.cluster.jobs) == ORDER.index(stage) + 1  # never two at once
    world.cluster.evict(job, step=5, saved=5, why=None)
    world.settle()
    assert world.stage(stage).attempts[0].reason == "SpecChanged"
    assert (world.attempt(stage).number, world.attempt(stage).identity) == (2, identity)
    assert world.cluster.jobs[world.attempt(stage).job].template.resources.memory == "64Gi"
    assert world.stage(stage).interruptions == 0


def test_a_hyperparameter_stops_the_running_attempt_and_the_next_one_begins_elsewhere():
    world = World().run("prepare")
    job = world.start("train")
    identity = world.stage("train").identity
    world.edit(train={"lora": {"rank": 4}})
    assert world.cluster.jobs[job].asked_to_stop
    world.cluster.evict(job, why=None)
    world.settle()
    assert world.attempt("train").number == 2
    assert world.attempt("train").identity not in {"", identity}
    assert world.finish().status.phase == "Succeeded"


def test_what_ends_well_while_it_is_no_longer_wanted_is_not_taken_for_the_new():
    world = World().run("prepare")
    world.start("train")
    world.edit(train={"lora": {"rank": 4}}).complete("train")
    assert world.stage("train").attempts[0].outcome == Outcome.SUCCEEDED
    assert world.stage("train").result is None
    assert world.created[-1] == "train-a2"


def test_an_edit_that_is_taken_back_before_anything_ended_needs_a_new_attempt_of_the_same():
    world = World().run("prepare")
    job = world.start("train")
    identity = world.stage("train").identity
    world.edit(train={"lora": {"rank": 4}}).edit(train={"lora": {"rank": 16}})
    world.cluster.evict(job, why=None)
    world.settle()
    assert (world.attempt("train").number, world.attempt("train").identity) == (2, identity)


def test_going_back_to_an_earlier_value_asks_for_the_earlier_identity():
    world = World().finish()
    identities = {stage: world.stage(stage).identity for stage in ORDER}
    assert rerun(world, train={"lora": {"rank": 4}}) == ["train-a2", "evaluate-a2", "push-a2", "deploy-a2"]
    assert world.stage("train").identity != identities["train"]
    # Their folders hold their results, so that each of these Jobs only repeats what is there.
    assert rerun(world, train={"lora": {"rank": 16}}) == ["train-a3", "evaluate-a3", "push-a3", "deploy-a3"]
    assert {stage: world.stage(stage).identity for stage in ORDER} == identities


def test_data_that_changed_in_place_is_prepared_anew():
    world = World()
    world.cluster.contents["hf://org/data/train.jsonl"] = "sha256:1"
    world.finish()
    world.cluster.contents["hf://org/data/train.jsonl"] = "sha256:2"
    assert world.finish().created == WHOLE + [f"{stage}-a2" for stage in ORDER]


def test_contents_that_no_stage_reads_change_nothing():
    world = World().finish()
    world.cluster.contents["hf://org/else"] = "sha256:1"
    assert world.finish().created == WHOLE


def test_a_stage_that_is_taken_away_while_it_runs_is_stopped():
    world = World(a_pipeline(push=None, deploy=None)).run_before("evaluate")
    job = world.start("evaluate")
    world.edit(evaluate=None)
    assert world.cluster.jobs[job].asked_to_stop
    assert world.condition("Finished") == ("False", "NotRequested")
    world.cluster.evict(job, why=None)
    world.settle()
    assert (world.states["evaluate"], world.status.phase) == ("Skipped", "Succeeded")


def test_a_stage_that_is_added_runs_alone():
    world = World(a_pipeline(evaluate=None, push=None, deploy=None)).finish()
    assert rerun(world, evaluate={"tasks": {"exam": {}}}) == ["evaluate-a1"]


def test_a_stage_that_comes_back_unchanged_is_not_run_again():
    world = World(a_pipeline(push=None, deploy=None)).finish()
    evaluate = world.spec.model_dump(mode="json", by_alias=True, exclude_none=True)["evaluate"]
    assert rerun(world, evaluate=None) == []
    assert rerun(world, evaluate=evaluate) == []


def test_a_failed_pipeline_goes_on_when_its_cause_is_mended():
    world = World()
    world.cluster.fail(world.start("prepare"), 65)
    world.settle().edit(dataset={"maxInvalidFraction": 0.5})
    assert world.created[-1] == "prepare-a2"
    assert world.finish().status.phase == "Succeeded"


def test_an_edit_of_another_stage_does_not_restart_a_failed_one():
    world = World()
    world.cluster.fail(world.start("prepare"), 65)
    world.settle().edit(deploy={"prompt": "Who?"})
    assert world.created == ["prepare-a1"]
    assert world.status.phase == "Failed"


@pytest.mark.parametrize("stage", ORDER)
def test_an_edit_in_the_middle_comes_to_the_same_result_as_one_in_the_beginning(stage):
    world = World().run_before(stage)
    world.start(stage)
    world.edit(seed=7).finish()
    beginning = World(a_pipeline(seed=7)).finish()
    assert world.status.phase == "Succeeded"
    assert {n: s.identity for n, s in world.status.stages.items()} == {
        n: s.identity for n, s in beginning.status.stages.items()
    }


def test_nothing_is_finished_while_an_old_job_is_still_stopping():
    world = World().run("prepare")
    job = world.start("train")
    world.edit(seed=7)
    world.cluster.fail(world.start("prepare"), 65)
    assert world.settle().condition("Finished")[0] == "False"
    assert world.condition("Stalled") is None
    world.cluster.evict(job, why=None)
    assert world.settle().condition("Finished") == ("True", "DataInvalid")
