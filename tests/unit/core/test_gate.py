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


def compared(value, base, stderr=None):
    """Return scores of the only task that were compared with the base model."""
    score = {"value": value, "stderr": 0.02, "base": base}
    return {"scores": {"exam": {"acc": score if stderr is None else {**score, "differenceStderr": stderr}}}}


@pytest.mark.parametrize(
    ("value", "base", "stderr", "standard_errors", "passes"),
    [
        (0.75, 0.4, 0.03, 0, True),
        (0.75, 0.66, 0.03, 0, False),  # better than the base, but not by more than 0.1
        (0.8, 0.7, 0.03, 0, False),  # equal is not above, although 0.8 - 0.7 > 0.1 in binary
        (0.75, 0.75, 0.0, 0, False),
        (0.75, 0.6, 0.03, 1, True),
        (0.75, 0.6, 0.03, 2, False),  # 0.15 - 2 * 0.03 is not above 0.1; with the stderr of the value it would be
        (0.75, 0.6, None, 0, True),
        (math.nan, 0.1, 0.03, 0, False),
        (0.75, math.nan, 0.03, 0, False),
        (math.inf, math.inf, 0.03, 0, False),
        (0.9, 0.1, math.nan, 1, False),
    ],
)
def test_gate_against_base_compares_the_difference(value, base, stderr, standard_errors, passes):
    scenario = gated({"threshold": 0.1, "against": "base", "standardErrors": standard_errors})
    scenario.finish(evaluate=compared(value, base, stderr))
    assert scenario.status.gate
    assert scenario.status.gate.measured
    assert scenario.status.gate.passed is passes
    assert scenario.status.gate.base == (base if math.isfinite(base) else None)
    assert scenario.states["deploy"] == ("Succeeded" if passes else "Skipped")


@pytest.mark.parametrize(
    ("standard_errors", "message"),
    [
        (0, "exam acc = 0.75, base 0.4: difference 0.35 ± 0.03 is above 0.1"),
        (2, "exam acc = 0.75, base 0.4: difference 0.35 ± 0.03 minus 2 standard errors is above 0.1"),
    ],
)
def test_gate_against_base_says_the_difference(standard_errors, message):
    scenario = gated({"threshold": 0.1, "against": "base", "standardErrors": standard_errors})
    scenario.finish(evaluate=compared(0.75, 0.4, 0.03))
    assert scenario.stage("evaluate").message == message


def test_gate_against_base_fails_without_a_base_score():
    scenario = gated({"against": "base"}).finish(evaluate=scores(0.9))
    assert scenario.condition("Evaluated") == ("False", "SpecInvalid")
    assert scenario.stage("evaluate").message.startswith("evaluate.gate.against: acc of the base model")


def test_margin_without_error_of_the_difference_fails():
    scenario = gated({"against": "base", "standardErrors": 1}).finish(evaluate=compared(0.9, 0.1))
    assert scenario.condition("Evaluated") == ("False", "SpecInvalid")
    assert scenario.stage("evaluate").message.startswith("evaluate.gate.standardErrors: the difference in acc")


def test_gate_against_value_ignores_the_base_score():
    scenario = gated({"threshold": 0.7}).finish(evaluate=compared(0.75, 0.9, 0.03))
    assert scenario.status.gate
    assert scenario.status.gate.passed
    assert scenario.status.gate.message == "exam acc = 0.75 ± 0.02 is above 0.7"


def test_gate_against_base_reruns_evaluate_with_the_base():
    scenario = Scenario().finish(evaluate=scores(0.7))
    assert not scenario.config("evaluate").recipe.compare_with_base
    scenario.edit(evaluate={"gate": {"against": "base", "threshold": 0.1}}).finish(evaluate=compared(0.7, 0.5, 0.02))
    assert scenario.config("evaluate").recipe.compare_with_base
    assert scenario.created_jobs.count("evaluate-a2") == 1
    assert scenario.status.gate
    assert scenario.status.gate.passed
    before = scenario.created_jobs
    scenario.edit(evaluate={"gate": {"threshold": 0.3}})
    assert scenario.created_jobs == before
    assert not scenario.status.gate.passed


def test_compare_with_base_makes_gate_edits_free():
    scenario = Scenario(a_pipeline(evaluate={"compareWithBase": True})).finish(evaluate=compared(0.7, 0.5, 0.02))
    before = scenario.created_jobs
    scenario.edit(evaluate={"gate": {"against": "base", "threshold": 0.1}})
    assert scenario.created_jobs == before
    assert scenario.status.gate
    assert scenario.status.gate.passed


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
