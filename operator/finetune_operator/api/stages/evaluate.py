"""Measure the adapter, and compare the score with the gate."""

import math
from typing import ClassVar

from typing_extensions import override

from finetune_operator.api.rules import Rule
from finetune_operator.api.stages.base import ARGS_NEED_COMMAND, ConfigContext, StageSpec
from finetune_operator.api.stages.parts import recipe_from
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
    """Measures the adapter with lm-eval."""

    name: ClassVar[str] = "evaluate"
    condition: ClassVar[str] = "Evaluated"
    needs: ClassVar[tuple[str, ...]] = ("train",)
    pool: ClassVar[str] = "eval"
    rules: ClassVar[tuple[Rule, ...]] = (
        ARGS_NEED_COMMAND,
        Rule(
            field="gate.task",
            message="must be one of the names under evaluate.tasks",
            cel="!has(self.gate) || self.gate.task in self.tasks",
            is_valid=lambda data: "gate" not in data or data["gate"]["task"] in data["tasks"],
        ),
    )

    gate: Gate | None = None
    """What the score must be before anything is deployed; editing it reruns nothing."""

    @override
    def config(self, context: ConfigContext) -> EvaluateConfig:
        published = context.specs.get(Push.name)
        numbers = published.dtype if self.model == "merged" and isinstance(published, Push) else "auto"
        return EvaluateConfig(
            identity="",
            seed=context.seed,
            train=context.identities["train"],
            model=context.model,
            recipe=recipe_from(self, EvaluateRecipe),
            dtype=numbers,
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
        score = scores.get(name) or scores.get(name.partition(",")[0])  # acc,none where only acc was given
        if score is None:
            return gate_unmeasured(
                self.gate, f"{self.gate.metric} was not measured; there are {', '.join(scores) or 'none'}"
            )
        if self.gate.standard_errors and score.stderr is None:
            return gate_unmeasured(self.gate, f"{self.gate.metric} has no standard error; set gate.standardErrors to 0")
        return compare_to_gate(self.gate, score)


def gate_unmeasured(gate: Gate, why: str) -> GateStatus:
    """Keep the gate closed because there is nothing to compare."""
    return GateStatus(
        task=gate.task,
        metric=gate.metric,
        threshold=gate.threshold,
        measured=False,
        passed=False,
        message=truncate_message(f"evaluate.gate.metric: {why}"),
    )


def compare_to_gate(gate: Gate, score: Score) -> GateStatus:
    """Open the gate if the score, less its margin of error, is greater than the threshold; NaN never is."""
    margin = gate.standard_errors * (score.stderr or 0.0) if gate.standard_errors else 0.0
    passed = score.value - margin > gate.threshold
    error = f" ± {score.stderr:.4g}" if score.stderr is not None else ""
    less = f" less {gate.standard_errors:g} standard errors" if gate.standard_errors else ""
    word = "above" if passed else "not above"
    return GateStatus(
        task=gate.task,
        metric=gate.metric,
        value=_number(score.value),
        stderr=_number(score.stderr),
        threshold=gate.threshold,
        passed=passed,
        message=f"{gate.task} {gate.metric} = {score.value:.4g}{error}{less} is {word} {gate.threshold:g}",
    )


def _number(value: float | None) -> float | None:
    """Give what JSON can say: it has no NaN and no infinity."""
    return value if value is not None and math.isfinite(value) else None
