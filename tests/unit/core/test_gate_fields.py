"""Which gates a manifest may have."""

import pytest
from pydantic import ValidationError
from support.operator.scenario import a_pipeline


def gates(*fields: dict) -> dict:
    """Return the changes of evaluate that set these gates: without fields, exam acc above 0.6."""
    return {"gates": [{"task": "exam", "value": 0.6, **changes} for changes in fields]}


@pytest.mark.parametrize(
    "other",
    [{"metric": "acc_norm"}, {"operator": "LessThan"}, {"against": "Base"}],
    ids=str,
)
def test_gates_of_a_task_may_differ_in_one_key(other):
    spec = a_pipeline(evaluate=gates({}, other))
    assert spec.evaluate
    assert len(spec.evaluate.gates) == 2


@pytest.mark.parametrize(
    "second", [{}, {"value": 0.9}, {"metric": "acc", "standardErrors": 2}], ids=str
)
def test_two_gates_with_the_same_keys_are_refused(second):
    with pytest.raises(
        ValidationError,
        match=r"gates: two gates have the same task, metric, operator and against: remove one",
    ):
        a_pipeline(evaluate=gates({}, second))


def test_gate_of_an_unknown_task_is_refused():
    with pytest.raises(
        ValidationError, match=r"gates: every task must be a name in evaluate\.tasks"
    ):
        a_pipeline(evaluate=gates({"task": "other"}))


@pytest.mark.parametrize("stage", ["push", "deploy"])
@pytest.mark.parametrize("evaluate", [None, {"gates": None}, {"gates": []}], ids=str)
def test_gates_passed_without_a_gate_is_refused(stage, evaluate):
    when = {"push": {"when": "Always"}, "deploy": {"when": "Always"}} | {
        stage: {"when": "GatesPassed"}
    }
    with pytest.raises(
        ValidationError,
        match=rf"{stage}\.when: GatesPassed needs a gate: add evaluate\.gates",
    ):
        a_pipeline(evaluate=evaluate, **when)
