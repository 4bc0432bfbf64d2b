"""The evaluate stage: evaluate the adapter, and compare the score with the gate."""

import math
from decimal import Decimal
from typing import ClassVar

from typing_extensions import override

from finetune_operator.api.rules import Rule
from finetune_operator.api.stages.base import ARGS_NEED_COMMAND, ONE_GPU, ConfigContext, StageSpec, recipe_from
from finetune_operator.api.stages.push import Push
from finetune_operator.api.status import GateStatus, truncate_message
from finetune_trainer.contract import (
    AnyResult,
    EvaluateConfig,
    EvaluateRecipe,
    EvaluateResult,
    Gate,
    Score,
)


class Evaluate(StageSpec, EvaluateRecipe):
    """Evaluates the trained model with lm-eval."""

    name: ClassVar[str] = "evaluate"
    condition: ClassVar[str] = "Evaluated"
    needs: ClassVar[tuple[str, ...]] = ("train",)
    pool: ClassVar[str] = "eval"
    rules: ClassVar[tuple[Rule, ...]] = (
        ARGS_NEED_COMMAND,
        ONE_GPU,
        Rule(
            field="gate.task",
            message="must be a name under evaluate.tasks",
            cel="!has(self.gate) || self.gate.task in self.tasks",
            is_valid=lambda data: "gate" not in data or data["gate"]["task"] in data["tasks"],
        ),
        Rule(
            field="fewshotAsMultiturn",
            message="turns need a chat template: add applyChatTemplate: true, or remove fewshotAsMultiturn",
            cel="!has(self.fewshotAsMultiturn) || !self.fewshotAsMultiturn"
            " || (has(self.applyChatTemplate) && self.applyChatTemplate)",
            is_valid=lambda data: not data.get("fewshotAsMultiturn") or bool(data.get("applyChatTemplate")),
        ),
    )

    gate: Gate | None = None
    """Score required by stages with when: GatePassed. Editing it reruns no stage; only against may."""

    @override
    def config(self, context: ConfigContext) -> EvaluateConfig:
        push = context.specs.get(Push.name)
        model = self.model or ("merged" if push else "adapter")
        against_base = self.gate is not None and self.gate.against == "base"
        resolved = {"model": model, "compare_with_base": self.compare_with_base or against_base}
        return EvaluateConfig(
            identity="",
            seed=context.seed,
            prepare=context.identities["prepare"],
            train=context.identities["train"],
            model=context.model,
            recipe=recipe_from(self, EvaluateRecipe).model_copy(update=resolved),
            dtype=push.dtype if model == "merged" and isinstance(push, Push) else "auto",
        )

    @override
    def source_uris(self) -> tuple[str, ...]:
        return tuple(task.file for task in self.tasks.values() if task.file)

    @override
    def evaluate_gate(self, result: AnyResult) -> GateStatus | None:
        if self.gate is None or not isinstance(result, EvaluateResult):
            return None
        scores = result.scores.get(self.gate.task, {})
        name = self.gate.metric
        score = scores.get(name) or scores.get(
            name.partition(",")[0]
        )  # the gate names acc,none and lm-eval reports acc
        if score is None:
            reason = f"{name} was not measured; measured metrics: {', '.join(scores) or 'none'}"
            return gate_unmeasured(self.gate, f"metric: {reason}")
        if reason := _missing_number(self.gate, score):
            return gate_unmeasured(self.gate, reason)
        return compare_to_gate(self.gate, score)


def _missing_number(gate: Gate, score: Score) -> str:
    """Return the gate's field that needs a number which was not measured, with the fix; empty if none is missing."""
    if gate.against == "base" and score.base is None:
        return f"against: {gate.metric} of the base model was not measured; set gate.against to value"
    if not gate.standard_errors:
        return ""
    if gate.against == "base" and score.difference_stderr is None:
        return f"standardErrors: the difference in {gate.metric} has no standard error; set gate.standardErrors to 0"
    if gate.against == "value" and score.stderr is None:
        return f"standardErrors: {gate.metric} has no standard error; set gate.standardErrors to 0"
    return ""


def gate_unmeasured(gate: Gate, reason: str) -> GateStatus:
    """Return a gate that has not passed because no score can be compared."""
    return GateStatus(
        task=gate.task,
        metric=gate.metric,
        threshold=gate.threshold,
        measured=False,
        passed=False,
        message=truncate_message(f"evaluate.gate.{reason}"),
    )


def compare_to_gate(gate: Gate, score: Score) -> GateStatus:
    """Return a gate that passes if the score minus its margin of error exceeds the threshold; NaN never does.

    With against: base, the difference from the base model's score takes the place of the score.
    """
    measured, stderr, text = score.value, score.stderr, f"{gate.task} {gate.metric} = {score.value:.4g}"
    if gate.against == "base" and score.base is not None:
        measured, stderr = _difference(score.value, score.base), score.difference_stderr
        text += f", base {score.base:.4g}: difference {measured:.4g}"
    margin = gate.standard_errors * (stderr or 0.0) if gate.standard_errors else 0.0
    passed = measured - margin > gate.threshold
    error = f" ± {stderr:.4g}" if stderr is not None else ""
    minus = f" minus {gate.standard_errors:g} standard errors" if gate.standard_errors else ""
    comparison = "above" if passed else "not above"
    return GateStatus(
        task=gate.task,
        metric=gate.metric,
        value=_finite(score.value),
        stderr=_finite(score.stderr),
        base=_finite(score.base),
        difference_stderr=_finite(score.difference_stderr),
        threshold=gate.threshold,
        passed=passed,
        message=f"{text}{error}{minus} is {comparison} {gate.threshold:g}",
    )


def _difference(value: float, base: float) -> float:
    """Return the difference, exact in decimal: in binary 0.8 - 0.7 is more than 0.1."""
    if not (math.isfinite(value) and math.isfinite(base)):
        return value - base
    return float(Decimal(repr(value)) - Decimal(repr(base)))


def _finite(value: float | None) -> float | None:
    """Return None for NaN and infinities, which JSON cannot represent."""
    return value if value is not None and math.isfinite(value) else None
