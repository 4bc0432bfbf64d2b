"""The gates, which decide what is published and served."""

import math
from typing import Any

import pytest
from support.operator.kstatus import kstatus
from support.operator.scenario import Scenario, a_pipeline, scores

from finetune_operator.api.status import GateStatus

GAIN = {"task": "exam", "value": 0.1, "against": "Base"}
"""A gate that needs a gain of more than 0.1 over the base model."""


def gates(*fields: dict) -> dict:
    """Return the changes of evaluate that set these gates: without fields, exam acc above 0.6."""
    return {"gates": [{"task": "exam", "value": 0.6, **changes} for changes in fields]}


def gated(*fields: dict, **changes) -> Scenario:
    return Scenario(a_pipeline(evaluate=gates(*fields), **changes))


def only_gate(scenario: Scenario) -> GateStatus:
    """Return the comparison with the only gate, which decides alone."""
    [gate] = scenario.status.gates
    assert scenario.status.gates_passed is gate.passed
    return gate


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
def test_gate_passes_only_above_its_value(value, stderr, standard_errors, passes):
    scenario = gated({"standardErrors": standard_errors})
    scenario.finish(evaluate=scores(value, stderr))
    assert only_gate(scenario).passed is passes
    assert scenario.states["deploy"] == ("Succeeded" if passes else "Skipped")
    assert ("deploy-a1" in scenario.created_jobs) is passes


def test_pipeline_below_the_gate_is_finished_and_not_ready():
    scenario = Scenario().finish(evaluate=scores(0.5, 0.02))
    assert scenario.status.phase == "BelowThreshold"
    assert scenario.condition("Finished") == ("True", "BelowThreshold")
    assert scenario.condition("Ready") == ("False", "BelowThreshold")
    assert scenario.condition("Deployed") == ("False", "BelowThreshold")
    assert scenario.status.conditions[0].message.startswith(
        "exam acc = 0.5 ± 0.02 is not above 0.6 (see "
    )
    assert scenario.condition("Pushed") == ("True", "StageSucceeded")


@pytest.mark.parametrize("passes", [True, False])
@pytest.mark.parametrize("push", ["Always", "GatesPassed"])
@pytest.mark.parametrize("deploy", ["Always", "GatesPassed"])
def test_failed_gate_skips_only_stages_with_gate_passed(push, deploy, passes):
    scenario = Scenario(a_pipeline(push={"when": push}, deploy={"when": deploy}))
    scenario.finish(evaluate=scores(0.7 if passes else 0.5))
    pushed = passes or push == "Always"
    deployed = pushed and (
        passes or deploy == "Always"
    )  # a model that was not pushed cannot be served
    states = scenario.states
    assert (states["push"], states["deploy"]) == (
        "Succeeded" if pushed else "Skipped",
        "Succeeded" if deployed else "Skipped",
    )
    assert scenario.condition("Ready") == (
        ("True", "AllStagesSucceeded") if passes else ("False", "BelowThreshold")
    )
    assert scenario.status.phase == ("Succeeded" if passes else "BelowThreshold")


def test_pipeline_without_gate_runs_all_stages():
    scenario = Scenario(
        a_pipeline(evaluate={"gates": None}, deploy={"when": "Always"})
    ).finish()
    assert scenario.status.gates == ()
    assert scenario.status.gates_passed is None
    assert scenario.status.phase == "Succeeded"


def test_unmeasured_metric_fails_and_lists_measured_ones():
    scenario = gated({"metric": "f1"}, push={"when": "GatesPassed"}).finish()
    assert scenario.status.phase == "Failed"
    assert scenario.condition("Evaluated") == ("False", "SpecInvalid")
    assert (
        scenario.stage("evaluate").message
        == "evaluate.gates[exam].metric: f1 was not measured; measured metrics: acc, acc_norm"
    )
    assert scenario.states["push"] == "Pending"
    assert kstatus(scenario) == "Failed"
    jobs = scenario.created_jobs
    assert scenario.retry("with the same gate").created_jobs == jobs
    scenario.edit(evaluate=gates({}))
    assert scenario.finish().status.phase == "Succeeded"
    assert scenario.created_jobs.count("evaluate-a1") == 1
    assert "evaluate-a2" not in scenario.created_jobs


def test_failed_stage_is_tried_again_after_an_edit_of_the_metric():
    scenario = gated({"metric": "f1"}).run_before("evaluate")
    scenario.cluster.fail(scenario.start("evaluate"), 64)
    scenario.reconcile_until_stable()
    assert scenario.status.phase == "Failed"
    scenario.edit(evaluate=gates({"metric": "f1", "value": 0.1}))
    assert "evaluate-a2" not in scenario.created_jobs
    scenario.edit(evaluate=gates({}))
    assert scenario.finish().status.phase == "Succeeded"
    assert "evaluate-a2" in scenario.created_jobs


def test_margin_without_standard_error_fails():
    scenario = gated({"standardErrors": 1}).finish(evaluate=scores(0.9))
    assert scenario.condition("Evaluated") == ("False", "SpecInvalid")
    assert "standardErrors" in scenario.stage("evaluate").message


