"""Which results the process of a stage leaves in the workspace."""

import pytest
from support.operator.scenario import ORDER, Scenario, a_pipeline

from finetune_trainer.contract import Pruning


def pruning_of(scenario: Scenario, stage: str) -> Pruning:
    """Return what the newest attempt of a stage was asked to keep."""
    pruning = scenario.cluster.jobs[scenario.attempt(stage).job].template.pruning
    assert pruning
    return pruning


@pytest.mark.parametrize("stage", ORDER[:-1])
def test_stage_keeps_the_results_that_are_final(stage):
    """An identity of a later stage may still change, back to a result that is there."""
    scenario = Scenario().run_before(stage)
    scenario.start(stage)
    used = ORDER[: ORDER.index(stage) + 1]
    named = tuple(f"{name}/{scenario.stage(name).identity}" for name in used)
    assert pruning_of(scenario, stage) == Pruning(named, keep_unused=1)


def test_edit_and_its_reverse_name_the_same_results():
    scenario = Scenario().finish()
    before = scenario.stage("train").identity
    scenario.edit(train={"lora": {"rank": 4}}).finish()
    assert f"train/{before}" not in pruning_of(scenario, "evaluate").keep
    scenario.edit(train={"lora": None})
    assert pruning_of(scenario, "train").keep[-1] == f"train/{before}"


def test_retry_keeps_what_the_status_names():
    scenario = Scenario().run_before("evaluate")
    scenario.start("evaluate")
    named = pruning_of(scenario, "evaluate").keep
    scenario.cluster.fail(scenario.attempt("evaluate").job, exit_code=64)
    scenario.reconcile_until_stable().retry("again").reconcile_until_stable()
    assert scenario.attempt("evaluate").number == 2
    assert pruning_of(scenario, "evaluate").keep == named


@pytest.mark.parametrize(
    ("workspace", "expected"),
    [
        ({"keepUnused": 0}, (0, False)),
        ({"keepUnused": 3}, (3, False)),
        ({"existingClaim": "shared"}, (1, True)),
    ],
)
def test_workspace_says_what_stays(workspace, expected):
    scenario = Scenario(a_pipeline(workspace=workspace))
    scenario.start("prepare")
    pruning = pruning_of(scenario, "prepare")
    assert (pruning.keep_unused, pruning.shared) == expected
