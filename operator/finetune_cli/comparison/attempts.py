"""The attempts that have made a stage's result, apart from attempts that only reused it."""

from finetune_operator.api.status import AttemptStatus, Outcome, StageStatus
from finetune_operator.core.durations import format_duration


def making_attempts(stage: StageStatus) -> list[AttemptStatus]:
    """Return the listed attempts with the stage's identity, up to the first that succeeded.

    A later attempt with this identity reuses the result: an edit was undone, or everySteps was edited.
    """
    making = []
    for attempt in stage.attempts:
        if attempt.identity != stage.identity:
            continue
        making.append(attempt)
        if attempt.outcome is Outcome.SUCCEEDED:
            break
    return making


def making_seconds(stage: StageStatus) -> float:
    """Return the running time in which the result was made, in seconds."""
    return sum(attempt.seconds or 0.0 for attempt in making_attempts(stage))


def reused_text(stage: StageStatus) -> str:
    """Return whose result the newest attempt has found, as in reused from attempt 1 (18s); empty if it has made it."""
    last = stage.last_attempt
    if last is None or stage.progress is None or not stage.progress.reused:
        return ""
    making = making_attempts(stage)
    if last not in making:
        seconds = format_duration(making_seconds(stage))
        return f"reused from attempt {making[-1].number} ({seconds})"
    # An attempt before it made the result, and was interrupted before it could report it.
    if len(making) > 1:
        return ""
    # Of another run in the same workspace, or of an attempt that the status does not list any more.
    return "reused from the workspace"
