"""The spec of a FineTunePipeline: everything that the user may request."""

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, StringConstraints

from finetune_operator.api.rules import Rule, WithRules
from finetune_operator.api.stages.base import ObjectName, Quantity, StageSpec
from finetune_operator.api.stages.deploy import Deploy
from finetune_operator.api.stages.evaluate import Evaluate
from finetune_operator.api.stages.prepare import Prepare
from finetune_operator.api.stages.push import Push
from finetune_operator.api.stages.train import Train
from finetune_trainer.contract import ContractModel, DatasetSource, ModelSource


class Workspace(ContractModel):
    """The volume for the files of all stages. A local run uses a folder and reads only existingClaim."""

    size: Quantity = "100Gi"
    """Size of the claim that the operator creates. It can grow if the storage class allows it, and never shrinks."""

    storage_class_name: Annotated[str, StringConstraints(min_length=1, max_length=253)] | None = None
    """Storage class of the claim. Absent: the default. An existing claim keeps its class; Ready reports a mismatch."""

    access_mode: Literal["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"] = "ReadWriteOnce"
    """Access mode of the claim. ReadWriteMany lets the next attempt start on another node at once. An existing claim
    keeps its mode."""

    existing_claim: ObjectName | None = None
    """Name of an existing claim to use; the operator then creates none. Only one pipeline at a time runs on a claim."""

    when_deleted: Literal["Retain", "Delete"] = "Retain"
    """What happens to the operator's claim when the pipeline is deleted. With Retain, a new pipeline of the same name
    reuses its results."""


def _needs_gate(stage: str) -> Rule:
    return Rule(
        field=f"{stage}.when",
        message=f"GatePassed needs a gate: add evaluate.gate, or set {stage}.when to Always",
        cel=f"!has(self.{stage}) || self.{stage}.when != 'GatePassed'"
        " || (has(self.evaluate) && has(self.evaluate.gate))",
        is_valid=lambda data: data.get(stage, {}).get("when") != "GatePassed" or "gate" in data.get("evaluate", {}),
    )


class PipelineSpec(WithRules):
    """A pipeline that fine-tunes a base model on a data set, evaluates, publishes and serves the result."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="deploy",
            message="needs push, because the published model is served: add push.target",
            cel="!has(self.deploy) || has(self.push)",
            is_valid=lambda data: "deploy" not in data or "push" in data,
        ),
        _needs_gate("push"),
        _needs_gate("deploy"),
    )

    model: ModelSource
    """The base model."""

    dataset: DatasetSource
    """The training records."""

    seed: int = Field(default=0, ge=0, le=2**31 - 1)
    """Random seed of all stages."""

    workspace: Workspace = Workspace()
    """The volume for the files of all stages. A local run uses a folder and reads only existingClaim."""

    prepare: Prepare = Prepare()
    """Tokenizes the data set and packs it into rows."""

    train: Train = Train()
    """Trains the LoRA adapter. Resumes from a checkpoint after an interruption."""

    evaluate: Evaluate | None = None
    """Evaluates the trained model. Absent: no evaluation and no gate."""

    push: Push | None = None
    """Merges the adapter into the base model and publishes it. Absent: the adapter stays in the workspace."""

    deploy: Deploy | None = None
    """Serves the published model. Absent: no server."""

    suspend: bool = False
    """Stops the running attempt as an eviction would and starts no other until this is false. Servers keep running."""

    active_deadline_seconds: int | None = Field(default=None, ge=1, le=31_536_000)
    """Limit for the running time of all attempts of all stages together. Waiting time does not count."""

    ttl_seconds_after_finished: int | None = Field(default=None, ge=0, le=315_360_000)
    """On a cluster: time after its end at which the pipeline is deleted, with its Jobs and servers. Absent: never."""

    def stage(self, name: str) -> StageSpec | None:
        """Return the spec of a stage, or None if it is not requested."""
        found: StageSpec | None = getattr(self, name)
        return found

    def stages(self) -> dict[str, StageSpec]:
        """Return the requested stages by name, in execution order."""
        return {kind.name: stage for kind in STAGES if (stage := self.stage(kind.name))}

    def source_uris(self) -> tuple[str, ...]:
        """Return the URIs of all external inputs of the stages."""
        more = (uri for stage in self.stages().values() for uri in stage.source_uris())
        return (self.model.uri, self.dataset.uri, *more)


def _stage_type(annotation: Any) -> type[StageSpec] | None:
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, StageSpec):
            return kind
    return None


STAGES: tuple[type[StageSpec], ...] = tuple(
    kind for field in PipelineSpec.model_fields.values() if (kind := _stage_type(field.annotation))
)
"""All stages in the order of their fields above, which is their execution order."""
