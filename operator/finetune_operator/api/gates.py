"""Gates: conditions on the scores that Ready requires, and stages with `when: GatesPassed`."""

import math
import operator
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from finetune_operator.api.rules import Rule
from finetune_operator.api.status import GateStatus, truncate_message
from finetune_trainer.contract import ContractModel, EvaluateResult, Score
from finetune_trainer.contract.tasks import TaskName

Comparison = Literal["GreaterThan", "GreaterThanOrEqual", "LessThan", "LessThanOrEqual"]
COMPARISONS: dict[Comparison, tuple[Callable[[float, float], bool], str]] = {
    "GreaterThan": (operator.gt, "above"),
    "GreaterThanOrEqual": (operator.ge, "at least"),
    "LessThan": (operator.lt, "below"),
    "LessThanOrEqual": (operator.le, "at most"),
}
"""How each operator compares, and its words in a message. NaN passes none of them."""


class Gate(ContractModel):
    """A condition on a score."""

    task: TaskName
    """Name of a task in evaluate.tasks."""

    metric: Annotated[str, StringConstraints(min_length=1, max_length=64)] = "acc"
    """Name of the metric in lm-eval, with or without its filter: acc, or acc,none."""

    operator: Comparison = "GreaterThan"
    """How the score must compare with value. LessThan is for metrics such as perplexity, in which lower is better."""

    value: float = Field(allow_inf_nan=False)
    """Number with which the score, or its difference from the base model's score, is compared."""

    against: Literal["Value", "Base"] = "Value"
    """What is compared. Value: the score. Base: the score minus the base model's score on the same questions. Base
    implies compareWithBase, so the edit runs the stage again unless that was true."""

    standard_errors: float = Field(default=0.0, ge=0, le=10)
    """Standard errors by which the score must be on the right side; 1.645 means 95 % confidence (one-sided). With
    against: Base it is the standard error of the paired difference."""


# A task may have a gate for its score and another gate for its gain over the base.
GATE_KEYS = ("task", "metric", "operator", "against")
"""Fields that tell gates apart."""


def _in_cel(gate: str, name: str) -> str:
    """Return the field of a gate in CEL, with its default: items of lists have no defaults in the schema."""
    field = Gate.model_fields[name]
    path = f"{gate}.{name}"
    if field.is_required():
        return path
    return f"(has({path}) ? {path} : '{field.default}')"


def _are_distinct(data: Mapping[str, Any]) -> bool:
    gates = data.get("gates", ())
    keys = {tuple(gate[name] for name in GATE_KEYS) for gate in gates}
    return len(keys) == len(gates)


SAME_KEYS = " && ".join(
    f"{_in_cel('a', name)} == {_in_cel('b', name)}" for name in GATE_KEYS
)
DISTINCT_GATES = Rule(
    field="gates",
    message=f"two gates have the same {', '.join(GATE_KEYS[:-1])} and {GATE_KEYS[-1]}: remove one",
    reason="FieldValueDuplicate",
    cel=f"!has(self.gates) || self.gates.all(a, self.gates.exists_one(b, {SAME_KEYS}))",
    is_valid=_are_distinct,
)
"""No list map: its keys need defaults in the schema, which GitOps tools would report as drift."""


def compare(gate: Gate, result: EvaluateResult) -> GateStatus:
    """Return the comparison of the measured score with the gate; it is not measured if a number is missing."""
    scores = result.scores.get(gate.task, {})
    # A gate may name acc,none although lm-eval reports acc.
    plain_name, _, _ = gate.metric.partition(",")
    score = scores.get(gate.metric) or scores.get(plain_name)
    if score is None:
        measured = ", ".join(scores) or "none"
        return unmeasured(
            gate,
            f"metric: {gate.metric} was not measured; measured metrics: {measured}",
        )
    reason = _missing_number(gate, score)
    return unmeasured(gate, reason) if reason else _compare_score(gate, score)


def _missing_number(gate: Gate, score: Score) -> str:
    """Return the gate's field that needs a number which was not measured, with the fix; empty if none is missing."""
    if gate.against == "Base" and score.base is None:
        return f"against: {gate.metric} of the base model was not measured; set against to Value"
    if not gate.standard_errors:
        return ""
    if gate.against == "Base" and score.difference_stderr is None:
        return f"standardErrors: the difference in {gate.metric} has no standard error; set standardErrors to 0"
    if gate.against == "Value" and score.stderr is None:
        return f"standardErrors: {gate.metric} has no standard error; set standardErrors to 0"
    return ""


def unmeasured(gate: Gate, reason: str) -> GateStatus:
    """Return a gate that has not passed because no score can be compared."""
    return _status(
        gate,
        truncate_message(f"evaluate.gates[{gate.task}].{reason}"),
        passed=False,
        measured=False,
    )


def _status(
    gate: Gate,
    message: str,
    *,
    passed: bool,
    measured: bool = True,
    **scores: float | None,
) -> GateStatus:
    fields = gate.model_dump(include={*GATE_KEYS, "value"})
    return GateStatus(
        **fields, **scores, measured=measured, passed=passed, message=message
    )


def _compare_score(gate: Gate, score: Score) -> GateStatus:
    """Return the comparison. The score must be on the right side by its margin of error; NaN never is.

    With against: Base, the difference from the base model's score takes the place of the score.
    """
    measured = score.value
    stderr = score.stderr
    text = f"{gate.task} {gate.metric} = {score.value:.4g}"
    if gate.against == "Base" and score.base is not None:
        measured = difference(score.value, score.base)
        stderr = score.difference_stderr
        text += f", base {score.base:.4g}: difference {measured:.4g}"
    if stderr is not None:
        text += f" ± {stderr:.4g}"
    # The margin moves the score to its worse side: up if lower is better, down if higher is better.
    if gate.standard_errors:
        margin = gate.standard_errors * (stderr or 0.0)
        lower_is_better = gate.operator.startswith("LessThan")
        measured += margin if lower_is_better else -margin
        sign = "plus" if lower_is_better else "minus"
        text += f" {sign} {gate.standard_errors:g} standard errors"
    holds, words = COMPARISONS[gate.operator]
    passed = holds(measured, gate.value)
    verb = "is" if passed else "is not"
    return _status(
        gate,
        f"{text} {verb} {words} {gate.value:g}",
        passed=passed,
        score=_finite(score.value),
        stderr=_finite(score.stderr),
        base=_finite(score.base),
        difference_stderr=_finite(score.difference_stderr),
    )


def difference(value: float, base: float) -> float:
    """Return the difference, exact in decimal: in binary 0.8 - 0.7 is more than 0.1."""
    if not (math.isfinite(value) and math.isfinite(base)):
        return value - base
    return float(Decimal(repr(value)) - Decimal(repr(base)))


def _finite(value: float | None) -> float | None:
    """Return None for NaN and infinities, which JSON cannot represent."""
    if value is None or not math.isfinite(value):
        return None
    return value
