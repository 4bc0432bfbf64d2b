"""The FinetunePipeline as an object of the API server: parse it, and build its status."""

from collections.abc import Iterator

from pydantic import ValidationError

from finetune_operator.api.conditions import READY
from finetune_operator.api.group import (
    ADOPT_ANNOTATION,
    API_VERSION,
    CANCEL_ANNOTATION,
    KIND,
    RETRY_ANNOTATION,
)
from finetune_operator.api.rules import STORED
from finetune_operator.api.spec import PipelineSpec
from finetune_operator.api.status import PipelineStatus
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.errors import InvalidObject, NewerObject
from finetune_operator.kubernetes.translate.api_errors import (
    describe_unknown_fields,
    describe_validation_error,
)
from finetune_operator.kubernetes.translate.object import Object

READ_ANNOTATIONS = frozenset({ADOPT_ANNOTATION, CANCEL_ANNOTATION, RETRY_ANNOTATION})
"""Annotations by which a user requests something of the operator."""


def parse_pipeline(raw: Object) -> Pipeline:
    """Parse the object. Raises InvalidObject for an object that this version of the operator cannot read.

    Raises NewerObject if it only has unknown fields: the API server has removed the fields that its CRD does not know.
    """
    meta = raw["metadata"]
    try:
        return Pipeline(
            key=Key(meta["namespace"], meta["name"]),
            uid=meta["uid"],
            generation=meta["generation"],
            # The response to a dry run may have none.
            resource_version=meta.get("resourceVersion", ""),
            annotations=meta.get("annotations") or {},
            copied_annotations=frozenset(copied_annotations(meta)),
            spec=PipelineSpec.model_validate(raw["spec"], context=STORED),
            status=PipelineStatus.model_validate(raw.get("status") or {}),
        )
    except ValidationError as error:
        # A newer version may have written fields that this version does not know.
        if all(problem["type"] == "extra_forbidden" for problem in error.errors()):
            raise NewerObject(describe_unknown_fields(error)) from error
        raise InvalidObject(describe_validation_error(error)) from error


def copied_annotations(meta: Object) -> Iterator[str]:
    """Yield the operator's annotations that an object was created with, by the times of its managed fields."""
    created = str(meta.get("creationTimestamp"))
    for entry in meta.get("managedFields") or []:
        fields = entry.get("fieldsV1") or {}
        time = str(entry.get("time"))
        # Within the second of the creation, only the client that has written the spec has created the object.
        if time < created or (time == created and "f:spec" in fields):
            annotations = (fields.get("f:metadata") or {}).get("f:annotations") or {}
            for name in READ_ANNOTATIONS:
                if f"f:{name}" in annotations:
                    yield name


def status_object(pipeline: Pipeline, status: PipelineStatus) -> Object:
    """Build the object that replaces the status; its version makes the API server refuse a stale write."""
    meta = {
        "name": pipeline.key.name,
        "namespace": pipeline.key.namespace,
        "resourceVersion": pipeline.resource_version,
    }
    content = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": meta,
        "status": content,
    }


def without_progress(status: PipelineStatus) -> PipelineStatus:
    """Return the status without progress, the only part taken unchanged from a process, which may be the user's own."""
    nothing = {"progress": None, "loss_curve": None}
    stages = {
        name: stage.model_copy(update=nothing) for name, stage in status.stages.items()
    }
    return status.model_copy(update={"stages": stages})


def is_same_report(status: Object, other: Object) -> bool:
    """Return whether two statuses report the same about an object that cannot be read: they differ in times only."""
    return _report(status) == _report(other)


def _report(status: Object) -> tuple[object, list[str]]:
    conditions = status.get("conditions") or []
    # Anyone may write a status, and its conditions have no schema.
    messages = [
        str(condition.get("message"))
        for condition in conditions
        if condition.get("type") == READY
    ]
    return status.get("observedGeneration"), messages
