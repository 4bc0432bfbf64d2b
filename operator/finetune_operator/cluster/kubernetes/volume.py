"""The workspace of a pipeline as a PersistentVolumeClaim: pure."""

from dataclasses import dataclass
from typing import Any

from finetune_operator.api.group import GROUP, KIND
from finetune_operator.cluster.kubernetes.ownership import owners
from finetune_operator.labels import MANAGED_BY, MANAGER
from finetune_operator.names import workspace_name
from finetune_operator.pipeline import Pipeline

WORKSPACE_OF = f"{GROUP}/workspace-of"
"""Annotation: the pipeline that the operator made the claim for."""
WHEN_DELETED = "workspace.whenDeleted"


@dataclass(frozen=True)
class Change:
    """What an edit of the pipeline makes of a claim that is there."""

    field: str
    """That asks for it."""
    patch: dict[str, Any]


def claim_name(pipeline: Pipeline) -> str:
    """Name the claim that holds the pipeline's work."""
    return pipeline.spec.workspace.existing_claim or workspace_name(pipeline.key.name)


def claim(pipeline: Pipeline) -> dict[str, Any]:
    """Write the operator's own claim.

    Retained, it has no owner and none of the pipeline's labels: nobody prunes it together with the pipeline.
    """
    wish = pipeline.spec.workspace
    spec: dict[str, Any] = {"accessModes": [wish.access_mode], "resources": {"requests": {"storage": wish.size}}}
    if wish.storage_class_name:
        spec["storageClassName"] = wish.storage_class_name
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {
            "name": claim_name(pipeline),
            "namespace": pipeline.key.namespace,
            "labels": {MANAGED_BY: MANAGER},
            "annotations": {WORKSPACE_OF: pipeline.key.name},
            "ownerReferences": owners_wanted(pipeline),
        },
        "spec": spec,
    }


def owners_wanted(pipeline: Pipeline) -> list[dict[str, Any]]:
    """Give the claim's owners: none while it is to outlive the pipeline."""
    return owners(pipeline) if pipeline.spec.workspace.when_deleted == "Delete" else []


def mismatch(pipeline: Pipeline, found: dict[str, Any]) -> str | None:
    """Say why the claim that is there cannot be the pipeline's workspace, or None."""
    meta = found["metadata"]
    if pipeline.spec.workspace.existing_claim:
        return None
    if meta.get("annotations", {}).get(WORKSPACE_OF) != pipeline.key.name:
        return (
            f"the claim {meta['name']} exists and was not made for this pipeline: "
            "name it under workspace.existingClaim, or rename one of the two"
        )
    if meta.get("deletionTimestamp"):
        return f"the claim {meta['name']} is being deleted; a new one is made when it is gone"
    return None


def changes(pipeline: Pipeline, found: dict[str, Any]) -> list[Change]:
    """Give what is to be changed about the pipeline's own claim, so that it is what is asked for now."""
    told = found["metadata"].get("ownerReferences", [])
    wanted = [*(ref for ref in told if ref.get("kind") != KIND), *owners_wanted(pipeline)]
    if [ref["uid"] for ref in told] == [ref["uid"] for ref in wanted]:
        return []
    return [Change(WHEN_DELETED, {"metadata": {"ownerReferences": wanted}})]
