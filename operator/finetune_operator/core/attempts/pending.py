"""Since when an attempt waits for what a person must mend, before its process runs: pure."""

from collections.abc import Mapping
from datetime import datetime

from finetune_operator.api.conditions import NEEDS_PERSON, Reason
from finetune_operator.api.status import AttemptStatus
from finetune_operator.core.observation import Blocker, JobState, ObservedJob
from finetune_operator.core.workspace import WORKSPACE


def refusal_of(
    refusals: Mapping[str, Blocker],
    attempt: AttemptStatus | None,
    *,
    runs_server: bool,
) -> Blocker | None:
    """Return why the API server refused the Job of an attempt, or the claim that it needs; None if it did not."""
    if attempt is None:
        return None
    refusal = refusals.get(attempt.job)
    if refusal or runs_server:
        return refusal
    return refusals.get(WORKSPACE)


def obstacle(
    attempt: AttemptStatus, job: ObservedJob | None, refusal: Blocker | None
) -> Blocker | None:
    """Return what a person must mend before the process runs, or the server is ready; None if nothing is known."""
    if job is None:
        # A Job that was observed before has been deleted.
        if refusal is None or attempt.created_at:
            return None
        return refusal if refusal.reason in NEEDS_PERSON else None
    if job.needs_person:
        return job.blocker
    if job.unready:
        message = "the server runs and is not ready: see its log"
        return Blocker(Reason.SERVER_NOT_READY, message)
    return None


def blocked_at(
    attempt: AttemptStatus,
    job: ObservedJob | None,
    refusal: Blocker | None,
    now: datetime,
) -> datetime | None:
    """Return since when the attempt waits for a person; `attempt` is as it was before this observation.

    An obstacle that goes and comes back, such as a sidecar that fails again and again, began when it was first seen.
    """
    if not _counts(job, refusal):
        return None
    since = attempt.blocked_at
    if job and job.started_at and attempt.started_at is None:
        # A server has the whole time from its first start, however long its image took.
        since = None
    if since is None and obstacle(attempt, job, refusal):
        return now
    return since


def _counts(job: ObservedJob | None, refusal: Blocker | None) -> bool:
    """Return whether the time counts: no process has run yet, and the attempt waits for neither nodes nor quota."""
    if job is None:
        return refusal is None or refusal.reason is not Reason.WAITING_FOR_QUOTA
    if job.state is JobState.RUNNING:
        return job.unready or job.awaits_probe
    return job.live and not job.awaits_room
