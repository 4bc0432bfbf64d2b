"""The push stage: publish the merged model."""

from typing import ClassVar

from typing_extensions import override

from finetune_operator.api.rules import Rule
from finetune_operator.api.stages.base import ARGS_NEED_COMMAND, ONE_GPU, ConfigContext, GatedSpec, recipe_from
from finetune_trainer.contract import Lineage, PushConfig, PushRecipe


class Push(GatedSpec, PushRecipe):
    """Merges the adapter into the base model and publishes it."""

    name: ClassVar[str] = "push"
    condition: ClassVar[str] = "Pushed"
    needs: ClassVar[tuple[str, ...]] = ("train", "evaluate")
    pool: ClassVar[str] = "control"
    rules: ClassVar[tuple[Rule, ...]] = (ARGS_NEED_COMMAND, ONE_GPU)

    @override
    def config(self, context: ConfigContext) -> PushConfig:
        return PushConfig(
            identity="",
            seed=context.seed,
            prepare=context.identities["prepare"],
            train=context.identities["train"],
            evaluate=context.identities.get("evaluate"),
            model=context.model,
            dataset=context.dataset,
            recipe=recipe_from(self, PushRecipe),
            lineage=lineage(context),
        )


def lineage(context: ConfigContext) -> Lineage:
    """Return the interruptions of the training run and what they cost, for the model card."""
    train = context.statuses["train"]
    return Lineage(
        pipeline=context.pipeline,
        interruptions=train.interruptions,
        lost_steps=train.lost_steps,
        lost_seconds=round(train.lost_seconds, 3),
    )