def compared(value, base, stderr=None):
    """Return scores of the only task that were compared with the base model."""
    score = {"value": value, "stderr": 0.02, "base": base}
    return {
        "scores": {
            "exam": {
                "acc": score
                if stderr is None
                else {**score, "differenceStderr": stderr}
            }
        }
    }


@pytest.mark.parametrize(
    ("value", "base", "stderr", "standard_errors", "passes"),
    [
        (0.75, 0.4, 0.03, 0, True),
        (0.75, 0.66, 0.03, 0, False),  # better than the base, but not by more than 0.1
        (
            0.8,
            0.7,
            0.03,
            0,
            False,
        ),  # equal is not above, although 0.8 - 0.7 > 0.1 in binary
        (0.75, 0.75, 0.0, 0, False),
        (0.75, 0.6, 0.03, 1, True),
        (
            0.75,
            0.6,
            0.03,
            2,
            False,
        ),  # 0.15 - 2 * 0.03 is not above 0.1; with the stderr of the value it would be
        (0.75, 0.6, None, 0, True),
        (math.nan, 0.1, 0.03, 0, False),
        (0.75, math.nan, 0.03, 0, False),
        (math.inf, math.inf, 0.03, 0, False),
        (0.9, 0.1, math.nan, 1, False),
    ],
)
def test_gate_against_base_compares_the_difference(
    value, base, stderr, standard_errors, passes
):
    scenario = gated({**GAIN, "standardErrors": standard_errors})
    scenario.finish(evaluate=compared(value, base, stderr))
    gate = only_gate(scenario)
    assert gate.measured
    assert gate.passed is passes
    assert gate.base == (base if math.isfinite(base) else None)
    assert scenario.states["deploy"] == ("Succeeded" if passes else "Skipped")


@pytest.mark.parametrize(
    ("standard_errors", "message"),
    [
        (0, "exam acc = 0.75, base 0.4: difference 0.35 ± 0.03 is above 0.1"),
        (
            2,
            "exam acc = 0.75, base 0.4: difference 0.35 ± 0.03 minus 2 standard errors is above 0.1",
        ),
    ],
)
def test_gate_against_base_says_the_difference(standard_errors, message):
    scenario = gated({**GAIN, "standardErrors": standard_errors})
    scenario.finish(evaluate=compared(0.75, 0.4, 0.03))
    assert scenario.stage("evaluate").message == message


def test_gate_against_base_fails_without_a_base_score():
    scenario = gated(GAIN).finish(evaluate=scores(0.9))
    assert scenario.condition("Evaluated") == ("False", "SpecInvalid")
    assert scenario.stage("evaluate").message.startswith(
        "evaluate.gates[exam].against: acc of the base model"
    )


def test_margin_without_error_of_the_difference_fails():
    scenario = gated({**GAIN, "standardErrors": 1}).finish(evaluate=compared(0.9, 0.1))
    assert scenario.condition("Evaluated") == ("False", "SpecInvalid")
    assert scenario.stage("evaluate").message.startswith(
        "evaluate.gates[exam].standardErrors: the difference in acc"
    )


def test_gate_against_value_ignores_the_base_score():
    scenario = gated({"value": 0.7}).finish(evaluate=compared(0.75, 0.9, 0.03))
    assert only_gate(scenario).passed
    assert only_gate(scenario).message == "exam acc = 0.75 ± 0.02 is above 0.7"


def test_gate_against_base_reruns_evaluate_with_the_base():
    scenario = Scenario().finish(evaluate=scores(0.7))
    assert not scenario.config("evaluate").recipe.compare_with_base
    scenario.edit(evaluate=gates(GAIN)).finish(evaluate=compared(0.7, 0.5, 0.02))
    assert scenario.config("evaluate").recipe.compare_with_base
    assert scenario.created_jobs.count("evaluate-a2") == 1
    assert only_gate(scenario).passed
    before = scenario.created_jobs
    scenario.edit(evaluate=gates({**GAIN, "value": 0.3}))
    assert scenario.created_jobs == before
    assert not only_gate(scenario).passed


def test_compare_with_base_makes_gate_edits_free():
    scenario = Scenario(a_pipeline(evaluate={"compareWithBase": True})).finish(
        evaluate=compared(0.7, 0.5, 0.02)
    )
    before = scenario.created_jobs
    scenario.edit(evaluate=gates(GAIN))
    assert scenario.created_jobs == before
    assert only_gate(scenario).passed


def test_lower_value_deploys_without_reruns():
    scenario = Scenario().finish(evaluate=scores(0.5))
    assert scenario.status.phase == "BelowThreshold"
    before = scenario.created_jobs
    scenario.edit(evaluate=gates({"value": 0.4}))
    assert scenario.created_jobs == [*before, "deploy-a1"]
    assert scenario.finish().status.phase == "Succeeded"


def test_higher_value_after_deploy_changes_no_stage():
    scenario = Scenario().finish(evaluate=scores(0.7))
    before = scenario.created_jobs
    scenario.edit(evaluate=gates({"value": 0.9})).finish()
    assert scenario.created_jobs == before
    assert not only_gate(scenario).passed
    assert scenario.states["deploy"] == "Succeeded"


