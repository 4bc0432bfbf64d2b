"""Configuration of a stage's process: the JSON in FINETUNE_CONFIG.

A config holds URIs and identities, never paths. Mount points are part of the environment, so the same config
works in a local run and in a cluster.
"""

from collections.abc import Collection, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter
from typing_extensions import override

from finetune_trainer.contract.datasets import DatasetSource, Validation
from finetune_trainer.contract.models import ContractModel
from finetune_trainer.contract.recipes import (
    AdapterSource,
    Checkpoint,
    DeployRecipe,
    Dtype,
    EvaluateRecipe,
    ModelSource,
    Objective,
    PrepareRecipe,
    PushRecipe,
    Samples,
    TrainRecipe,
)
from finetune_trainer.contract.tracking import Tracking, tracked_uris

# Increment it when the trainer produces different results from the same config, so that no older result is reused.
RESULTS_VERSION = 6
"""Part of every identity."""


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

    def written_uris(self) -> frozenset[str]:
        """Return the URIs that the stage writes to. It only reads all others."""
        return frozenset()

    def uses_bitsandbytes(self) -> bool:
        """Return whether the stage computes with weights or optimizer states of 4 or 8 bits."""
        return False


# All strings, and no list of the fields that hold URIs: a new field cannot be missing from it.
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
    """Config of the stage that tokenizes and packs the data sets."""

    # They only let prepare refuse what cannot work, before a training waits for a GPU.
    non_identity_fields: ClassVar[frozenset[str]] = frozenset(
        {"training", "held_out", "published_dtype"}
    )

    stage: Literal["prepare"] = "prepare"
    model: ModelSource
    datasets: tuple[DatasetSource, ...] = Field(min_length=1)
    validation: Validation = Validation(fraction=0.05)
    objective: Objective = "SFT"
    """Objective of the training, which determines what records must have."""
    start_from: AdapterSource | None = None
    """The adapter that training starts from. As for the model, prepare determines its content once."""
    recipe: PrepareRecipe
    training: TrainRecipe | None = None
    """The recipe of the training, whose settings prepare checks; None if a program of the user trains."""
    held_out: bool = False
    """Whether evaluate measures the validation rows, so that there must be some."""
    published_dtype: Dtype | None = None
    """Data type in which push publishes merged weights, which must all be finite in it; None if it publishes none."""


class TrainConfig(StageConfig):
    """Config of the stage that trains the adapter on the packed rows of `prepare`."""

    # Training resumes exactly from any checkpoint, so they do not affect the result.
    non_identity_fields: ClassVar[frozenset[str]] = frozenset(
        {"checkpoint", "samples", "tracking"}
    )

    stage: Literal["train"] = "train"
    prepare: str
    """Identity of the prepare stage whose rows are read."""
    model: ModelSource
    # The URI may lead to another model by now. The pins and digests refuse it before the first step.
    model_pin: str | None = None
    """Content of the model at its store, from the result of `prepare`; None if it is unknown or not in a store."""
    model_digest: str | None = None
    """Digest of the base model, from the result of `prepare`; None if there is no result yet or it has no digest."""
    start_pin: str | None = None
    """As `model_pin`, but for the adapter that training starts from."""
    start_digest: str | None = None
    """As `model_digest`, but for the adapter that training starts from."""
    recipe: TrainRecipe
    checkpoint: Checkpoint
    samples: Samples | None = None
    tracking: Tracking | None = None

    @override
    def written_uris(self) -> frozenset[str]:
        return tracked_uris(self.tracking)

    @override
    def uses_bitsandbytes(self) -> bool:
        return (
            self.recipe.method == "QLoRA" or self.recipe.optimizer.name == "AdamW8Bit"
        )


