"""The evaluate stage: evaluate the adapter, and compare the score with the gate."""

import math
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
    """Evaluates the adapter with lm-eval."""

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
    )

    gate: Gate | None = None
    """Score required by stages with when: GatePassed. Editing it reruns no stage."""

    @override
    def config(self, context: ConfigContext) -> EvaluateConfig:
        push = context.specs.get(Push.name)
        dtype = push.dtype if self.model == "merged" and isinstance(push, Push) else "auto"
        return EvaluateConfig(
            identity="",
            seed=context.seed,
            train=context.identities["train"],
            model=context.model,
            recipe=recipe_from(self, EvaluateRecipe),
            dtype=dtype,
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
            return gate_unmeasured(
                self.gate, f"{self.gate.metric} was not measured; measured metrics: {', '.join(scores) or 'none'}"
            )
        if self.gate.standard_errors and score.stderr is None:
            return gate_unmeasured(self.gate, f"{self.gate.metric} has no standard error; set gate.standardErrors to 0")
        return compare_to_gate(self.gate, score)


def gate_unmeasured(gate: Gate, reason: str) -> GateStatus:
    """Return a gate that has not passed because no score can be compared."""
    return GateStatus(
        task=gate.task,
        metric=gate.metric,
        threshold=gate.threshold,
        measured=False,
        passed=False,
        message=truncate_message(f"evaluate.gate.metric: {reason}"),
    )


def compare_to_gate(gate: Gate, score: Score) -> GateStatus:
    """Return a gate that passes if the score minus its margin of error exceeds the threshold; NaN never does."""
    margin = gate.standard_errors * (score.stderr or 0.0) if gate.standard_errors else 0.0
    passed = score.value - margin > gate.threshold
    error = f" ± {score.stderr:.4g}" if score.stderr is not None else ""
    minus = f" minus {gate.standard_errors:g} standard errors" if gate.standard_errors else ""
    comparison = "above" if passed else "not above"
    return GateStatus(
        task=gate.task,
        metric=gate.metric,
        value=_finite(score.value),
        stderr=_finite(score.stderr),
        threshold=gate.threshold,
        passed=passed,
        message=f"{gate.task} {gate.metric} = {score.value:.4g}{error}{minus} is {comparison} {gate.threshold:g}",
    )


def _finite(value: float | None) -> float | None:
    """Return None for NaN and infinities, which JSON cannot represent."""
    return value if value is not None and math.isfinite(value) else None
