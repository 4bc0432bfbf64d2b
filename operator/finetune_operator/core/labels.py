"""Labels on what the operator makes; those of the custom resource are never copied, or Argo CD would claim the copy."""

from finetune_operator.api.group import GROUP

PIPELINE = f"{GROUP}/pipeline"
STAGE = f"{GROUP}/stage"
ATTEMPT = f"{GROUP}/attempt"
IDENTITY = f"{GROUP}/identity"
SERVER = f"{GROUP}/server"
"""The attempt that started it: what a Service selects."""
MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "finetune-operator"


def job_labels(pipeline: str, stage: str, attempt: int, identity: str) -> dict[str, str]:
    """Give the labels of one attempt; values are cut to the 63 characters that a label may have."""
    return {
        MANAGED_BY: MANAGER,
        PIPELINE: pipeline[:63].rstrip("-."),
        STAGE: stage,
        ATTEMPT: str(attempt),
        IDENTITY: identity,
    }
