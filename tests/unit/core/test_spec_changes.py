"""What an edit of the spec runs again, and what it lets stand."""

import pytest
from support.scenario import ORDER, Scenario, a_pipeline

from finetune_operator.api.status import Outcome

WHOLE = [f"{stage}-a1" for stage in ORDER]


def rerun(scenario: Scenario, **changes) -> list[str]:
    """Edit a finished pipeline, let it finish again and give what ran."""
    before = len(scenario.created_jobs)
    scenario.edit(**changes).finish()
    assert scenario.status.phase == "Succeeded"
    return scenario.created_jobs[before:]


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
    assert rerun(Scenario().finish(), **changes) == [f"{stage}-a2" for stage in again]


@pytest.mark.parametrize("stage", [stage for stage in ORDER if stage != "deploy"])
def test_other_resources_stop_the_running_attempt_and_the_next_one_resumes(stage):
    scenario = Scenario().run_before(stage)
    job = scenario.start(stage)
    identity = scenario.stage(stage).identity
    scenario.edit(**{stage: {"resources": {"memory": "64Gi"}}})
    assert scenario.cluster.jobs[job].asked_to_stop
    assert len(scenario.cluster.jobs) == ORDER.index(stage) + 1  # never two at once
    scenario.cluster.evict(job, step=5, saved=5, why=None)
    scenario.reconcile_until_stable()
    assert scenario.stage(stage).attempts[0].reason == "SpecChanged"
    assert (scenario.attempt(stage).number, scenario.attempt(stage).identity) == (2, identity)
    assert scenario.cluster.jobs[scenario.attempt(stage).job].template.resources.memory == "64Gi"
    assert scenario.stage(stage).interruptions == 0


def test_a_hyperparameter_stops_the_running_attempt_and_the_next_one_begins_elsewhere():
    scenario = Scenario().run("prepare")
    job = scenario.start("train")
    identity = scenario.stage("train").identity
    scenario.edit(train={"lora": {"rank": 4}})
    assert scenario.cluster.jobs[job].asked_to_stop
    scenario.cluster.evict(job, why=None)
    scenario.reconcile_until_stable()
    assert scenario.attempt("train").number == 2
    assert scenario.attempt("train").identity not in {"", identity}
    assert scenario.finish().status.phase == "Succeeded"


def test_what_ends_well_while_it_is_no_longer_wanted_is_not_taken_for_the_new():
    scenario = Scenario().run("prepare")
    scenario.start("train")
    scenario.edit(train={"lora": {"rank": 4}}).complete("train")
    assert scenario.stage("train").attempts[0].outcome == Outcome.SUCCEEDED
    assert scenario.stage("train").result is None
    assert scenario.created_jobs[-1] == "train-a2"


def test_an_edit_that_is_taken_back_before_anything_ended_needs_a_new_attempt_of_the_same():
    scenario = Scenario().run("prepare")
    job = scenario.start("train")
    identity = scenario.stage("train").identity
    scenario.edit(train={"lora": {"rank": 4}}).edit(train={"lora": {"rank": 16}})
    scenario.cluster.evict(job, why=None)
    scenario.reconcile_until_stable()
    assert (scenario.attempt("train").number, scenario.attempt("train").identity) == (2, identity)


def test_going_back_to_an_earlier_value_asks_for_the_earlier_identity():
    scenario = Scenario().finish()
    identities = {stage: scenario.stage(stage).identity for stage in ORDER}
    assert rerun(scenario, train={"lora": {"rank": 4}}) == ["train-a2", "evaluate-a2", "push-a2", "deploy-a2"]
    assert scenario.stage("train").identity != identities["train"]
    # Their folders hold their results, so that each of these Jobs only repeats what is there.
    assert rerun(scenario, train={"lora": {"rank": 16}}) == ["train-a3", "evaluate-a3", "push-a3", "deploy-a3"]
    assert {stage: scenario.stage(stage).identity for stage in ORDER} == identities


def test_data_that_changed_in_place_is_prepared_anew():
    scenario = Scenario()
    scenario.cluster.source_digests["hf://org/data/train.jsonl"] = "sha256:1"
    scenario.finish()
    scenario.cluster.source_digests["hf://org/data/train.jsonl"] = "sha256:2"
    assert scenario.finish().created_jobs == WHOLE + [f"{stage}-a2" for stage in ORDER]


def test_contents_that_no_stage_reads_change_nothing():
    scenario = Scenario().finish()
    scenario.cluster.source_digests["hf://org/else"] = "sha256:1"
    assert scenario.finish().created_jobs == WHOLE


def test_a_stage_that_is_taken_away_while_it_runs_is_stopped():
    scenario = Scenario(a_pipeline(push=None, deploy=None)).run_before("evaluate")
    job = scenario.start("evaluate")
    scenario.edit(evaluate=None)
    assert scenario.cluster.jobs[job].asked_to_stop
    assert scenario.condition("Finished") == ("False", "NotRequested")
    scenario.cluster.evict(job, why=None)
    scenario.reconcile_until_stable()
    assert (scenario.states["evaluate"], scenario.status.phase) == ("Skipped", "Succeeded")


def test_a_stage_that_is_added_runs_alone():
    scenario = Scenario(a_pipeline(evaluate=None, push=None, deploy=None)).finish()
    assert rerun(scenario, evaluate={"tasks": {"exam": {}}}) == ["evaluate-a1"]


def test_a_stage_that_comes_back_unchanged_is_not_run_again():
    scenario = Scenario(a_pipeline(push=None, deploy=None)).finish()
    evaluate = scenario.spec.model_dump(mode="json", by_alias=True, exclude_none=True)["evaluate"]
    assert rerun(scenario, evaluate=None) == []
    assert rerun(scenario, evaluate=evaluate) == []


def test_a_failed_pipeline_goes_on_when_its_cause_is_mended():
    scenario = Scenario()
    scenario.cluster.fail(scenario.start("prepare"), 65)
    scenario.reconcile_until_stable().edit(dataset={"maxInvalidFraction": 0.5})
    assert scenario.created_jobs[-1] == "prepare-a2"
    assert scenario.finish().status.phase == "Succeeded"


def test_an_edit_of_another_stage_does_not_restart_a_failed_one():
    scenario = Scenario()
    scenario.cluster.fail(scenario.start("prepare"), 65)
    scenario.reconcile_until_stable().edit(deploy={"prompt": "Who?"})
    assert scenario.created_jobs == ["prepare-a1"]
    assert scenario.status.phase == "Failed"


@pytest.mark.parametrize("stage", ORDER)
def test_an_edit_in_the_middle_comes_to_the_same_result_as_one_in_the_beginning(stage):
    scenario = Scenario().run_before(stage)
    scenario.start(stage)
    scenario.edit(seed=7).finish()
    beginning = Scenario(a_pipeline(seed=7)).finish()
    assert scenario.status.phase == "Succeeded"
    assert {n: s.identity for n, s in scenario.status.stages.items()} == {
        n: s.identity for n, s in beginning.status.stages.items()
    }


def test_nothing_is_finished_while_an_old_job_is_still_stopping():
    scenario = Scenario().run("prepare")
    job = scenario.start("train")
    scenario.edit(seed=7)
    scenario.cluster.fail(scenario.start("prepare"), 65)
    assert scenario.reconcile_until_stable().condition("Finished")[0] == "False"
    assert scenario.condition("Stalled") is None
    scenario.cluster.evict(job, why=None)
    assert scenario.reconcile_until_stable().condition("Finished") == ("True", "DataInvalid")
