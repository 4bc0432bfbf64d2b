"""Which attempts may be replaced although their node does not answer and their process may still run. Pure."""

from finetune_operator.core.assessment import StageAssessment
from finetune_operator.core.observation import ObservedWorkspace
from finetune_operator.core.pipeline import Pipeline


def is_kept_out(
    pipeline: Pipeline, stage: StageAssessment, workspace: ObservedWorkspace
) -> bool:
    """Return whether the process of the running attempt publishes nothing once another attempt has started.

    The trainer's fence keeps a process of its own out, or a volume that only one pod may mount keeps out any process,
    because it is detached from the lost node first. Kubernetes itself replaces the pods of a server.
    """
    if stage.spec and stage.spec.runs_server:
        return False
    return _is_fenced(stage) or _has_own_volume(pipeline, workspace)


def _is_fenced(stage: StageAssessment) -> bool:
    """Return whether the trainer's fence keeps the process out: it runs in the folder that the next attempt uses."""
    attempt = stage.status.running_attempt
    if attempt is None or stage.spec is None or stage.spec.pod.command:
        return False
    # After an edit, nothing fences the folder of the old identity, and the command of its process is not known.
    return attempt.identity == stage.status.identity


def _has_own_volume(pipeline: Pipeline, workspace: ObservedWorkspace) -> bool:
    """Return whether the workspace is a volume that only one pod may mount at a time."""
    spec = pipeline.spec.workspace
    # The mode of another's claim is not read, and the mode of an outdated claim may be another than the spec's.
    is_own = not spec.existing_claim and not workspace.outdated
    return is_own and spec.claim_access_mode == "ReadWriteOncePod"
