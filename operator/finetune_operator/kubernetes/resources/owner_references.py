"""Owner references between a pipeline and its children: pure."""

from typing import Any

from finetune_operator.api.conditions import Reason
from finetune_operator.api.group import API_VERSION, KIND
from finetune_operator.core.observation import Blocker
from finetune_operator.core.pipeline import Pipeline


def owner_reference(pipeline: Pipeline) -> dict[str, Any]:
    """Return the reference that makes Kubernetes delete a child with its pipeline."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": pipeline.key.name,
        "uid": pipeline.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def owner_references(pipeline: Pipeline) -> list[dict[str, Any]]:
    """Return metadata.ownerReferences of a child."""
    return [owner_reference(pipeline)]


def is_owned_by_uid(uid: str, found: dict[str, Any]) -> bool:
    """Return whether the object of this uid owns an object."""
    return any(ref["uid"] == uid for ref in found["metadata"].get("ownerReferences", []))


def is_owned_by(pipeline: Pipeline, found: dict[str, Any]) -> bool:
    """Return whether an object is owned by this pipeline, and not by an earlier one of the same name."""
    return is_owned_by_uid(pipeline.uid, found)


def foreign_service(pipeline: Pipeline, found: dict[str, Any]) -> Blocker | None:
    """Return why the pipeline cannot use a Service of its name: another owner has created it. None where it can."""
    if is_owned_by(pipeline, found):
        return None
    name = found["metadata"]["name"]
    message = (
        f"the Service {name} was not created for this pipeline: delete it, or rename the pipeline"
    )
    return Blocker(Reason.DEPENDENCY_NOT_READY, message)
