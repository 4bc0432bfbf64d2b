"""Edits of the spec: which stages they rerun, and which results they keep."""

import pytest
from support.operator.scenario import ORDER, Scenario, a_pipeline

from finetune_operator.api.status import Outcome

TARGETS = [{"uri": "pvc://models/demo"}]
MORE_MEMORY = {"resources": {"limits": {"memory": "64Gi"}}}
FIRST_RUN = [f"{stage}-a1" for stage in ORDER]


def rerun(scenario: Scenario, **changes) -> list[str]:
    """Edit a finished pipeline, run it to its end again, and return the Jobs that this created."""
    before = len(scenario.created_jobs)
    scenario.edit(**changes).finish()
    assert scenario.status.phase == "Succeeded"
    return scenario.created_jobs[before:]


@pytest.mark.parametrize(
    ("changes", "stages"),
    [
        (
            {"evaluate": {"tasks": [{"name": "exam", "limit": 10}]}},
            ["evaluate", "push", "deploy"],
        ),
        ({"train": {"lora": {"rank": 4}}}, ["train", "evaluate", "push", "deploy"]),
        ({"prepare": {"contextLength": 64}}, list(ORDER)),
        ({"seed": 7}, list(ORDER)),
        ({"model": {"revision": "abc"}}, list(ORDER)),
        ({"push": {"targets": [{"uri": "pvc://models/other"}]}}, ["push", "deploy"]),
        (
            {"push": {"targets": [*TARGETS, {"uri": "pvc://models/other"}]}},
            ["push", "deploy"],
        ),
        ({"deploy": {"smokeTest": {"prompt": "Who?"}}}, ["deploy"]),
        (
            {"deploy": {"pod": MORE_MEMORY}},
            ["deploy"],
        ),  # how a server runs is part of its identity
        ({"deploy": {"replicas": 3}}, []),
        ({"evaluate": {"gates": [{"task": "exam", "value": 0.1}]}}, []),
        ({"push": {"when": "GatesPassed"}}, []),
        ({"train": {"pod": MORE_MEMORY}}, []),
        ({"train": {"checkpoint": {"everySteps": 7}}}, []),
        ({"train": {"maxFailures": 9, "maxRuntimeSeconds": 9000}}, []),
        ({"maxRuntimeSeconds": 100_000}, []),
        ({"workspace": {"size": "1Gi"}}, []),
        ({"workspace": {"keepUnused": 0}}, []),
    ],
)
def test_edit_after_the_end_reruns_dependent_stages_only(changes, stages):
    assert rerun(Scenario().finish(), **changes) == [f"{stage}-a2" for stage in stages]


@pytest.mark.parametrize("stage", [stage for stage in ORDER if stage != "deploy"])
def test_new_resources_stop_the_attempt_and_the_next_resumes(stage):
    scenario = Scenario().run_before(stage)
    job = scenario.start(stage)
    identity = scenario.stage(stage).identity
    scenario.edit(**{stage: {"pod": MORE_MEMORY}})
    assert scenario.cluster.jobs[job].asked_to_stop
    assert (
        len(scenario.cluster.jobs) == ORDER.index(stage) + 1
    )  # never two live Jobs of a stage
    scenario.cluster.evict(job, step=5, saved=5, disruption=None)
    scenario.reconcile_until_stable()
    assert scenario.stage(stage).attempts[0].reason == "SpecChanged"
    assert (scenario.attempt(stage).number, scenario.attempt(stage).identity) == (
        2,
        identity,
    )
    assert scenario.cluster.jobs[
        scenario.attempt(stage).job
    ].template.pod.resources.limits == {"memory": "64Gi"}
    assert scenario.stage(stage).interruptions == 0


def test_new_hyperparameter_starts_a_new_identity():
    scenario = Scenario().run("prepare")
    job = scenario.start("train")
    identity = scenario.stage("train").identity
    scenario.edit(train={"lora": {"rank": 4}})
    assert scenario.cluster.jobs[job].asked_to_stop
    scenario.cluster.evict(job, disruption=None)
    scenario.reconcile_until_stable()
    assert scenario.attempt("train").number == 2
    assert scenario.attempt("train").identity not in {"", identity}
    assert scenario.finish().status.phase == "Succeeded"


def test_result_of_superseded_attempt_is_ignored():
    scenario = Scenario().run("prepare")
    scenario.start("train")
    scenario.edit(train={"lora": {"rank": 4}}).complete("train")
    assert scenario.stage("train").attempts[0].outcome == Outcome.SUCCEEDED
    assert scenario.stage("train").result is None
    assert scenario.created_jobs[-1] == "train-a2"


