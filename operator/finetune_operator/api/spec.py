"""The spec of a FineTunePipeline: everything that the user may request."""

import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AwareDatetime, Field

from finetune_operator.api.datasets import Dataset, ValidationSet
from finetune_operator.api.names import ObjectName
from finetune_operator.api.rules import Rule, WithRules
from finetune_operator.api.stages.base import ONE_DEFAULT_GPU, StageSpec
from finetune_operator.api.stages.deploy import Deploy
from finetune_operator.api.stages.evaluate import Evaluate
from finetune_operator.api.stages.held_out import HELD_OUT_SPEC_RULES
from finetune_operator.api.stages.ignored_fields import (
    CLAIM_ACCESS_MODE,
    CLAIM_SIZE,
    IGNORED_IN_SPEC,
    IGNORED_WITH_CLAIM,
)
from finetune_operator.api.stages.pod import BYTES, PodDefaults, StorageSize
from finetune_operator.api.stages.prepare import Prepare
from finetune_operator.api.stages.push import Push
from finetune_operator.api.stages.train import Train
from finetune_trainer.contract import ModelSource, Tracking


def not_stored(schema: dict[str, Any]) -> None:
    """Remove the default of a field from its schema: the model fills it in, and the API server does not store it."""
    schema.pop("default", None)


class Workspace(WithRules):
    """The volume for the files of all stages. A local run uses a folder and reads only existingClaim."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="size",
            message="is less than a megabyte; write 50Gi for gibibytes or 50G for gigabytes",
            cel=f"!has(self.size) || string(self.size).matches('{BYTES}')",
            is_valid=lambda data: bool(re.match(BYTES, data.get("size", CLAIM_SIZE))),
        ),
        *IGNORED_WITH_CLAIM,
    )

    # No defaults in the schema: the API server would store them beside existingClaim, which ignores them.
    size: StorageSize | None = None
    """Size of the claim that the operator creates. It can grow if the storage class allows it, and never shrinks.
    Absent: 50Gi."""

    storage_class_name: ObjectName | None = None
    """Storage class of the claim. Absent: the default. The operator's claim keeps its class; Ready reports a
    mismatch."""

    access_mode: (
        Literal["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"] | None
    ) = None
    """Access mode of the claim. ReadWriteMany lets the next attempt start on another node at once. Absent:
    ReadWriteOnce."""

    existing_claim: ObjectName | None = None
    """Name of an existing claim to use; the operator then creates no claim, and refuses the fields that describe
    its own. Pipelines on the same claim run in turn."""

    keep_unused: int | None = Field(default=None, ge=0, le=1000)
    """Results of earlier edits that stay. When a stage starts, the trainer deletes results of the stages up to it that
    the pipeline no longer uses, but not the newest finished ones of each stage, nor as many unfinished ones.
    Absent: 1."""

    when_deleted: Literal["Retain", "Delete"] | None = None
    """What happens to the operator's claim when the pipeline is deleted. Retain: a new pipeline of the same name reuses
    its results. Absent: Retain."""

    @property
    def unused_kept(self) -> int:
        """The number of unused results of a stage that stay."""
        return 1 if self.keep_unused is None else self.keep_unused

    @property
    def claim_size(self) -> str:
        """The size of the operator's claim."""
        return self.size or CLAIM_SIZE

    @property
    def claim_access_mode(self) -> str:
        """The access mode of the operator's claim."""
        return self.access_mode or CLAIM_ACCESS_MODE


SHARED_WORKSPACE = Rule(
    field="train.nodes",
    message="all nodes mount the workspace: set workspace.accessMode to ReadWriteMany, or workspace.existingClaim to"
    " a claim that has it",
    cel="!has(self.train) || !has(self.train.nodes) || self.train.nodes == 1 || (has(self.workspace)"
    " && (has(self.workspace.existingClaim)"
    " || (has(self.workspace.accessMode) && self.workspace.accessMode == 'ReadWriteMany')))",
    is_valid=lambda data: (
        data["train"]["nodes"] == 1
        or "existingClaim" in data["workspace"]
        or data["workspace"].get("accessMode") == "ReadWriteMany"
    ),
)


