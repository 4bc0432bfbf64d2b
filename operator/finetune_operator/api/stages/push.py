"""The push stage: publish the model."""

from typing import ClassVar

from typing_extensions import override

from finetune_operator.api.rules import Rule
from finetune_operator.api.stages.base import (
    ARGS_NEED_COMMAND,
    ONE_GPU,
    ConfigContext,
    GatedSpec,
    recipe_from,
)
from finetune_operator.api.stages.ignored_fields import IGNORED_IN_PUSH
from finetune_trainer.contract import (
    DatasetSource,
    Lineage,
    PublishedTarget,
    PushConfig,
    PushRecipe,
    PushResult,
)


class Push(GatedSpec, PushRecipe):
    """Publishes the merged model, or the adapter alone, to each target."""

    name: ClassVar[str] = "push"
    condition: ClassVar[str] = "Pushed"
    needs: ClassVar[tuple[str, ...]] = ("train", "evaluate")
    pool: ClassVar[str] = "control"
    publishes: ClassVar[bool] = True
    rules: ClassVar[tuple[Rule, ...]] = (
        ARGS_NEED_COMMAND,
        ONE_GPU,
        *IGNORED_IN_PUSH,
    )

    @override
    def config(self, context: ConfigContext) -> PushConfig:
        return PushConfig(
            identity="",
            seed=context.seed,
            prepare=context.identities["prepare"],
            train=context.identities["train"],
            evaluate=context.identities.get("evaluate"),
            model=context.model,
            model_pin=context.statuses["prepare"].model_pin,
            datasets=tuple(
                recipe_from(dataset, DatasetSource) for dataset in context.datasets
            ),
            recipe=recipe_from(self, PushRecipe),
            lineage=lineage(context),
            tracking=context.tracking,
        )

    @override
    def published_uris(self) -> tuple[str, ...]:
        return tuple(target.uri for target in self.targets)

    @override
    def adopted_result(self, uri: str, digest: str, identity: str) -> PushResult | None:
        targets = [target for target in self.targets if _is_below(uri, target.uri)]
        if not targets:
            return None
        # A target may lie in the folder of another target.
        target = max(targets, key=lambda target: len(target.uri))
        model = PublishedTarget(
            target=target.uri,
            uri=uri,
            format=target.format,
            digest=digest,
            size=0,
        )
        return PushResult(identity=identity, digest=digest, published=(model,))


def _is_below(uri: str, target: str) -> bool:
    """Return whether a URI is a target, a place below it, or a version of it."""
    rest = uri.removeprefix(target)
    return uri.startswith(target) and rest[:1] in {"", "/", "@", ":"}


def lineage(context: ConfigContext) -> Lineage:
    """Return the interruptions of the training run, and the costs of the pipeline so far, for the model card."""
    train = context.statuses["train"]
    costs = context.costs()
    money: dict[str, str] = {}
    if costs:
        amounts = {
            "spent": costs.spent,
            "lost": costs.lost,
            "on_demand": costs.on_demand,
        }
        # Rounded to cents: the card is for readers, and the status keeps the exact amounts.
        money = {
            name: f"{amount:.2f} {costs.currency}" for name, amount in amounts.items()
        }
    return Lineage(
        pipeline=context.pipeline,
        interruptions=train.interruptions,
        lost_steps=train.lost_steps,
        lost_seconds=round(train.lost_seconds, 3),
        **money,
    )