@pytest.mark.parametrize(
    ("operator", "score", "standard_errors", "passes"),
    [
        ("GreaterThan", 0.6, 0, False),
        ("GreaterThanOrEqual", 0.6, 0, True),
        ("GreaterThanOrEqual", 0.59, 0, False),
        ("GreaterThanOrEqual", 0.7, 2, True),
        ("GreaterThanOrEqual", 0.69, 2, False),  # 0.69 - 2 * 0.05 is below 0.6
        ("LessThan", 0.6, 0, False),
        ("LessThan", 0.59, 0, True),
        ("LessThan", 0.49, 2, True),
        ("LessThan", 0.51, 2, False),  # 0.51 + 2 * 0.05 is not below 0.6
        ("LessThanOrEqual", 0.6, 0, True),
        ("LessThanOrEqual", 0.61, 0, False),
        ("LessThanOrEqual", 0.5, 2, True),
        ("LessThanOrEqual", 0.51, 2, False),
        ("GreaterThanOrEqual", math.nan, 0, False),
        ("LessThan", math.nan, 0, False),
        ("LessThanOrEqual", math.nan, 1, False),
        ("LessThan", -math.inf, 0, True),
    ],
)
def test_operator_needs_the_score_on_its_side(operator, score, standard_errors, passes):
    scenario = gated({"operator": operator, "standardErrors": standard_errors}).finish(
        evaluate=scores(score, 0.05)
    )
    assert only_gate(scenario).passed is passes
    assert scenario.states["deploy"] == ("Succeeded" if passes else "Skipped")


@pytest.mark.parametrize(
    ("operator", "score", "message"),
    [
        (
            "GreaterThanOrEqual",
            0.9,
            "exam acc = 0.9 ± 0.05 minus 2 standard errors is at least 0.6",
        ),
        (
            "LessThan",
            0.9,
            "exam acc = 0.9 ± 0.05 plus 2 standard errors is not below 0.6",
        ),
        (
            "LessThanOrEqual",
            0.3,
            "exam acc = 0.3 ± 0.05 plus 2 standard errors is at most 0.6",
        ),
    ],
)
def test_message_of_a_gate_says_its_operator_and_margin(operator, score, message):
    scenario = gated({"operator": operator, "standardErrors": 2}).finish(
        evaluate=scores(score, 0.05)
    )
    assert only_gate(scenario).message == message


@pytest.mark.parametrize(
    ("value", "base", "passes"),
    [
        (0.7, 0.8, True),  # -0.1 + 0.03 is below 0
        (0.78, 0.8, False),  # -0.02 + 0.03 is not
        (0.9, 0.8, False),
    ],
)
def test_less_than_base_adds_the_error_of_the_difference(value, base, passes):
    less = {**GAIN, "operator": "LessThan", "value": 0, "standardErrors": 1}
    assert (
        only_gate(gated(less).finish(evaluate=compared(value, base, 0.03))).passed
        is passes
    )


TWO_GATES: tuple[dict[str, Any], ...] = ({}, {"operator": "LessThan", "value": 0.9})
"""The score must be above 0.6 and below 0.9."""


@pytest.mark.parametrize(
    ("score", "passed"),
    [(0.7, (True, True)), (0.5, (False, True)), (0.95, (True, False))],
)
def test_all_gates_must_hold(score, passed):
    scenario = gated(*TWO_GATES).finish(evaluate=scores(score))
    assert tuple(gate.passed for gate in scenario.status.gates) == passed
    assert scenario.status.gates_passed is all(passed)
    assert scenario.states["deploy"] == ("Succeeded" if all(passed) else "Skipped")
    assert scenario.status.phase == ("Succeeded" if all(passed) else "BelowThreshold")


def test_skipped_stage_names_every_failed_gate():
    scenario = gated(
        {},
        {"operator": "GreaterThanOrEqual", "value": 0.55},
        {"metric": "acc_norm", "value": 0.1},
    )
    scenario.finish(
        evaluate={
            "scores": {"exam": {"acc": {"value": 0.5}, "acc_norm": {"value": 0.4}}}
        }
    )
    both = "exam acc = 0.5 is not above 0.6; exam acc = 0.5 is not at least 0.55"
    assert both in scenario.stage("deploy").message
    assert "acc_norm" not in scenario.stage("deploy").message


def test_one_unmeasured_gate_of_several_fails():
    scenario = gated({}, {"metric": "f1"}).finish()
    assert scenario.condition("Evaluated") == ("False", "SpecInvalid")
    assert scenario.stage("evaluate").message.startswith(
        "evaluate.gates[exam].metric: f1 was not measured"
    )
    assert scenario.states["deploy"] == "Pending"
    assert "deploy-a1" not in scenario.created_jobs


def test_gates_are_absent_until_evaluate_is_done():
    scenario = Scenario().run("prepare").run("train")
    assert scenario.status.gates == ()
    assert scenario.status.gates_passed is None
    scenario.run("evaluate")
    assert scenario.status.gates_passed is True
