"""The workspace of a pipeline as a PersistentVolumeClaim: pure."""

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from finetune_operator.api.group import GROUP, KIND
from finetune_operator.core.metadata import MANAGED_BY, MANAGED_BY_VALUE, workspace_name
from finetune_operator.core.observation import ClaimChange
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.kubernetes.resources.owner_references import owner_references

WORKSPACE_OF = f"{GROUP}/workspace-of"
"""Annotation: the pipeline that the operator created the claim for."""
SHARED = "ReadWriteMany"
WHEN_DELETED, SIZE = "workspace.whenDeleted", "workspace.size"
"""Fields of the pipeline's spec."""


def claim_name(pipeline: Pipeline) -> str:
    """Return the name of the claim that is the pipeline's workspace."""
    return pipeline.spec.workspace.existing_claim or workspace_name(pipeline.key.name)


def build_claim(pipeline: Pipeline, storage_class: str | None = None) -> dict[str, Any]:
    """Build the claim that the operator creates; `storage_class` is for a pipeline that names none.

    A retained claim has no owner and none of the pipeline's labels, so that no tool prunes it with the pipeline.
    """
    workspace = pipeline.spec.workspace
    requests = {"storage": workspace.size}
    spec: dict[str, Any] = {
        "accessModes": [workspace.access_mode],
        "resources": {"requests": requests},
    }
    if name := workspace.storage_class_name or storage_class:
        spec["storageClassName"] = name
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
    """Return the claim's owner references: none where it is to outlive the pipeline."""
    return owner_references(pipeline) if pipeline.spec.workspace.when_deleted == "Delete" else []


def ownership_error(pipeline: Pipeline, found: dict[str, Any]) -> str | None:
    """Return why the existing claim cannot be the pipeline's workspace; None where it can."""
    meta = found["metadata"]
    if pipeline.spec.workspace.existing_claim:
        return None
    if meta.get("annotations", {}).get(WORKSPACE_OF) != pipeline.key.name:
        return (
            f"the claim {meta['name']} exists and was not created for this pipeline: "
            "set workspace.existingClaim to use it, or rename the pipeline"
        )
    if meta.get("deletionTimestamp"):
        return f"the claim {meta['name']} is being deleted; the operator creates a new one once it is gone"
    return None


def sharing_error(pipeline: Pipeline, found: dict[str, Any]) -> str | None:
    """Return why the pods of an attempt cannot all mount the claim; None where they can."""
    pods = {name: stage.pods for name, stage in pipeline.spec.stages().items() if stage.pods > 1}
    modes = (found.get("spec") or {}).get("accessModes") or []
    if not pods or SHARED in modes:
        return None
    [(stage, count), *_] = pods.items()
    return (
        f"the claim {found['metadata']['name']} has {', '.join(modes)}, and {stage} runs on {count} nodes, which need "
        f"{SHARED}: use a claim that has it as workspace.existingClaim, or set {stage}.nodes to 1"
    )


def pending_changes(pipeline: Pipeline, found: dict[str, Any]) -> list[ClaimChange]:
    """Return the changes that bring the pipeline's own claim to what its spec asks for."""
    return [*_owners_changed(pipeline, found), *_resize(pipeline, found)]


def _owners_changed(pipeline: Pipeline, found: dict[str, Any]) -> Iterator[ClaimChange]:
    current = found["metadata"].get("ownerReferences", [])
    desired = [*(ref for ref in current if ref.get("kind") != KIND), *desired_owners(pipeline)]
    if [ref["uid"] for ref in current] != [ref["uid"] for ref in desired]:
        yield ClaimChange(WHEN_DELETED, {"metadata": {"ownerReferences": desired}})


def _resize(pipeline: Pipeline, found: dict[str, Any]) -> Iterator[ClaimChange]:
    size = pipeline.spec.workspace.size
    if (current := _size(found)) and _amount(size) > _amount(current):
        yield ClaimChange(SIZE, {"spec": {"resources": {"requests": {"storage": size}}}})


def immutable_differences(pipeline: Pipeline, found: dict[str, Any]) -> Iterator[str]:
    """Yield each difference between the pipeline's own claim and its spec that Kubernetes lets no client change."""
    workspace, name, spec = (
        pipeline.spec.workspace,
        found["metadata"]["name"],
        found.get("spec") or {},
    )
    fix = f"revert the edit, or back up what you need from {name} and delete it; all stages then run again"
    if (size := _size(found)) and _amount(workspace.size) < _amount(size):
        yield f"{SIZE}: {name} has {size} and cannot shrink to {workspace.size}: set it to {size}"
    if (current := spec.get("storageClassName")) and workspace.storage_class_name not in {
        None,
        current,
    }:
        yield f"workspace.storageClassName: {name} has class {current}, not {workspace.storage_class_name}; {fix}"
    if (modes := spec.get("accessModes")) and workspace.access_mode not in modes:
        yield f"workspace.accessMode: {name} has {', '.join(modes)}, not {workspace.access_mode}; {fix}"


def _size(found: dict[str, Any]) -> str:
    """Return the storage request of a claim, as Kubernetes formats it: 0.5Ti comes back as 512Gi."""
    requests = ((found.get("spec") or {}).get("resources") or {}).get("requests") or {}
    return str(requests.get("storage") or "")


def _amount(quantity: str) -> Decimal:
    return Decimal(parse_quantity(quantity))  # type: ignore[no-untyped-call]  # the library has no types
