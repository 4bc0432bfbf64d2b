"""What a user may ask for."""

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
    """The volume where stages keep their work. On a laptop it is a folder, and only existingClaim means something."""

    size: Quantity = "100Gi"
    """Of the claim that the operator makes. Raised, the claim grows, where its class allows that; it never shrinks."""

    storage_class_name: Annotated[str, StringConstraints(min_length=1, max_length=253)] | None = None
    """Absent: the cluster's default. A claim that is there keeps its class; Ready says so if another is asked for."""

    access_mode: Literal["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"] = "ReadWriteOnce"
    """ReadWriteMany lets the next attempt start on another node at once. A claim that is there keeps its."""

    existing_claim: ObjectName | None = None
    """Use this claim in place of one of the operator's own; one pipeline at a time works on it."""

    when_deleted: Literal["Retain", "Delete"] = "Retain"
    """Whether the operator's claim goes with the pipeline; retained, a new pipeline of this name finds its work."""


def _needs_gate(stage: str) -> Rule:
    return Rule(
        field=f"{stage}.when",
        message=f"GatePassed needs a gate: add evaluate.gate, or set {stage}.when to Always",
        cel=f"!has(self.{stage}) || self.{stage}.when != 'GatePassed'"
        " || (has(self.evaluate) && has(self.evaluate.gate))",
        is_valid=lambda data: data.get(stage, {}).get("when") != "GatePassed" or "gate" in data.get("evaluate", {}),
    )


class PipelineSpec(WithRules):
    """From a base model and a data set to a model that is published and served."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="deploy",
            message="needs push: what is served is the published model; add push.target",
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
    """The only source of randomness in all stages."""

    workspace: Workspace = Workspace()
    """The volume where stages keep their work."""

    prepare: Prepare = Prepare()
    """Turns the data set into packed rows of tokens, once."""

    train: Train = Train()
    """Trains the LoRA adapter; made to be interrupted."""

    evaluate: Evaluate | None = None
    """Measures the adapter. Absent: nothing is measured, and there is no gate."""

    push: Push | None = None
    """Publishes the merged model. Absent: the adapter stays in the workspace."""

    deploy: Deploy | None = None
    """Serves the published model. Absent: nothing is served."""

    suspend: bool = False
    """Stop what is running, as an eviction would, and start nothing until this is false again."""

    active_deadline_seconds: int | None = Field(default=None, ge=1, le=31_536_000)
    """How long all stages together may run; time spent waiting does not count."""

    ttl_seconds_after_finished: int | None = Field(default=None, ge=0, le=315_360_000)
    """In a cluster: how long after its end the pipeline is deleted, and its Jobs with it. Absent: never."""

    def stage(self, name: str) -> StageSpec | None:
        """Give a stage's spec, or None where it was not asked for."""
        found: StageSpec | None = getattr(self, name)
        return found

    def stages(self) -> dict[str, StageSpec]:
        """Give the stages that were asked for, in their order."""
        return {kind.name: stage for kind in STAGES if (stage := self.stage(kind.name))}

    def source_uris(self) -> tuple[str, ...]:
        """Give the URIs of everything that the stages read and did not make themselves."""
        read = (uri for stage in self.stages().values() for uri in stage.source_uris())
        return (self.model.uri, self.dataset.uri, *read)


def _stage_type(annotation: Any) -> type[StageSpec] | None:
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, StageSpec):
            return kind
    return None


STAGES: tuple[type[StageSpec], ...] = tuple(
    kind for field in PipelineSpec.model_fields.values() if (kind := _stage_type(field.annotation))
)
"""All stages in the order of their fields above, which is the order they run in."""
