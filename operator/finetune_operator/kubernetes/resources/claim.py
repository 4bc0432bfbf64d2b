"""The workspace of a pipeline as a PersistentVolumeClaim: pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from finetune_operator.api.group import GROUP, KIND
from finetune_operator.core.metadata import MANAGED_BY, MANAGED_BY_VALUE, workspace_name
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.kubernetes.resources.owner_references import owner_references

WORKSPACE_OF = f"{GROUP}/workspace-of"
"""Annotation: the pipeline that the operator made the claim for."""
WHEN_DELETED, SIZE = "workspace.whenDeleted", "workspace.size"


@dataclass(frozen=True)
class Change:
    """What an edit of the pipeline makes of a claim that is there."""

    field: str
    """That asks for it."""
    patch: dict[str, Any]


def claim_name(pipeline: Pipeline) -> str:
    """Name the claim that holds the pipeline's work."""
    return pipeline.spec.workspace.existing_claim or workspace_name(pipeline.key.name)


def build_claim(pipeline: Pipeline) -> dict[str, Any]:
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
            "labels": {MANAGED_BY: MANAGED_BY_VALUE},
            "annotations": {WORKSPACE_OF: pipeline.key.name},
            "ownerReferences": desired_owners(pipeline),
        },
        "spec": spec,
    }


def desired_owners(pipeline: Pipeline) -> list[dict[str, Any]]:
    """Give the claim's owners: none while it is to outlive the pipeline."""
    return owner_references(pipeline) if pipeline.spec.workspace.when_deleted == "Delete" else []


def ownership_error(pipeline: Pipeline, found: dict[str, Any]) -> str | None:
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


def pending_changes(pipeline: Pipeline, found: dict[str, Any]) -> list[Change]:
    """Give what is to be changed about the pipeline's own claim, so that it is what is asked for now."""
    return [*_owners_changed(pipeline, found), *_resize(pipeline, found)]


def _owners_changed(pipeline: Pipeline, found: dict[str, Any]) -> Iterator[Change]:
    told = found["metadata"].get("ownerReferences", [])
    wanted = [*(ref for ref in told if ref.get("kind") != KIND), *desired_owners(pipeline)]
    if [ref["uid"] for ref in told] != [ref["uid"] for ref in wanted]:
        yield Change(WHEN_DELETED, {"metadata": {"ownerReferences": wanted}})


def _resize(pipeline: Pipeline, found: dict[str, Any]) -> Iterator[Change]:
    size = pipeline.spec.workspace.size
    if (had := _size(found)) and _amount(size) > _amount(had):
        yield Change(SIZE, {"spec": {"resources": {"requests": {"storage": size}}}})


def immutable_differences(pipeline: Pipeline, found: dict[str, Any]) -> Iterator[str]:
    """Say what of the pipeline's own claim is not what is asked and can never be, for a claim keeps what it has."""
    wish, name, spec = pipeline.spec.workspace, found["metadata"]["name"], found.get("spec") or {}
    move = f"to have another, save what you need of {name}, delete it and the work begins anew; or take the edit back"
    if (size := _size(found)) and _amount(wish.size) < _amount(size):
        yield f"{SIZE}: {name} has {size} and cannot shrink to {wish.size}: set it to {size}"
    if (had := spec.get("storageClassName")) and wish.storage_class_name not in {None, had}:
        yield f"workspace.storageClassName: {name} is of class {had}, not {wish.storage_class_name}; {move}"
    if (modes := spec.get("accessModes")) and wish.access_mode not in modes:
        yield f"workspace.accessMode: {name} has {', '.join(modes)}, not {wish.access_mode}; {move}"


def _size(found: dict[str, Any]) -> str:
    """Give what a claim asks for; Kubernetes writes a quantity in its own way."""
    requests = ((found.get("spec") or {}).get("resources") or {}).get("requests") or {}
    return str(requests.get("storage") or "")


def _amount(quantity: str) -> Decimal:
    return Decimal(parse_quantity(quantity))  # type: ignore[no-untyped-call]  # the library has no types