def _needs_gate(stage: str) -> Rule:
    return Rule(
        field=f"{stage}.when",
        message=f"GatesPassed needs a gate: add evaluate.gates, or set {stage}.when to Always",
        # The subresource scale adds a deploy to which the API server adds no default.
        cel=f"!has(self.{stage}) || (has(self.{stage}.when) && self.{stage}.when != 'GatesPassed')"
        " || (has(self.evaluate) && has(self.evaluate.gates) && size(self.evaluate.gates) > 0)",
        is_valid=lambda data: (
            data.get(stage, {}).get("when") != "GatesPassed"
            or bool(data.get("evaluate", {}).get("gates"))
        ),
    )


def _readable_by_pods(field: str, schemes: str, values: str, advice: str) -> Rule:
    """Return the rule that a cluster accepts URIs of these schemes only. In the CEL of `values`, $ judges a `uri`."""
    # No "..": a path of a volume must not leave the volume. No organisation of the hub is called datasets.
    readable = (
        f"uri.matches('^({schemes})://')"
        " && !uri.matches('/[.][.](/|$)|^hf://(datasets|models|spaces)/')"
    )
    return Rule(
        field=field,
        message=f"a pod cannot read this path: {advice}",
        cel=values.replace("$", readable),
    )


def _no_adapter(
    field: str, cel: str, uses_adapter: Callable[[Mapping[str, Any]], bool]
) -> Rule:
    """Return the rule that nothing asks for the adapter of method Full. `cel` is true if something does."""
    return Rule(
        field=field,
        message="train.method Full trains no adapter: set Merged, or set train.method to LoRA or QLoRA",
        cel=f"!has(self.train) || !has(self.train.method) || self.train.method != 'Full' || !({cel})",
        is_valid=lambda data: (
            data["train"]["method"] != "Full" or not uses_adapter(data)
        ),
    )


# Without file: no file of the user's machine is in a pod.
STORES = "hf|s3|gs|az|oci|pvc"
CLUSTER_RULES = (
    _readable_by_pods(
        "model.uri",
        STORES,
        "[self.model.uri].all(uri, $)",
        "a hub model is hf://ORG/NAME, a volume pvc://CLAIM/PATH",
    ),
    _readable_by_pods(
        "datasets",
        f"{STORES}|https?",
        "self.datasets.map(one, one.uri).all(uri, $)",
        "a hub data set is hf://ORG/NAME, a volume pvc://CLAIM/PATH",
    ),
    _readable_by_pods(
        "validation.uri",
        f"{STORES}|https?",
        "!has(self.validation) || !has(self.validation.uri) || [self.validation.uri].all(uri, $)",
        "a hub data set is hf://ORG/NAME, a volume pvc://CLAIM/PATH",
    ),
    _readable_by_pods(
        "train.startFrom.uri",
        STORES,
        "!has(self.train) || !has(self.train.startFrom) || [self.train.startFrom.uri].all(uri, $)",
        "a hub adapter is hf://ORG/NAME, a volume pvc://CLAIM/PATH",
    ),
    _readable_by_pods(
        "prepare.chatTemplate",
        "pvc",
        "!has(self.prepare) || !has(self.prepare.chatTemplate) || self.prepare.chatTemplate.matches('[{][{%]')"
        " || [self.prepare.chatTemplate].all(uri, $)",
        "put the file on a volume, pvc://CLAIM/PATH, or its text into the manifest",
    ),
    _readable_by_pods(
        "evaluate.tasks",
        "pvc",
        "!has(self.evaluate) || self.evaluate.tasks.filter(one, has(one.file)).map(one, one.file).all(uri, $)",
        "put the task file on a volume, pvc://CLAIM/PATH",
    ),
    _readable_by_pods(
        "push.targets",
        STORES,
        "!has(self.push) || self.push.targets.map(one, one.uri).all(uri, $)",
        "publish to hf://ORG/NAME, s3://BUCKET/PATH, oci://HOST/REPOSITORY or pvc://CLAIM/PATH",
    ),
    _readable_by_pods(
        "tracking.tensorboard.uri",
        "pvc",
        "!has(self.tracking) || !has(self.tracking.tensorboard) || !has(self.tracking.tensorboard.uri)"
        " || [self.tracking.tensorboard.uri].all(uri, $)",
        "write to a volume, pvc://CLAIM/PATH",
    ),
)
"""Rules for the API server. A local run also reads paths of this machine."""
HAS_ALIAS = "(has(self.tracking) && has(self.tracking.mlflow) && has(self.tracking.mlflow.alias))"
# MLflow has these names for versions itself, in any case of the letters.
RESERVED_ALIAS = "^([lL][aA][tT][eE][sS][tT]|[vV][0-9]+)$"


