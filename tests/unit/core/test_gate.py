"""The gate, which decides what is published and served."""

import math

import pytest
from support.scenario import Scenario, a_pipeline, kstatus, scores


def gated(gate: dict, **changes) -> Scenario:
    return Scenario(a_pipeline(evaluate={"gate": gate}, **changes))


@pytest.mark.parametrize(
    ("value", "stderr", "standard_errors", "passes"),
    [
        (0.61, None, 0, True),
        (0.6, None, 0, False),  # equal is not above
        (0.59, None, 0, False),
        (math.nan, None, 0, False),
        (math.inf, None, 0, True),
        (-math.inf, None, 0, False),
        (0.61, math.nan, 0, True),  # without a margin the error does not matter
        (0.61, math.nan, 1, False),
        (0.7, 0.04, 2, True),
        (0.7, 0.05, 2, False),  # 0.7 - 2 * 0.05 is not above 0.6
        (0.7, 0.06, 2, False),
    ],
)
def test_gate_passes_only_above_the_threshold(value, stderr, standard_errors, passes):
    scenario = gated({"threshold": 0.6, "standardErrors": standard_errors})
    scenario.finish(evaluate=scores(value, stderr))
    assert scenario.status.gate
    assert scenario.status.gate.passed is passes
    assert scenario.states["deploy"] == ("Succeeded" if passes else "Skipped")
    assert ("deploy-a1" in scenario.created_jobs) is passes


def test_pipeline_below_the_gate_is_finished_and_not_ready():
    scenario = Scenario().finish(evaluate=scores(0.5, 0.02))
    assert scenario.status.phase == "BelowThreshold"
    assert scenario.condition("Finished") == ("True", "BelowThreshold")
    assert scenario.condition("Ready") == ("False", "BelowThreshold")
    assert scenario.condition("Deployed") == ("False", "BelowThreshold")
    assert scenario.status.conditions[0].message == "exam acc = 0.5 ± 0.02 is not above 0.6"
    assert scenario.condition("Pushed") == ("True", "StageSucceeded")


@pytest.mark.parametrize("passes", [True, False])
@pytest.mark.parametrize("push", ["Always", "GatePassed"])
@pytest.mark.parametrize("deploy", ["Always", "GatePassed"])
def test_failed_gate_skips_only_stages_with_gate_passed(push, deploy, passes):
    scenario = Scenario(a_pipeline(push={"when": push}, deploy={"when": deploy}))
    scenario.finish(evaluate=scores(0.7 if passes else 0.5))
    pushed = passes or push == "Always"
    deployed = pushed and (passes or deploy == "Always")  # a model that was not pushed cannot be served
    states = scenario.states
    assert (states["push"], states["deploy"]) == (
        "Succeeded" if pushed else "Skipped",
        "Succeeded" if deployed else "Skipped",
    )
    assert scenario.condition("Ready") == (
        ("True", "AllStagesSucceeded") if pushed and deployed else ("False", "BelowThreshold")
    )


def test_pipeline_without_gate_runs_all_stages():
    scenario = Scenario(a_pipeline(evaluate={"gate": None}, deploy={"when": "Always"})).finish()
    assert scenario.status.gate is None
    assert scenario.status.phase == "Succeeded"


def test_unmeasured_metric_fails_and_lists_measured_ones():
    scenario = gated({"metric": "f1"}, push={"when": "GatePassed"}).finish()
    assert scenario.status.phase == "Failed"
    assert scenario.condition("Evaluated") == ("False", "SpecInvalid")
    assert (
        scenario.stage("evaluate").message
        == "evaluate.gate.metric: f1 was not measured; measured metrics: acc, acc_norm"
    )
    assert scenario.states["push"] == "Pending"
    assert kstatus(scenario.generation, scenario.status) == "Failed"
    scenario.edit(evaluate={"gate": {"metric": "acc"}})
    assert scenario.finish().status.phase == "Succeeded"
    assert scenario.created_jobs.count("evaluate-a1") == 1
    assert "evaluate-a2" not in scenario.created_jobs


def test_margin_without_standard_error_fails():
    scenario = gated({"standardErrors": 1}).finish(evaluate=scores(0.9))
    assert scenario.condition("Evaluated") == ("False", "SpecInvalid")
    assert "standardErrors" in scenario.stage("evaluate").message


def test_lower_threshold_deploys_without_reruns():
    scenario = Scenario().finish(evaluate=scores(0.5))
    assert scenario.status.phase == "BelowThreshold"
    before = scenario.created_jobs
    scenario.edit(evaluate={"gate": {"threshold": 0.4}})
    assert scenario.created_jobs == [*before, "deploy-a1"]
    assert scenario.finish().status.phase == "Succeeded"


def test_higher_threshold_after_deploy_changes_no_stage():
    scenario = Scenario().finish(evaluate=scores(0.7))
    before = scenario.created_jobs
    scenario.edit(evaluate={"gate": {"threshold": 0.9}}).finish()
    assert scenario.created_jobs == before
    assert scenario.status.gate
    assert not scenario.status.gate.passed
    assert scenario.states["deploy"] == "Succeeded"
