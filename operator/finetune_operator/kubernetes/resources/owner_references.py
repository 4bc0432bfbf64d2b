"""Who owns what: pure."""

from typing import Any

from finetune_operator.api.group import API_VERSION, KIND
from finetune_operator.core.pipeline import Pipeline


def owner_reference(pipeline: Pipeline) -> dict[str, Any]:
    """Refer to the pipeline as the owner of what goes when it goes."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": pipeline.key.name,
        "uid": pipeline.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def owner_references(pipeline: Pipeline) -> list[dict[str, Any]]:
    """Give metadata.ownerReferences."""
    return [owner_reference(pipeline)]


def is_owned_by(pipeline: Pipeline, found: dict[str, Any]) -> bool:
    """Tell whether an object was made for this very pipeline, and not for an earlier one of the same name."""
    return any(ref["uid"] == pipeline.uid for ref in found["metadata"].get("ownerReferences", []))
