"""Names and labels of the objects that the operator creates.

They are derived from the pipeline, so that creating an object twice creates it once. Labels of the custom resource are
never copied: Argo CD may track resources by label, and would then treat the copy as its own.
"""

import hashlib

from finetune_operator.api.group import GROUP

PIPELINE = f"{GROUP}/pipeline"
STAGE = f"{GROUP}/stage"
ATTEMPT = f"{GROUP}/attempt"
IDENTITY = f"{GROUP}/identity"
SERVER = f"{GROUP}/server"
"""Name of the attempt that started the server. The Service selects by this label."""
MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_BY_VALUE = "finetune-operator"

MAX_LABEL_LENGTH = 63
"""Limit of Kubernetes for label values and host names of pods."""
MAX_NAME_LENGTH = 253
"""Limit of Kubernetes for object names."""
STAGE_CONTAINER = "stage"
"""The container of a pod in which a stage or its server runs."""


def job_name(pipeline: str, uid: str, stage: str, attempt: int) -> str:
    """Return <pipeline>-<uid8>-<stage>-a<attempt>. A long pipeline name is cut and ends with a hash of the full name.

    The uid keeps the Jobs of a deleted pipeline apart from those of a new one with the same name.
    """
    tail = f"-{uid.replace('-', '')[:8]}-{stage}-a{attempt}"
    return _truncate_with_hash(pipeline.replace(".", "-"), MAX_LABEL_LENGTH - len(tail)) + tail


def service_name(pipeline: str) -> str:
    """Return <pipeline>-deploy, without uid and attempt, so that the address stays the same for clients.

    A Service's name has no dots and begins with a letter. A name that must be changed for that gets a hash, so that two
    pipelines never share one Service.
    """
    tail = "-deploy"
    if "." not in pipeline and pipeline[0].isalpha():
        return _truncate_with_hash(pipeline, MAX_LABEL_LENGTH - len(tail)) + tail
    plain = f"p-{pipeline}".replace(".", "-")[: MAX_LABEL_LENGTH - len(tail) - 7].rstrip("-")
    return f"{plain}-{hashlib.sha256(pipeline.encode()).hexdigest()[:6]}{tail}"


def workspace_name(pipeline: str) -> str:
    """Return <pipeline>-workspace, without uid, so that a recreated pipeline reuses its earlier results."""
    tail = "-workspace"
    return _truncate_with_hash(pipeline, MAX_NAME_LENGTH - len(tail)) + tail


def _truncate_with_hash(name: str, max_length: int) -> str:
    if len(name) <= max_length:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{name[: max_length - 7].rstrip('-.')}-{digest}"


def job_labels(pipeline: str, stage: str, attempt: int, identity: str) -> dict[str, str]:
    """Return the labels of one attempt. The pipeline's name is cut to 63 characters, the limit for label values."""
    return {
        MANAGED_BY: MANAGED_BY_VALUE,
        PIPELINE: pipeline[:MAX_LABEL_LENGTH].rstrip("-."),
        STAGE: stage,
        ATTEMPT: str(attempt),
        IDENTITY: identity,
    }
