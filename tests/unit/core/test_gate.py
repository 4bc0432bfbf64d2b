"""The score that decides what is published and served."""

import math

import pytest
from support.scenario import World, a_pipeline, kstatus, scores


def gated(gate: dict, **changes) -> World:
    return World(a_pipeline(evaluate={"gate": gate}, **changes))


@pytest.mark.parametrize(
    ("value", "stderr", "standard_errors", "passes"),
    [
        (0.61, None, 0, True),
        (0.6, None, 0, False),  # equal is not above
        (0.59, None, 0, False),
        (math.nan, None, 0, False),
        (math.inf, None, 0, True),
        (-math.inf, None, 0, False),
        (0.61, math.nan, 0, True),  # the error does not matter where no margin is asked for
        (0.61, math.nan, 1, False),
        (0.7, 0.04, 2, True),
        (0.7, 0.05, 2, False),  # 0.7 - 2 * 0.05 is not above 0.6
        (0.7, 0.06, 2, False),
    ],
)
def test_the_gate_opens_only_above_the_threshold(value, stderr, standard_errors, passes):
    world = gated({"threshold": 0.6, "standardErrors": standard_errors})
    world.finish(evaluate=scores(value, stderr))
    assert world.status.gate
    assert world.status.gate.passed is passes
    assert world.states["deploy"] == ("Succeeded" if passes else "Skipped")
    assert ("deploy-a1" in world.created) is passes


def test_below_the_gate_the_pipeline_is_finished_and_not_ready():
    world = World().finish(evaluate=scores(0.5, 0.02))
    assert world.status.phase == "BelowThreshold"
    assert world.condition("Finished") == ("True", "BelowThreshold")
    assert world.condition("Ready") == ("False", "BelowThreshold")
    assert world.condition("Deployed") == ("False", "BelowThreshold")
    assert world.status.conditions[0].message == "exam acc = 0.5 ± 0.02 is not above 0.6"
    assert world.condition("Pushed") == ("True", "StageSucceeded")


@pytest.mark.parametrize("passes", [True, False])
@pytest.mark.parametrize("push", ["Always", "GatePassed"])
@pytest.mark.parametrize("deploy", ["Always", "GatePassed"])
def test_each_stage_waits_for_the_gate_only_if_it_is_told_to(push, deploy, passes):
    world = World(a_pipeline(push={"when": push}, deploy={"when": deploy}))
    world.finish(evaluate=scores(0.7 if passes else 0.5))
    pushed = passes or push == "Always"
    deployed = pushed and (passes or deploy == "Always")  # what was not pushed cannot be served
    states = world.states
    assert (states["push"], states["deploy"]) == (
        "Succeeded" if pushed else "Skipped",
        "Succeeded" if deployed else "Skipped",
    )
    assert world.condition("Ready") == (
        ("True", "AllStagesSucceeded") if pushed and deployed else ("False", "BelowThreshold")
    )


def test_without_a_gate_everything_is_published():
    world = World(a_pipeline(evaluate={"gate": None}, deploy={"when": "Always"})).finish()
    assert world.status.gate is None
    assert world.status.phase == "Succeeded"


def test_a_metric_that_was_not_measured_fails_and_names_those_that_were():
    world = gated({"metric": "f1"}, push={"when": "GatePassed"}).finish()
    assert world.status.phase == "Failed"
    assert world.condition("Evaluated") == ("False", "SpecInvalid")
    assert world.stage("evaluate").message == "evaluate.gate.metric: f1 was not measured; there are acc, acc_norm"
    assert world.states["push"] == "Pending"
    assert kstatus(world.generation, world.status) == "Failed"
    world.edit(evaluate={"gate": {"metric": "acc"}})
    assert world.finish().status.phase == "Succeeded"
    assert world.created.count("evaluate-a1") == 1
    assert "evaluate-a2" not in world.created


def test_a_margin_needs_a_standard_error():
    world = gated({"standardErrors": 1}).finish(evaluate=scores(0.9))
    assert world.condition("Evaluated") == ("False", "SpecInvalid")
    assert "standardErrors" in world.stage("evaluate").message


def test_another_threshold_runs_nothing_again_and_decides_anew():
    world = World().finish(evaluate=scores(0.5))
    assert world.status.phase == "BelowThreshold"
    before = world.created
    world.edit(evaluate={"gate": {"threshold": 0.4}})
    assert world.created == [*before, "deploy-a1"]
    assert world.finish().status.phase == "Succeeded"


def test_a_higher_threshold_after_everything_is_done_undoes_nothing():
    world = World().finish(evaluate=scores(0.7))
    before = world.created
    world.edit(evaluate={"gate": {"threshold": 0.9}}).finish()
    assert world.created == before
    assert world.status.gate
    assert not world.status.gate.passed
    assert world.states["deploy"] == "Succeeded"
