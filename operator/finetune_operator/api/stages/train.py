"""The train stage: train the LoRA adapter."""

from typing import ClassVar

from typing_extensions import override

from finetune_operator.api.rules import Rule
from finetune_operator.api.stages.base import ARGS_NEED_COMMAND, ONE_GPU, ConfigContext, StageSpec, recipe_from
from finetune_trainer.contract import Checkpoint, TrainConfig, TrainRecipe


class Train(StageSpec, TrainRecipe):
    """Trains the LoRA adapter. Resumes from a checkpoint after an interruption."""

    name: ClassVar[str] = "train"
    condition: ClassVar[str] = "Trained"
    needs: ClassVar[tuple[str, ...]] = ("prepare",)
    pool: ClassVar[str] = "training"
    non_identity_fields: ClassVar[frozenset[str]] = frozenset({"checkpoint"})
    rules: ClassVar[tuple[Rule, ...]] = (
        ARGS_NEED_COMMAND,
        ONE_GPU,
        Rule(
            field="maxSteps",
            message="set epochs or maxSteps, not both",
            cel="!(has(self.epochs) && has(self.maxSteps))",
            is_valid=lambda data: not ("epochs" in data and "maxSteps" in data),
        ),
    )

    checkpoint: Checkpoint = Checkpoint()
    """When checkpoints are saved, and how many are kept."""

    @override
    def config(self, context: ConfigContext) -> TrainConfig:
        return TrainConfig(
            identity="",
            seed=context.seed,
            prepare=context.identities["prepare"],
            model=context.model,
            model_digest=context.statuses["prepare"].model_digest,
            recipe=recipe_from(self, TrainRecipe),
            checkpoint=self.checkpoint,
        )