def _alias(data: Mapping[str, Any]) -> str:
    """Return tracking.mlflow.alias of a spec, or an empty text."""
    return str(data.get("tracking", {}).get("mlflow", {}).get("alias", ""))


class PipelineSpec(WithRules):
    """A pipeline that fine-tunes a base model on data sets, evaluates, publishes and serves the result."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *CLUSTER_RULES,
        Rule(
            field="deploy",
            message="needs a published model: add an entry with format Merged to push.targets",
            cel="!has(self.deploy) || (has(self.push) && self.push.targets.exists(target, "
            "!has(target.format) || target.format == 'Merged'))",
            is_valid=lambda data: (
                "deploy" not in data
                or any(
                    target["format"] == "Merged"
                    for target in data.get("push", {}).get("targets", ())
                )
            ),
        ),
        ONE_DEFAULT_GPU,
        SHARED_WORKSPACE,
        _no_adapter(
            "evaluate.weights",
            "has(self.evaluate) && has(self.evaluate.weights) && self.evaluate.weights == 'Adapter'",
            lambda data: data.get("evaluate", {}).get("weights") == "Adapter",
        ),
        _no_adapter(
            "push.targets",
            "has(self.push) && self.push.targets.exists(target, has(target.format) && target.format == 'Adapter')",
            lambda data: any(
                target["format"] == "Adapter"
                for target in data.get("push", {}).get("targets", ())
            ),
        ),
        *HELD_OUT_SPEC_RULES,
        _needs_gate("push"),
        _needs_gate("deploy"),
        *IGNORED_IN_SPEC,
        Rule(
            field="whenExpired",
            message="has no effect without a time: add ttlSecondsAfterFinished, or remove whenExpired",
            reason="FieldValueForbidden",
            cel="!has(self.whenExpired) || has(self.ttlSecondsAfterFinished)",
            is_valid=lambda data: (
                "whenExpired" not in data or "ttlSecondsAfterFinished" in data
            ),
        ),
        Rule(
            field="whenExpired",
            message="Delete would delete the server of deploy with the pipeline: set Retain, or remove deploy",
            reason="FieldValueForbidden",
            cel="!has(self.whenExpired) || self.whenExpired != 'Delete' || !has(self.deploy)",
            is_valid=lambda data: (
                data.get("whenExpired") != "Delete" or "deploy" not in data
            ),
        ),
        Rule(
            field="tracking.mlflow.alias",
            message="names a version of a registered model: add registeredModel, or remove alias",
            cel=f"!{HAS_ALIAS} || has(self.tracking.mlflow.registeredModel)",
            is_valid=lambda data: (
                not _alias(data) or "registeredModel" in data["tracking"]["mlflow"]
            ),
        ),
        Rule(
            field="tracking.mlflow.alias",
            message="MLflow reserves latest, and v with a number: choose another alias, such as champion",
            cel=f"!{HAS_ALIAS} || !self.tracking.mlflow.alias.matches('{RESERVED_ALIAS}')",
            is_valid=lambda data: not re.search(RESERVED_ALIAS, _alias(data)),
        ),
    )

    model: ModelSource
    """The base model."""

    datasets: tuple[Dataset, ...] = Field(min_length=1, max_length=64)
    """The training records: data sets, read in this order."""

    # The API server must not store it: no manager owns a stored fraction, so it would stay beside a later `uri`.
    validation: ValidationSet = Field(
        default=ValidationSet(fraction=0.05), json_schema_extra=not_stored
    )
    """Records to measure the validation loss: a fraction of each data set, or a data set of their own. Absent: a
    fraction of 0.05."""

    pod_defaults: PodDefaults | None = None
    """Defaults of the pods of all stages, below the stages' own pods."""

    seed: int = Field(default=0, ge=0, le=2**31 - 1)
    """Random seed of all stages."""

    workspace: Workspace = Workspace()
    """The volume for the files of all stages. A local run uses a folder and reads only existingClaim."""

    # The order of the stages below is their execution order.
    prepare: Prepare = Prepare()
    """Tokenizes the data sets and packs them into rows."""

    train: Train = Train()
    """Trains an adapter, or all weights. Resumes from a checkpoint after an interruption."""

    evaluate: Evaluate | None = None
    """Evaluates the trained model. Absent: no evaluation and no gate."""

    push: Push | None = None
    """Publishes the model, or the adapter alone, to each target. Absent: the trained weights stay in the workspace."""

    deploy: Deploy | None = None
    """Serves the published model. Absent: no server."""

    tracking: Tracking | None = None
    """Experiment trackers that get the metrics of train, the scores of evaluate and the model of push. A change reruns
    no stage. Absent: the metrics are only in the workspace, in metrics.jsonl of the train stage."""

    suspend: bool = False
    """Stops the running attempt as an eviction would, and starts none until this is false. Servers keep running."""

    max_runtime_seconds: int | None = Field(default=None, ge=1, le=31_536_000)
    """Limit for the running time of all attempts of all stages together. Waiting time does not count."""

    deadline: (
        Annotated[AwareDatetime, Field(json_schema_extra={"maxLength": 64})] | None
    ) = None
    """Time at which all stages should be done, such as 2030-01-31T08:00:00Z. Stages with capacity Auto run on on-demand
    nodes if an interruption could miss the deadline. The deadline stops nothing."""

    ttl_seconds_after_finished: int | None = Field(default=None, ge=0, le=315_360_000)
    """On a cluster: time after the pipeline's end at which its Jobs are deleted, with their pods and logs. The pipeline
    stays as the record, and so does its server. Absent: never."""

    when_expired: Literal["Retain", "Delete"] | None = None
    """What happens to the pipeline when ttlSecondsAfterFinished has passed. Retain keeps it. Delete deletes it, too; a
    pipeline with deploy may not ask for this. Absent: Retain."""

    def stage(self, name: str) -> StageSpec | None:
        """Return the spec of a stage with the defaults below its pod, or None if it is not requested."""
        return self._stages.get(name)

    def stages(self) -> dict[str, StageSpec]:
        """Return the requested stages by name, in execution order."""
        return dict(self._stages)

    @cached_property
    def _stages(self) -> dict[str, StageSpec]:
        specs = {kind.name: getattr(self, kind.name) for kind in STAGES}
        return {
            name: stage.over(self.pod_defaults)
            for name, stage in specs.items()
            if stage
        }

    def source_uris(self) -> tuple[str, ...]:
        """Return the URIs of all external inputs of the stages."""
        of_stages = (
            uri for stage in self.stages().values() for uri in stage.source_uris()
        )
        datasets = (dataset.uri for dataset in self.datasets)
        validation = (self.validation.uri,) if self.validation.uri else ()
        return (self.model.uri, *datasets, *validation, *of_stages)


def _stage_type(annotation: Any) -> type[StageSpec] | None:
    # An optional stage is annotated Stage | None, so its type is among the arguments.
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, StageSpec):
            return kind
    return None


_TYPES = (_stage_type(field.annotation) for field in PipelineSpec.model_fields.values())
STAGES: tuple[type[StageSpec], ...] = tuple(kind for kind in _TYPES if kind)
"""All stages in the order of their fields above, which is their execution order."""
