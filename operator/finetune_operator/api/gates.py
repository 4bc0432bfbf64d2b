"""Gates: conditions on the scores that Ready requires, and stages with `when: GatesPassed`."""

import math
import operator
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from finetune_operator.api.rules import Rule
from finetune_operator.api.status import GateStatus, truncate_message
from finetune_trainer.contract import ContractModel, EvaluateResult, Score
from finetune_trainer.contract.recipes import TaskName

Comparison = Literal["GreaterThan", "GreaterThanOrEqual", "LessThan", "LessThanOrEqual"]
COMPARISONS: dict[Comparison, tuple[Callable[[float, float], bool], str]] = {
    "GreaterThan": (operator.gt, "above"),
    "GreaterThanOrEqual": (operator.ge, "at least"),
    "LessThan": (operator.lt, "below"),
    "LessThanOrEqual": (operator.le, "at most"),
}
"""How each operator compares, and its words in a message. NaN passes none of them."""


class Gate(ContractModel):
    """One condition on a score."""

    task: TaskName
    """Name of one of evaluate.tasks."""

    metric: Annotated[str, StringConstraints(min_length=1, max_length=64)] = "acc"
    """Name of the metric in lm-eval, with or without its filter: acc, or acc,none."""

    operator: Comparison = "GreaterThan"
    """How the score must compare with value. LessThan is for metrics where lower is better, such as perplexity."""

    value: float = Field(allow_inf_nan=False)
    """What the score, or its difference from the base's, is compared with."""

    against: Literal["Value", "Base"] = "Value"
    """What is compared. Value: the score. Base: the score minus the base model's score on the same questions. Base
    implies compareWithBase, so the edit runs the stage again unless that was true."""

    standard_errors: float = Field(default=0.0, ge=0, le=10)
    """Standard errors by which the score must be on the right side; 1.645 means 95 % confidence (one-sided). With
    against: Base it is the standard error of the paired difference."""


GATE_KEYS = ("task", "metric", "operator", "against")
"""Fields that tell gates apart: one task may have a gate for its score and one for its gain over the base."""


def _in_cel(gate: str, name: str) -> str:
    """Return the field of a gate in CEL, with its default: items of lists have no defaults in the schema."""
    field = Gate.model_fields[name]
    found = f"{gate}.{name}"
    return found if field.is_required() else f"(has({found}) ? {found} : '{field.default}')"


SAME_KEYS = " && ".join(f"{_in_cel('a', name)} == {_in_cel('b', name)}" for name in GATE_KEYS)
DISTINCT_GATES = Rule(
    field="gates",
    message=f"two gates have the same {', '.join(GATE_KEYS[:-1])} and {GATE_KEYS[-1]}: remove one",
    cel=f"!has(self.gates) || self.gates.all(a, self.gates.exists_one(b, {SAME_KEYS}))",
    is_valid=lambda data: (
        len({tuple(gate[name] for name in GATE_KEYS) for gate in data.get("gates", ())})
        == len(data.get("gates", ()))
    ),
)
"""No list map: its keys need defaults in the schema, which GitOps tools would report as drift."""


def compare(gate: Gate, result: EvaluateResult) -> GateStatus:
    """Return the comparison of the measured score with the gate; it is not measured if a number is missing."""
    scores = result.scores.get(gate.task, {})
    plain_name = gate.metric.partition(",")[
        0
    ]  # the gate may name acc,none where lm-eval reports acc
    score = scores.get(gate.metric) or scores.get(plain_name)
    if score is None:
        measured = ", ".join(scores) or "none"
        return unmeasured(
            gate, f"metric: {gate.metric} was not measured; measured metrics: {measured}"
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
    gate: Gate, message: str, *, passed: bool, measured: bool = True, **scores: float | None
) -> GateStatus:
    fields = gate.model_dump(include={*GATE_KEYS, "value"})
    return GateStatus(**fields, **scores, measured=measured, passed=passed, message=message)


def _compare_score(gate: Gate, score: Score) -> GateStatus:
    """Return the comparison. The score must be on the right side by its margin of error; NaN never is.

    With against: Base, the difference from the base model's score takes the place of the score.
    """
    measured, stderr, text = (
        score.value,
        score.stderr,
        f"{gate.task} {gate.metric} = {score.value:.4g}",
    )
    if gate.against == "Base" and score.base is not None:
        measured, stderr = _difference(score.value, score.base), score.difference_stderr
        text += f", base {score.base:.4g}: difference {measured:.4g}"
    holds, words = COMPARISONS[gate.operator]
    margin = gate.standard_errors * (stderr or 0.0) if gate.standard_errors else 0.0
    passed = holds(
        measured + margin if gate.operator.startswith("LessThan") else measured - margin, gate.value
    )
    error = f" ± {stderr:.4g}" if stderr is not None else ""
    sign = "plus" if gate.operator.startswith("LessThan") else "minus"
    moved = f" {sign} {gate.standard_errors:g} standard errors" if gate.standard_errors else ""
    return _status(
        gate,
        f"{text}{error}{moved} is {'' if passed else 'not '}{words} {gate.value:g}",
        passed=passed,
        score=_finite(score.value),
        stderr=_finite(score.stderr),
        base=_finite(score.base),
        difference_stderr=_finite(score.difference_stderr),
    )


def _difference(value: float, base: float) -> float:
    """Return the difference, exact in decimal: in binary 0.8 - 0.7 is more than 0.1."""
    if not (math.isfinite(value) and math.isfinite(base)):
        return value - base
    return float(Decimal(repr(value)) - Decimal(repr(base)))


def _finite(value: float | None) -> float | None:
    """Return None for NaN and infinities, which JSON cannot represent."""
    return value if value is not None and math.isfinite(value) else None
