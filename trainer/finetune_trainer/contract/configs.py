"""What one stage's process is told: the JSON in FINETUNE_CONFIG.

A config holds URIs and identities, never paths: where things are mounted is the environment's business,
so that the same config is good on a laptop and in a cluster.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter

from finetune_trainer.contract.recipes import (
    Checkpoint,
    ContractModel,
    DatasetSource,
    DeployRecipe,
    EvaluateRecipe,
    ModelSource,
    PrepareRecipe,
    PushRecipe,
    TrainRecipe,
)

RESULTS_VERSION = 1
"""Part of every identity; raised when the trainer makes other results from the same config."""


class StageConfig(ContractModel):
    """Common to all stages."""

    non_identity_fields: ClassVar[frozenset[str]] = frozenset()
    """Names of fields that say how the stage runs and cannot change what it makes; left out of the identity."""

    identity: str
    """Names the result before it exists: 16 hex digits over everything that determines it."""

    seed: int = 0
    """The only source of randomness."""

    def strings(self) -> frozenset[str]:
        """Give every string in the config; its URIs are among them."""
        return frozenset(_strings(self.model_dump()))


def _strings(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for inner in value.values():
                yield from _strings(inner)
        case list() | tuple():
            for inner in value:
                yield from _strings(inner)
        case _:
            pass


class PrepareConfig(StageConfig):
    """Tokenise and pack the data set."""

    stage: Literal["prepare"] = "prepare"
    model: ModelSource
    dataset: DatasetSource
    recipe: PrepareRecipe


class TrainConfig(StageConfig):
    """Train the adapter on what `prepare` packed."""

    non_identity_fields: ClassVar[frozenset[str]] = frozenset({"checkpoint"})

    stage: Literal["train"] = "train"
    prepare: str
    """Identity of the prepare stage whose rows are used."""
    model: ModelSource
    recipe: TrainRecipe
    checkpoint: Checkpoint


class EvaluateConfig(StageConfig):
    """Measure the adapter that `train` made."""

    stage: Literal["evaluate"] = "evaluate"
    train: str
    """Identity of the train stage whose adapter is measured."""
    model: ModelSource
    recipe: EvaluateRecipe
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Numbers of the weights that are measured, as they are going to be pushed; auto: as the base model is stored."""


class Lineage(ContractModel):
    """What the model card says about the run; not part of what is pushed, so not of its identity."""

    pipeline: str
    """namespace/name of the FineTunePipeline."""
    interruptions: int = 0
    """How often training was interrupted."""
    lost_steps: int = 0
    """Optimizer steps that had to be done again."""
    lost_seconds: float = 0.0
    """What those steps had taken."""


class PushConfig(StageConfig):
    """Merge the adapter into the base model and publish it."""

    non_identity_fields: ClassVar[frozenset[str]] = frozenset({"lineage"})

    stage: Literal["push"] = "push"
    prepare: str
    """Identity of the prepare stage, for the model card."""
    train: str
    """Identity of the train stage whose adapter is merged."""
    evaluate: str | None = None
    """Identity of the evaluate stage whose scores go into the model card, if there was one."""
    model: ModelSource
    dataset: DatasetSource
    recipe: PushRecipe
    lineage: Lineage


class DeployConfig(StageConfig):
    """Serve what `push` published and ask it once."""

    non_identity_fields: ClassVar[frozenset[str]] = frozenset({"digest"})  # it follows from `push`

    stage: Literal["deploy"] = "deploy"
    push: str
    """Identity of the push stage whose model is served."""
    model: ModelSource
    """The pushed model's place."""
    digest: str | None = None
    """Of the model that `push` published; absent: it has not yet."""
    recipe: DeployRecipe


AnyConfig = Annotated[
    PrepareConfig | TrainConfig | EvaluateConfig | PushConfig | DeployConfig, Field(discriminator="stage")
]

_any_config: TypeAdapter[AnyConfig] = TypeAdapter(AnyConfig)


def parse_config(text: str) -> AnyConfig:
    """Raise pydantic.ValidationError where the text is not the JSON of a stage's config."""
    return _any_config.validate_json(text)