def test_reverted_edit_starts_new_attempt_of_same_identity():
    scenario = Scenario().run("prepare")
    job = scenario.start("train")
    identity = scenario.stage("train").identity
    scenario.edit(train={"lora": {"rank": 4}}).edit(train={"lora": {"rank": 16}})
    scenario.cluster.evict(job, disruption=None)
    scenario.reconcile_until_stable()
    assert (scenario.attempt("train").number, scenario.attempt("train").identity) == (
        2,
        identity,
    )


def test_reverted_value_has_the_earlier_identity():
    scenario = Scenario().finish()
    identities = {stage: scenario.stage(stage).identity for stage in ORDER}
    assert rerun(scenario, train={"lora": {"rank": 4}}) == [
        "train-a2",
        "evaluate-a2",
        "push-a2",
        "deploy-a2",
    ]
    assert scenario.stage("train").identity != identities["train"]
    # The folders still hold the results, so that each of these Jobs only reads its result again.
    assert rerun(scenario, train={"lora": {"rank": 16}}) == [
        "train-a3",
        "evaluate-a3",
        "push-a3",
        "deploy-a3",
    ]
    assert {stage: scenario.stage(stage).identity for stage in ORDER} == identities


def test_changed_source_digest_reruns_all_stages():
    scenario = Scenario()
    scenario.cluster.source_digests["hf://org/data/train.jsonl"] = "sha256:1"
    scenario.finish()
    scenario.cluster.source_digests["hf://org/data/train.jsonl"] = "sha256:2"
    assert scenario.finish().created_jobs == FIRST_RUN + [
        f"{stage}-a2" for stage in ORDER
    ]


def test_unused_source_digest_reruns_nothing():
    scenario = Scenario().finish()
    scenario.cluster.source_digests["hf://org/else"] = "sha256:1"
    assert scenario.finish().created_jobs == FIRST_RUN


def test_removed_running_stage_is_stopped():
    scenario = Scenario(a_pipeline(push=None, deploy=None)).run_before("evaluate")
    job = scenario.start("evaluate")
    scenario.edit(evaluate=None)
    assert scenario.cluster.jobs[job].asked_to_stop
    assert scenario.condition("Finished") == ("False", "NotRequested")
    scenario.cluster.evict(job, disruption=None)
    scenario.reconcile_until_stable()
    assert (scenario.states["evaluate"], scenario.status.phase) == (
        "Skipped",
        "Succeeded",
    )


def test_added_stage_runs_alone():
    scenario = Scenario(a_pipeline(evaluate=None, push=None, deploy=None)).finish()
    assert rerun(scenario, evaluate={"tasks": [{"name": "exam"}]}) == ["evaluate-a1"]


def test_stage_removed_and_readded_is_not_rerun():
    scenario = Scenario(a_pipeline(push=None, deploy=None)).finish()
    evaluate = scenario.spec.model_dump(mode="json", by_alias=True, exclude_none=True)[
        "evaluate"
    ]
    assert rerun(scenario, evaluate=None) == []
    assert rerun(scenario, evaluate=evaluate) == []


def test_fixing_the_spec_continues_failed_pipeline():
    scenario = Scenario()
    scenario.cluster.fail(scenario.start("prepare"), 65)
    scenario.reconcile_until_stable().edit(prepare={"maxInvalidFraction": 0.5})
    assert scenario.created_jobs[-1] == "prepare-a2"
    assert scenario.finish().status.phase == "Succeeded"


def test_edit_of_other_stage_does_not_retry_failed_one():
    scenario = Scenario()
    scenario.cluster.fail(scenario.start("prepare"), 65)
    scenario.reconcile_until_stable().edit(deploy={"smokeTest": {"prompt": "Who?"}})
    assert scenario.created_jobs == ["prepare-a1"]
    assert scenario.status.phase == "Failed"


@pytest.mark.parametrize("stage", ORDER)
def test_edit_during_run_gives_same_identities_as_before_it(stage):
    scenario = Scenario().run_before(stage)
    scenario.start(stage)
    scenario.edit(seed=7).finish()
    beginning = Scenario(a_pipeline(seed=7)).finish()
    assert scenario.status.phase == "Succeeded"
    assert {n: s.identity for n, s in scenario.status.stages.items()} == {
        n: s.identity for n, s in beginning.status.stages.items()
    }


def test_pipeline_is_not_finished_while_old_job_is_stopping():
    scenario = Scenario().run("prepare")
    job = scenario.start("train")
    scenario.cancel("now")
    finished = scenario.condition("Finished")
    assert finished
    assert finished[0] == "False"
    assert scenario.condition("Stalled") is None
    scenario.cluster.evict(job, disruption=None)
    assert scenario.reconcile_until_stable().condition("Finished") == (
        "True",
        "Cancelled",
    )
