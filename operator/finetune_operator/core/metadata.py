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
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
"""Label and annotation of Kubernetes' own: the index of a pod in its Indexed Job."""
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


def job_name(pipeline: str, uid: str, stage: str, attempt: int, pods: int = 1) -> str:
    """Return <pipeline>-<uid8>-<stage>-a<attempt>. A long pipeline name is cut and ends with a hash of the full name.

    The uid keeps the Jobs of a deleted pipeline apart from the Jobs of a new pipeline with the same name. The host
    names of several pods end with the index of each.
    """
    tail = f"-{uid.replace('-', '')[:8]}-{stage}-a{attempt}"
    index = len(f"-{pods - 1}") if pods > 1 else 0
    return (
        _truncate_with_hash(
            pipeline.replace(".", "-"), MAX_LABEL_LENGTH - len(tail) - index
        )
        + tail
    )


def service_name(pipeline: str) -> str:
    """Return <pipeline>-deploy, without uid and attempt, so that the address stays the same for clients."""
    return _service_name(pipeline, "-deploy")


def headless_service_name(pipeline: str, stage: str) -> str:
    """Return <pipeline>-<stage>, the Service that names the pods of all attempts of a stage."""
    return _service_name(pipeline, f"-{stage}")


def _service_name(pipeline: str, tail: str) -> str:
    """Return a name that begins with the pipeline's.

    A Service's name has no dots and begins with a letter. A name that must be changed for that gets a hash, so that two
    pipelines never share one Service.
    """
    if "." not in pipeline and pipeline[0].isalpha():
        return _truncate_with_hash(pipeline, MAX_LABEL_LENGTH - len(tail)) + tail
    plain = f"p-{pipeline}".replace(".", "-")[
        : MAX_LABEL_LENGTH - len(tail) - 7
    ].rstrip("-")
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


def pipeline_label(pipeline: str) -> str:
    """Return the pipeline's name. A name over 63 characters, the limit for label values, ends with its hash."""
    return _truncate_with_hash(pipeline, MAX_LABEL_LENGTH)


def job_labels(
    pipeline: str, stage: str, attempt: int, identity: str
) -> dict[str, str]:
    """Return the labels of one attempt."""
    return {
        MANAGED_BY: MANAGED_BY_VALUE,
        PIPELINE: pipeline_label(pipeline),
        STAGE: stage,
        ATTEMPT: str(attempt),
        IDENTITY: identity,
    }
