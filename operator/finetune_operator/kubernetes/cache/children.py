"""The children of pipelines, as trimmed objects: their pipeline, their owners and their claims: pure."""

from finetune_operator.core.pipeline import Key
from finetune_operator.kubernetes.cache.store import NamespacedName
from finetune_operator.kubernetes.resources.claim import WORKSPACE_OF
from finetune_operator.kubernetes.resources.job import PIPELINE_NAME
from finetune_operator.kubernetes.translate.object import Object


def owner_key(child: Object) -> Key | None:
    """Return the pipeline that a child was created for."""
    annotations = child["metadata"].get("annotations") or {}
    # A claim has only the second annotation.
    name = annotations.get(PIPELINE_NAME) or annotations.get(WORKSPACE_OF)
    return Key(child["metadata"]["namespace"], name) if name else None


def owner_uids(child: Object) -> list[str]:
    """Return the uids of the child's owners."""
    return [reference["uid"] for reference in child["metadata"]["ownerReferences"]]


def claims_of(writer: Object) -> list[NamespacedName]:
    """Return the claims that a Job or pod mounts for writing."""
    return [(writer["metadata"]["namespace"], claim) for claim in writer["claims"]]
