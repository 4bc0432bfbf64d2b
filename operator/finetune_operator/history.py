"""A stage's past: its attempts and what they cost, carried from one look to the next."""

from collections.abc import Mapping
from datetime import datetime

from finetune_operator.api.conditions import Reason
from finetune_operator.api.status import ATTEMPTS_KEPT, AttemptStatus, Outcome, StageState, StageStatus
from finetune_operator.attempts import follow, result_of
from finetune_operator.observing import JobSeen


def with_attempts(before: StageStatus, jobs: Mapping[str, JobSeen], now: datetime) -> StageStatus:
    """Bring the attempts up to date and count the one that has just ended, once."""
    last = before.last_attempt
    if last is None or last.outcome is not Outcome.RUNNING:
        return before
    job = jobs.get(last.job)
    seen = follow(last, job, now)
    status = before.model_copy(
        update={
            "attempts": (*before.attempts[:-1], seen),
            "progress": job.progress if job and job.progress else before.progress,
            "started_at": before.started_at or seen.started_at,
        }
    )
    status = _lost(status)
    return _counted(status, seen, job) if seen.outcome is not Outcome.RUNNING else status


def carried(status: StageStatus, identity: str, execution: str, *, retry: bool) -> StageStatus:
    """Begin afresh where the stage is to make something else, runs another way, or is to be tried again."""
    if status.identity != identity:
        return StageStatus(
            identity=identity, execution=execution, attempts=status.attempts, forgiven=_last_number(status)
        )
    if status.execution != execution or (retry and status.result is None):
        afresh = {"execution": execution, "failures": 0, "interruptions": 0, "forgiven": _last_number(status)}
        return status.model_copy(update=afresh | ({"active_seconds": 0.0} if retry else {}))
    return status


def begun(status: StageStatus, job: str) -> StageStatus:
    """Write down the next attempt, before its Job is made."""
    attempt = AttemptStatus(number=next_number(status), job=job, identity=status.identity, execution=status.execution)
    attempts = (*status.attempts, attempt)[-ATTEMPTS_KEPT:]
    return status.model_copy(update={"attempts": attempts, "progress": None, "state": StageState.QUEUED})


def stopped(status: StageStatus, why: Reason) -> StageStatus:
    """Write down why the running attempt is asked to stop, before it is."""
    *older, last = status.attempts
    stopping = last.model_copy(update={"stopping": why})
    return status.model_copy(update={"attempts": (*older, stopping)})


def next_number(status: StageStatus) -> int:
    """Give a number that no attempt of this stage has had."""
    return _last_number(status) + 1


def _last_number(status: StageStatus) -> int:
    return status.last_attempt.number if status.last_attempt else 0


def _counted(status: StageStatus, ended: AttemptStatus, job: JobSeen | None) -> StageStatus:
    ran = (ended.finished_at - ended.started_at).total_seconds() if ended.finished_at and ended.started_at else 0.0
    counts = ended.number > status.forgiven
    counted: dict[str, object] = {
        "failures": status.failures + (counts and ended.outcome is Outcome.FAILED),
        "interruptions": status.interruptions + (counts and ended.outcome is Outcome.INTERRUPTED),
        "active_seconds": status.active_seconds + max(ran, 0.0),
    }
    result = result_of(ended, job) if job else None
    if result and ended.identity == status.identity:
        counted |= {"result": result, "finished_at": ended.finished_at}
    return status.model_copy(update=counted)


def _lost(status: StageStatus) -> StageStatus:
    """Settle what the attempt before the last one lost, as soon as the last one says where it began."""
    if len(status.attempts) < 2:  # noqa: PLR2004  there is none before the last
        return status
    *older, before, last = status.attempts
    settled = before.lost_steps is not None or before.identity != last.identity
    if settled or last.start_step is None or before.last_step is None:
        return status
    steps = max(0, before.last_step - last.start_step)
    seconds = round(steps * (before.step_seconds or 0.0), 3)
    known = before.model_copy(update={"lost_steps": steps, "lost_seconds": seconds})
    return status.model_copy(
        update={
            "attempts": (*older, known, last),
            "lost_steps": status.lost_steps + steps,
            "lost_seconds": status.lost_seconds + seconds,
        }
    )
