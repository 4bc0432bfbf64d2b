"""The evaluate stage: evaluate the trained model, and compare its scores with the gates."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import Field
from typing_extensions import override

from finetune_operator.api.gates import DISTINCT_GATES, Gate, compare
from finetune_operator.api.rules import Detail, Rule
from finetune_operator.api.stages.base import (
    ARGS_NEED_COMMAND,
    ONE_GPU,
    ConfigContext,
    StageSpec,
    recipe_from,
)
from finetune_operator.api.stages.held_out import HELD_OUT_RULES
from finetune_operator.api.stages.ignored_fields import IGNORED_IN_EVALUATE
from finetune_operator.api.stages.push import Push
from finetune_operator.api.stages.train import Train
from finetune_operator.api.status import GateStatus
from finetune_trainer.contract import (
    HELD_OUT,
    AnyResult,
    EvaluateConfig,
    EvaluateRecipe,
    EvaluateResult,
    GatedMetric,
    TrainRecipe,
)


def _gates_without_task(data: Mapping[str, Any]) -> Iterator[Detail]:
    names = [task["name"] for task in data["tasks"]]
    for number, gate in enumerate(data.get("gates", ())):
        task = gate["task"]
        if task in names:
            continue
        shown = [name for name in names if name.isprintable()]
        hint = f"the tasks are {', '.join(shown)}"
        nearest = difflib.get_close_matches(task, shown, 1)
        if nearest:
            hint = f"did you mean {nearest[0]}?"
        yield ("gates", number, "task"), f"evaluate.tasks has no task {task!r}; {hint}"


class Evaluate(StageSpec, EvaluateRecipe):
    """Evaluates the trained model with lm-eval."""

    name: ClassVar[str] = "evaluate"
    condition: ClassVar[str] = "Evaluated"
    needs: ClassVar[tuple[str, ...]] = ("train",)
    pool: ClassVar[str] = "eval"
    rules: ClassVar[tuple[Rule, ...]] = (
        ARGS_NEED_COMMAND,
        ONE_GPU,
        DISTINCT_GATES,
        Rule(
            field="gates",
            message="every task must be a name in evaluate.tasks",
            cel="!has(self.gates) || self.gates.all(gate, self.tasks.exists(task, task.name == gate.task))",
            is_valid=lambda data: (
                {gate["task"] for gate in data.get("gates", ())}
                <= {task["name"] for task in data["tasks"]}
            ),
            details=_gates_without_task,
        ),
        *HELD_OUT_RULES,
        *IGNORED_IN_EVALUATE,
        Rule(
            field="fewshotAsMultiturn",
            message="turns need a chat template: add applyChatTemplate: true, or remove fewshotAsMultiturn",
            cel="!has(self.fewshotAsMultiturn) || !self.fewshotAsMultiturn"
            " || (has(self.applyChatTemplate) && self.applyChatTemplate)",
            is_valid=lambda data: (
                not data.get("fewshotAsMultiturn")
                or bool(data.get("applyChatTemplate"))
            ),
        ),
    )

    gates: tuple[Gate, ...] = Field(default=(), max_length=16)
    """Scores that Ready requires, and stages with when: GatesPassed; all must hold. Editing gates reruns no stage,
    except that a changed against may."""

    @override
    def config(self, context: ConfigContext) -> EvaluateConfig:
        push = context.specs.get(Push.name)
        merges = isinstance(push, Push) and push.has("Merged")
        train = context.specs.get(Train.name)
        has_adapter = not isinstance(train, Train) or train.method != "Full"
        # Scores should be the scores of the model that push publishes. Method Full has only whole weights.
        default_weights = "Merged" if merges or not has_adapter else "Adapter"
        weights = self.weights or default_weights
        # Such a gate needs the scores of the base model, whatever the spec says.
        against_base = any(gate.against == "Base" for gate in self.gates)
        resolved = {
            "weights": weights,
            "compare_with_base": self.compare_with_base or against_base,
        }
        return EvaluateConfig(
            identity="",
            seed=context.seed,
            prepare=context.identities["prepare"],
            train=context.identities["train"],
            model=context.model,
            model_pin=context.statuses["prepare"].model_pin,
            recipe=recipe_from(self, EvaluateRecipe).model_copy(update=resolved),
            # A merged model is evaluated in the type in which push stores it.
            dtype=push.dtype
            if weights == "Merged" and isinstance(push, Push)
            else "Auto",
            training=self._training(train),
            gated=tuple(
                GatedMetric(task=gate.task, metric=gate.metric)
                for gate in self.gates
                if gate.task != HELD_OUT
            ),
            tracking=context.tracking,
        )

    def _training(self, train: StageSpec | None) -> TrainRecipe | None:
        """Return the recipe of the training if its loss is measured."""
        if self.has_held_out and isinstance(train, Train):
            return recipe_from(train, TrainRecipe)
        return None

    @override
    def early_checks(self) -> list[str]:
        # Values are compared after the stage, so that their edits start nothing again.
        return sorted({f"{gate.task} {gate.metric}" for gate in self.gates})

    @override
    def source_uris(self) -> tuple[str, ...]:
        return tuple(task.file for task in self.tasks if task.file)

    @override
    def compare_with_gates(self, result: AnyResult) -> tuple[GateStatus, ...]:
        if not isinstance(result, EvaluateResult):
            return ()
        return tuple(compare(gate, result) for gate in self.gates)
