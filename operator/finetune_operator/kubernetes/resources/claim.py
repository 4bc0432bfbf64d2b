"""The workspace of a pipeline as a PersistentVolumeClaim: pure."""

from collections.abc import Iterator
from decimal import Decimal

from kubernetes.utils.quantity import parse_quantity

from finetune_operator.api.group import GROUP, KIND
from finetune_operator.core.metadata import MANAGED_BY, MANAGED_BY_VALUE, workspace_name
from finetune_operator.core.observation import ClaimChange
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.kubernetes.resources.owner_references import owner_references
from finetune_operator.kubernetes.translate.object import Object

WORKSPACE_OF = f"{GROUP}/workspace-of"
"""Annotation: the pipeline that the operator created the claim for."""
SHARED = "ReadWriteMany"
WHEN_DELETED = "workspace.whenDeleted"
SIZE = "workspace.size"


def claim_name(pipeline: Pipeline) -> str:
    """Return the name of the claim that is the pipeline's workspace."""
    return pipeline.spec.workspace.existing_claim or workspace_name(pipeline.key.name)


def build_claim(pipeline: Pipeline, storage_class: str | None = None) -> Object:
    """Build the claim that the operator creates; `storage_class` is the default for a pipeline without a class.

    A retained claim has no owner and none of the pipeline's labels, so that no tool prunes it with the pipeline.
    """
    workspace = pipeline.spec.workspace
    requests = {"storage": workspace.claim_size}
    spec: Object = {
        "accessModes": [workspace.claim_access_mode],
        "resources": {"requests": requests},
    }
    storage_class = workspace.storage_class_name or storage_class
    if storage_class:
        spec["storageClassName"] = storage_class
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


def desired_owners(pipeline: Pipeline) -> list[Object]:
    """Return the claim's owner references: none if it is to outlive the pipeline."""
    if pipeline.spec.workspace.when_deleted == "Delete":
        return owner_references(pipeline)
    return []


def ownership_error(pipeline: Pipeline, claim: Object) -> str | None:
    """Return why the existing claim cannot be the pipeline's workspace; None if it can."""
    meta = claim["metadata"]
    existing = pipeline.spec.workspace.existing_claim
    # A user's own claim needs no mark of the operator.
    if (
        not existing
        and meta.get("annotations", {}).get(WORKSPACE_OF) != pipeline.key.name
    ):
        return (
            f"the claim {meta['name']} exists and was not created for this pipeline: "
            "set workspace.existingClaim to use it, or rename the pipeline"
        )
    if is_deleting(claim):
        then = "create a new claim" if existing else "the operator creates a new claim"
        return (
            f"the claim {meta['name']} is being deleted, and {then} once it is gone: delete the other pods that "
            f"mount it, which `kubectl describe pvc {meta['name']}` lists as Used By"
        )
    if is_lost(claim):
        then = "create it anew" if existing else "all stages then run again"
        return f"the volume of the claim {meta['name']} is gone (phase Lost): delete the claim; {then}"
    return None


def is_deleting(claim: Object) -> bool:
    """Return whether the claim is being deleted."""
    return bool(claim["metadata"].get("deletionTimestamp"))


def is_lost(claim: Object) -> bool:
    """Return whether the volume of the claim is gone."""
    return (claim.get("status") or {}).get("phase") == "Lost"


def sharing_error(pipeline: Pipeline, claim: Object) -> str | None:
    """Return why the pods of an attempt cannot all mount the claim; None if they can."""
    pods = {
        name: stage.pods
        for name, stage in pipeline.spec.stages().items()
        if stage.pods > 1
    }
    modes = (claim.get("spec") or {}).get("accessModes") or []
    if not pods or SHARED in modes:
        return None
    stage, count = next(iter(pods.items()))
    return (
        f"the claim {claim['metadata']['name']} has {', '.join(modes)}, and {stage} runs on {count} nodes, which need "
        f"{SHARED}: use a claim that has it as workspace.existingClaim, or set {stage}.nodes to 1"
    )


def pending_changes(pipeline: Pipeline, claim: Object) -> list[ClaimChange]:
    """Return the changes that the spec asks for and that the pipeline's own claim lacks."""
    return [*_owners_changed(pipeline, claim), *_resize(pipeline, claim)]


def _owners_changed(pipeline: Pipeline, claim: Object) -> Iterator[ClaimChange]:
    current = claim["metadata"].get("ownerReferences", [])
    # References of other kinds are not the operator's: another tool has set them.
    foreign = [reference for reference in current if reference.get("kind") != KIND]
    desired = [*foreign, *desired_owners(pipeline)]
    if _uids(current) != _uids(desired):
        yield ClaimChange(WHEN_DELETED, {"metadata": {"ownerReferences": desired}})


def _uids(references: list[Object]) -> list[str]:
    return [reference["uid"] for reference in references]


def _resize(pipeline: Pipeline, claim: Object) -> Iterator[ClaimChange]:
    size = pipeline.spec.workspace.claim_size
    current = _size(claim)
    if current and _amount(size) > _amount(current):
        yield ClaimChange(
            SIZE, {"spec": {"resources": {"requests": {"storage": size}}}}
        )


def immutable_differences(pipeline: Pipeline, claim: Object) -> Iterator[str]:
    """Yield each difference between the pipeline's own claim and its spec that Kubernetes lets no client change."""
    workspace = pipeline.spec.workspace
    name = claim["metadata"]["name"]
    spec = claim.get("spec") or {}
    renewal = (
        f"back up what you need from {name} and delete it; all stages then run again"
    )
    fix = f"revert the edit, or {renewal}"
    size = _size(claim)
    wanted = workspace.claim_size
    if size and _amount(wanted) < _amount(size):
        yield f"{SIZE}: {name} has {size} and cannot shrink to {wanted}: set it to {size}, or {renewal}"
    current = spec.get("storageClassName")
    # A spec without a class accepts the cluster's default class, which the API server has filled in.
    if current and workspace.storage_class_name not in {None, current}:
        yield f"workspace.storageClassName: {name} has class {current}, not {workspace.storage_class_name}; {fix}"
    modes = spec.get("accessModes")
    mode = workspace.claim_access_mode
    if modes and mode not in modes:
        yield f"workspace.accessMode: {name} has {', '.join(modes)}, not {mode}; {fix}"


def _size(claim: Object) -> str:
    """Return the storage request of a claim, as Kubernetes formats it: 0.5Ti comes back as 512Gi."""
    requests = ((claim.get("spec") or {}).get("resources") or {}).get("requests") or {}
    return str(requests.get("storage") or "")


def _amount(quantity: str) -> Decimal:
    return Decimal(parse_quantity(quantity))  # type: ignore[no-untyped-call]  # the library has no types