class GatedMetric(ContractModel):
    """A score that a gate of the pipeline compares."""

    task: str
    metric: str
    """Name of the metric in lm-eval, with or without its filter."""

    def is_measured(self, names: Collection[str]) -> bool:
        """Return whether the score is among the names of a task's scores."""
        # A gate may name acc,none although lm-eval reports acc.
        plain_name, _, _ = self.metric.partition(",")
        return self.metric in names or plain_name in names


class EvaluateConfig(StageConfig):
    """Config of the stage that evaluates the adapter of `train`."""

    # The gates only let the stage refuse a task that does not measure what they compare.
    non_identity_fields: ClassVar[frozenset[str]] = frozenset({"gated", "tracking"})

    stage: Literal["evaluate"] = "evaluate"
    prepare: str
    """Identity of the prepare stage; its result says whether the training records are conversations."""
    train: str
    """Identity of the train stage whose adapter is evaluated."""
    model: ModelSource
    model_pin: str | None = None
    """As in train."""
    recipe: EvaluateRecipe
    dtype: Literal["Auto", "BF16", "FP16", "FP32"] = "Auto"
    """Data type of the evaluated weights, the same as when they are pushed; Auto: the base model's stored data type.
    The base model is evaluated in the same type."""
    training: TrainRecipe | None = None
    """The recipe of the training, whose loss held_out measures; None without this task."""
    gated: tuple[GatedMetric, ...] = ()
    """The scores that gates compare; the stage ends at once if a task does not measure them."""
    tracking: Tracking | None = None

    @override
    def written_uris(self) -> frozenset[str]:
        return tracked_uris(self.tracking)


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
    spent: str | None = None
    """Cost of all attempts before the push, with its currency. Absent without prices."""
    lost: str | None = None
    """The part of this cost that interruptions wasted."""
    on_demand: str | None = None
    """What the same work costs on on-demand nodes."""


class PushConfig(StageConfig):
    """Config of the stage that merges the adapter into the base model and publishes the merged model."""

    non_identity_fields: ClassVar[frozenset[str]] = frozenset({"lineage", "tracking"})

    stage: Literal["push"] = "push"
    prepare: str
    """Identity of the prepare stage, for the model card."""
    train: str
    """Identity of the train stage whose adapter is merged."""
    evaluate: str | None = None
    """Identity of the evaluate stage whose scores go into the model card; None if the pipeline has no such stage."""
    model: ModelSource
    model_pin: str | None = None
    """As in train."""
    datasets: tuple[DatasetSource, ...]
    """The data sets, for the model card."""
    recipe: PushRecipe
    lineage: Lineage
    tracking: Tracking | None = None

    @override
    def written_uris(self) -> frozenset[str]:
        targets = frozenset(target.uri for target in self.recipe.targets)
        return targets | tracked_uris(self.tracking)


class DeployConfig(StageConfig):
    """Config of the stage that serves the model published by `push` and sends it a prompt."""

    # The identity in `push` determines all, and they are known only when `push` has a result.
    non_identity_fields: ClassVar[frozenset[str]] = frozenset(
        {"location", "digest", "conversations"}
    )

    stage: Literal["deploy"] = "deploy"
    push: str
    """Identity of the push stage whose model is served."""
    model: ModelSource
    """Target of push that holds the merged model."""
    location: str | None = None
    """Location of exactly this model in the target; None: `push` has no result yet."""
    digest: str | None = None
    """Digest of the model published by `push`; None: `push` has no result yet."""
    conversations: bool = False
    """Whether the training records are conversations, so that the prompt is sent as a message."""
    recipe: DeployRecipe


AnyConfig = Annotated[
    PrepareConfig | TrainConfig | EvaluateConfig | PushConfig | DeployConfig,
    Field(discriminator="stage"),
]

_any_config: TypeAdapter[AnyConfig] = TypeAdapter(AnyConfig)


def parse_config(text: str) -> AnyConfig:
    """Parse the JSON of any stage's config; raise pydantic.ValidationError if it is invalid."""
    return _any_config.validate_json(text)
