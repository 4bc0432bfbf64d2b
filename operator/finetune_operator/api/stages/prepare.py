"""The prepare stage: tokenize and pack the data sets."""

from typing import ClassVar

from typing_extensions import override

from finetune_operator.api.rules import Rule
from finetune_operator.api.stages.base import (
    ARGS_NEED_COMMAND,
    ONE_GPU,
    ConfigContext,
    StageSpec,
    recipe_from,
)
from finetune_operator.api.stages.train import Train
from finetune_trainer.contract import (
    DatasetSource,
    EvaluateRecipe,
    PrepareConfig,
    PrepareRecipe,
    PushRecipe,
    TrainRecipe,
    Validation,
)
from finetune_trainer.contract.recipes import Dtype


class Prepare(StageSpec, PrepareRecipe):
    """Tokenizes the data sets and packs them into rows."""

    name: ClassVar[str] = "prepare"
    condition: ClassVar[str] = "Prepared"
    pool: ClassVar[str] = "control"
    rules: ClassVar[tuple[Rule, ...]] = (ARGS_NEED_COMMAND, ONE_GPU)

    @override
    def config(self, context: ConfigContext) -> PrepareConfig:
        # The objective decides how records become rows. The adapter is pinned here, before any attempt trains.
        train = context.specs.get(Train.name)
        training = None
        if isinstance(train, Train) and not train.pod.command:
            training = recipe_from(train, TrainRecipe)
        return PrepareConfig(
            identity="",
            seed=context.seed,
            model=context.model,
            datasets=tuple(
                recipe_from(dataset, DatasetSource) for dataset in context.datasets
            ),
            validation=recipe_from(context.validation, Validation),
            objective=train.objective if isinstance(train, Train) else "SFT",
            start_from=train.start_from if isinstance(train, Train) else None,
            recipe=recipe_from(self, PrepareRecipe),
            training=training,
            held_out=_measures_held_out(context.specs.get("evaluate")),
            published_dtype=_published_dtype(context.specs.get("push")),
        )

    @override
    def source_uris(self) -> tuple[str, ...]:
        uri = self.chat_template_uri
        if uri is None:
            return ()
        return (uri,)


def _published_dtype(push: StageSpec | None) -> Dtype | None:
    """Return the data type in which push of the trainer publishes merged weights; None if it publishes none."""
    if not isinstance(push, PushRecipe) or push.pod.command:
        return None
    return push.merged_dtype


def _measures_held_out(evaluate: StageSpec | None) -> bool:
    """Return whether evaluate of the trainer measures the validation records."""
    return (
        isinstance(evaluate, EvaluateRecipe)
        and not evaluate.pod.command
        and evaluate.has_held_out
    )
