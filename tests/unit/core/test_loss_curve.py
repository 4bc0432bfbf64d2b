"""The loss curve of a stage outlives its attempts, and ends with the training that it belongs to."""

import pytest
from support.operator.scenario import Scenario

from finetune_operator.kubernetes.pipeline_object import without_progress
from finetune_trainer.contract import LossCurve


def curve(steps: int) -> LossCurve:
    return LossCurve(every_steps=1, step=steps, losses=tuple(1.0 for _ in range(steps)))


def train(scenario: Scenario, start: int, reached: int) -> str:
    """Start an attempt that begins at step `start` and reaches step `reached`, with its curve."""
    job = scenario.start("train")
    scenario.cluster.progress(
        job, step=reached, start_step=start, loss_curve=curve(reached)
    )
    scenario.reconcile_until_stable()
    return job


@pytest.fixture
def scenario() -> Scenario:
    return Scenario().run("prepare")


def test_curve_is_a_field_of_the_stage_and_not_of_its_progress(scenario):
    train(scenario, 0, 5)
    stage = scenario.stage("train")
    assert stage.loss_curve == curve(5)
    assert stage.progress.loss_curve is None
    assert stage.progress.step == 5


def test_curve_stays_while_the_next_attempt_waits_and_loads(scenario):
    scenario.lose_node(train(scenario, 0, 5))
    scenario.reconcile_until_stable()
    job = scenario.start("train")
    scenario.cluster.progress(job, step=0, note="loading the model")
    scenario.reconcile_until_stable()
    assert (
        scenario.stage("train").progress.note,
        scenario.stage("train").loss_curve,
    ) == (
        "loading the model",
        curve(5),
    )


def test_resumed_attempt_replaces_the_curve_by_a_shorter_one(scenario):
    scenario.lose_node(train(scenario, 0, 5))
    scenario.reconcile_until_stable()
    train(scenario, 3, 3)
    assert scenario.stage("train").loss_curve == curve(3)


def test_curve_stays_when_the_stage_has_succeeded(scenario):
    scenario.finish()
    assert scenario.stage("train").loss_curve is None
    other = Scenario().run("prepare")
    train(other, 0, 5)
    other.finish()
    assert other.stage("train").loss_curve == curve(5)


def test_new_recipe_begins_without_a_curve(scenario):
    job = train(scenario, 0, 5)
    scenario.edit(train={"maxSteps": 7})
    assert scenario.stage("train").loss_curve is None
    scenario.cluster.progress(
        job, step=6, start_step=0, loss_curve=curve(6)
    )  # it is being stopped
    scenario.reconcile_until_stable()
    assert scenario.stage("train").loss_curve is None


def test_rejected_status_is_written_without_the_curve(scenario):
    train(scenario, 0, 5)
    assert without_progress(scenario.status).stages["train"].loss_curve is None
