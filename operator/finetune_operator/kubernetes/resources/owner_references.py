"""Owner references between a pipeline and its children: pure."""

from typing import Any

from finetune_operator.api.group import API_VERSION, KIND
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
