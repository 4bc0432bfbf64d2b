"""Names and labels of what the operator creates; both follow from the pipeline, so that creating twice creates once.

Labels of the custom resource are never copied: Argo CD would take the copy for its own.
"""

import hashlib

from finetune_operator.api.group import GROUP

PIPELINE = f"{GROUP}/pipeline"
STAGE = f"{GROUP}/stage"
ATTEMPT = f"{GROUP}/attempt"
IDENTITY = f"{GROUP}/identity"
SERVER = f"{GROUP}/server"
"""The attempt that started it: what a Service selects."""
MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_BY_VALUE = "finetune-operator"

MAX_LABEL_LENGTH = 63
"""Of what becomes a label or a pod's host name."""
MAX_NAME_LENGTH = 253


def job_name(pipeline: str, uid: str, stage: str, attempt: int) -> str:
    """Give <pipeline>-<uid8>-<stage>-a<attempt>; a long pipeline's name is cut and gains a hash of the whole."""
    tail = f"-{uid.replace('-', '')[:8]}-{stage}-a{attempt}"
    return _truncate_with_hash(pipeline.replace(".", "-"), MAX_LABEL_LENGTH - len(tail)) + tail


def service_name(pipeline: str) -> str:
    """Give <pipeline>-deploy: without a uid or an attempt, so that clients need not know what happens behind it.

    A Service's name has no dots and begins with a letter; a name that has to be changed for that gains a hash, or two
    pipelines would share one Service.
    """
    tail = "-deploy"
    if "." not in pipeline and pipeline[0].isalpha():
        return _truncate_with_hash(pipeline, MAX_LABEL_LENGTH - len(tail)) + tail
    plain = f"p-{pipeline}".replace(".", "-")[: MAX_LABEL_LENGTH - len(tail) - 7].rstrip("-")
    return f"{plain}-{hashlib.sha256(pipeline.encode()).hexdigest()[:6]}{tail}"


def workspace_name(pipeline: str) -> str:
    """Give <pipeline>-workspace: without a uid, so that a pipeline that is made anew finds its earlier work."""
    tail = "-workspace"
    return _truncate_with_hash(pipeline, MAX_NAME_LENGTH - len(tail)) + tail


def _truncate_with_hash(name: str, room: int) -> str:
    if len(name) <= room:
        return name
    hashed = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{name[: room - 7].rstrip('-.')}-{hashed}"


def job_labels(pipeline: str, stage: str, attempt: int, identity: str) -> dict[str, str]:
    """Give the labels of one attempt; values are cut to the 63 characters that a label may have."""
    return {
        MANAGED_BY: MANAGED_BY_VALUE,
        PIPELINE: pipeline[:63].rstrip("-."),
        STAGE: stage,
        ATTEMPT: str(attempt),
        IDENTITY: identity,
    }
