"""Publish the merged model."""

from typing import ClassVar

from typing_extensions import override

from finetune_operator.api.rules import Rule
from finetune_operator.api.stages.base import ARGS_ARE_A_COMMANDS, GatedSpec, Request
from finetune_operator.api.stages.parts import part
from finetune_trainer.contract import Lineage, PushConfig, PushRecipe


class Push(GatedSpec, PushRecipe):
    """Merges the adapter into the base model and publishes it."""

    name: ClassVar[str] = "push"
    condition: ClassVar[str] = "Pushed"
    needs: ClassVar[tuple[str, ...]] = ("train", "evaluate")
    pool: ClassVar[str] = "control"
    rules: ClassVar[tuple[Rule, ...]] = (ARGS_ARE_A_COMMANDS,)

    @override
    def config(self, request: Request) -> PushConfig:
        return PushConfig(
            identity="",
            seed=request.seed,
            prepare=request.identities["prepare"],
            train=request.identities["train"],
            evaluate=request.identities.get("evaluate"),
            model=request.model,
            dataset=request.dataset,
            recipe=part(self, PushRecipe),
            lineage=lineage(request),
        )


def lineage(request: Request) -> Lineage:
    """Tell what training went through."""
    train = request.told["train"]
    return Lineage(
        pipeline=request.pipeline,
        interruptions=train.interruptions,
        lost_steps=train.lost_steps,
        lost_seconds=round(train.lost_seconds, 3),
    )
