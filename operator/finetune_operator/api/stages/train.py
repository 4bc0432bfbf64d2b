"""Train the adapter."""

from typing import ClassVar

from typing_extensions import override

from finetune_operator.api.rules import Rule
from finetune_operator.api.stages.base import ARGS_ARE_A_COMMANDS, Request, StageSpec
from finetune_operator.api.stages.parts import part
from finetune_trainer.contract import Checkpoint, TrainConfig, TrainRecipe


class Train(StageSpec, TrainRecipe):
    """Trains the LoRA adapter; made to be interrupted."""

    name: ClassVar[str] = "train"
    condition: ClassVar[str] = "Trained"
    needs: ClassVar[tuple[str, ...]] = ("prepare",)
    pool: ClassVar[str] = "training"
    execution_fields: ClassVar[frozenset[str]] = frozenset({"checkpoint"})
    rules: ClassVar[tuple[Rule, ...]] = (
        ARGS_ARE_A_COMMANDS,
        Rule(
            field="maxSteps",
            message="give epochs or maxSteps, not both",
            cel="!(has(self.epochs) && has(self.maxSteps))",
            holds=lambda data: not ("epochs" in data and "maxSteps" in data),
        ),
    )

    checkpoint: Checkpoint = Checkpoint()
    """When and how many checkpoints are kept."""

    @override
    def config(self, request: Request) -> TrainConfig:
        return TrainConfig(
            identity="",
            seed=request.seed,
            prepare=request.identities["prepare"],
            model=request.model,
            recipe=part(self, TrainRecipe),
            checkpoint=self.checkpoint,
        )
