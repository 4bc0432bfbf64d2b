"""Configuration of a stage's process: the JSON in FINETUNE_CONFIG.

A config holds URIs and identities, never paths. Mount points are part of the environment, so the same config
works in a local run and in a cluster.
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

RESULTS_VERSION = 2
"""Part of every identity. Increment it when the trainer produces different results from the same config."""


class StageConfig(ContractModel):
    """Fields common to all stages."""

    non_identity_fields: ClassVar[frozenset[str]] = frozenset()
    """Names of fields that do not affect the result; they are left out of the identity."""

    identity: str
    """Identity of the result: 16 hex digits of a hash of everything that determines the result."""

    seed: int = 0
    """Seed of every random choice; there is no other source of randomness."""

    def strings(self) -> frozenset[str]:
        """Return every string in the config, at any depth; all URIs are among them."""
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
    """Config of the stage that tokenizes and packs the data set."""

    stage: Literal["prepare"] = "prepare"
    model: ModelSource
    dataset: DatasetSource
    recipe: PrepareRecipe


class TrainConfig(StageConfig):
    """Config of the stage that trains the adapter on the packed rows of `prepare`."""

    non_identity_fields: ClassVar[frozenset[str]] = frozenset({"checkpoint"})

    stage: Literal["train"] = "train"
    prepare: str
    """Identity of the prepare stage whose rows are read."""
    model: ModelSource
    model_digest: str | None = None
    """Digest of the base model, from the result of `prepare`; None: `prepare` has no result yet, or did not say."""
    recipe: TrainRecipe
    checkpoint: Checkpoint


class EvaluateConfig(StageConfig):
    """Config of the stage that evaluates the adapter of `train`."""

    stage: Literal["evaluate"] = "evaluate"
    prepare: str
    """Identity of the prepare stage, whose result says whether the training records are conversations."""
    train: str
    """Identity of the train stage whose adapter is evaluated."""
    model: ModelSource
    recipe: EvaluateRecipe
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Data type of the evaluated weights, the same as when they are pushed; auto: the base model's stored data type.
    The base model is evaluated in the same one."""


class Lineage(ContractModel):
    """Facts about the run for the model card; they do not affect the pushed model, so they are not in its identity."""

    pipeline: str
    """namespace/name of the FineTunePipeline."""
    interruptions: int = 0
    """Number of interruptions of training."""
    lost_steps: int = 0
    """Optimizer steps that were repeated after interruptions."""
    lost_seconds: float = 0.0
    """Duration of the repeated steps, in seconds."""


class PushConfig(StageConfig):
    """Config of the stage that merges the adapter into the base model and publishes the merged model."""

    non_identity_fields: ClassVar[frozenset[str]] = frozenset({"lineage"})

    stage: Literal["push"] = "push"
    prepare: str
    """Identity of the prepare stage, for the model card."""
    train: str
    """Identity of the train stage whose adapter is merged."""
    evaluate: str | None = None
    """Identity of the evaluate stage whose scores go into the model card; None: the pipeline has no evaluate stage."""
    model: ModelSource
    dataset: DatasetSource
    recipe: PushRecipe
    lineage: Lineage


class DeployConfig(StageConfig):
    """Config of the stage that serves the model published by `push` and sends it one prompt."""

    non_identity_fields: ClassVar[frozenset[str]] = frozenset({"digest"})  # the identity in `push` determines it

    stage: Literal["deploy"] = "deploy"
    push: str
    """Identity of the push stage whose model is served."""
    model: ModelSource
    """Location of the pushed model."""
    digest: str | None = None
    """Digest of the model published by `push`; None: `push` has no result yet."""
    recipe: DeployRecipe


AnyConfig = Annotated[
    PrepareConfig | TrainConfig | EvaluateConfig | PushConfig | DeployConfig, Field(discriminator="stage")
]

_any_config: TypeAdapter[AnyConfig] = TypeAdapter(AnyConfig)


def parse_config(text: str) -> AnyConfig:
    """Parse the JSON of any stage's config; raise pydantic.ValidationError if it is invalid."""
    return _any_config.validate_json(text)
