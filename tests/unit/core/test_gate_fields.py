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


HELD_OUT = {"task": "held_out", "metric": "validation_loss"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"validation": {"fraction": 0}}, "needs validation records: set a fraction"),
        ({"gate": {"operator": "GreaterThan"}}, "with operator LessThan"),
        ({"gate": {"metric": "acc"}}, "needs metric validation_loss"),
        ({"gate": {"metric": "reward_accuracy"}}, "only DPO has reward_accuracy"),
        (
            {"gate": {"metric": "reward_accuracy", "against": "Base"}},
            "reward_accuracy against Value",
        ),
        ({"task": {"limit": 5}}, "remove fewShot, limit and allowCode"),
    ],
    ids=str,
)
def test_held_out_that_cannot_be_meant_is_refused(spec, message):
    gate = {
        **HELD_OUT,
        "operator": "LessThan",
        "value": 0,
        **spec.get("gate", {}),
    }
    evaluate = {
        "tasks": [{"name": "held_out", **spec.get("task", {})}],
        "gates": [gate],
    }
    changes = {"validation": spec["validation"]} if "validation" in spec else {}
    with pytest.raises(ValidationError, match=message):
        a_pipeline(evaluate=evaluate, **changes)


def test_held_out_with_a_file_is_the_task_of_the_user():
    task = {"name": "held_out", "file": "pvc://tasks/mine.yaml", "limit": 5}
    spec = a_pipeline(
        evaluate={
            "tasks": [task],
            "gates": [{"task": "held_out", "value": 0.5}],
        },
        validation={"fraction": 0},
    )
    assert spec.evaluate
    assert not spec.evaluate.has_held_out
