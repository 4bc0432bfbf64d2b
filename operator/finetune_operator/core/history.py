"""A stage's past: its attempts and what they cost, carried from one look to the next."""

from collections.abc import Mapping, Sequence
from datetime import datetime

from finetune_operator.api.conditions import Reason
from finetune_operator.api.status import ATTEMPTS_KEPT, AttemptStatus, Outcome, StageState, StageStatus
from finetune_operator.core.endings import result_of, update_attempt
from finetune_operator.core.observation import ObservedJob, ObservedServer
from finetune_trainer.contract import DeployResult


def record_attempts(before: StageStatus, jobs: Mapping[str, ObservedJob], now: datetime) -> StageStatus:
    """Bring the attempts up to date and count the one that has just ended, once."""
    last = before.last_attempt
    if last is None or last.outcome is not Outcome.RUNNING:
        return before
    job = jobs.get(last.job)
    seen = update_attempt(last, job, now)
    status = before.model_copy(
        update={
            "attempts": (*before.attempts[:-1], seen),
            "progress": job.progress if job and job.progress else before.progress,
            "started_at": before.started_at or seen.started_at,
        }
    )
    status = _settle_lost_steps(status)
    return _count_outcome(status, seen, job) if seen.outcome is not Outcome.RUNNING else status


def reset_if_changed(status: StageStatus, identity: str, execution: str) -> StageStatus:
    """Begin afresh where the stage is to make something else; forgive the past where it is to run another way."""
    if status.identity != identity:
        return StageStatus(
            identity=identity,
            execution=execution,
            attempts=status.attempts,
            budget_base_attempt=_last_attempt_number(status),
        )
    if status.execution != execution:
        return _reset_baseline(status, _last_attempt_number(status)).model_copy(update={"execution": execution})
    return status


def reset_budgets(status: StageStatus, *, repeat: bool = False) -> StageStatus:
    """Give a stage that is not done fresh budgets, and every stage all the time that it may run.

    With `repeat` also one that was done is not: it is to see whether its work is still there.
    """
    undone: dict[str, object] = {"result": None, "finished_at": None} if repeat else {}
    afresh = status.model_copy(update={"active_seconds": 0.0, **undone})
    ended = [attempt.number for attempt in status.attempts if attempt.finished_at]
    return afresh if afresh.result else _reset_baseline(afresh, max(ended, default=0))


def _reset_baseline(status: StageStatus, up_to: int) -> StageStatus:
    past = {
        "budget_base_attempt": max(up_to, status.budget_base_attempt),
        "budget_base_failures": status.failures,
        "budget_base_interruptions": status.interruptions,
    }
    return status.model_copy(update=past)


def server_job(status: StageStatus) -> str | None:
    """Name the attempt whose server is what the stage made."""
    lasting = isinstance(status.result, DeployResult) and status.result.long_running
    return status.last_attempt.job if lasting and status.last_attempt else None


def drop_lost_server(status: StageStatus, servers: Mapping[str, ObservedServer]) -> StageStatus:
    """Take the result away where it was a server and somebody has taken that away."""
    job = server_job(status)
    fallen = job is not None and job not in servers
    return status.model_copy(update={"result": None, "finished_at": None}) if fallen else status


def start_attempt(status: StageStatus, job: str) -> StageStatus:
    """Write down the next attempt, before its Job is made."""
    attempt = AttemptStatus(
        number=next_attempt_number(status), job=job, identity=status.identity, execution=status.execution
    )
    attempts = (*status.attempts, attempt)[-ATTEMPTS_KEPT:]
    return status.model_copy(update={"attempts": attempts, "progress": None, "state": StageState.QUEUED})


def mark_stopping(status: StageStatus, why: Reason) -> StageStatus:
    """Write down why the running attempt is asked to stop, before it is."""
    *older, last = status.attempts
    stopping = last.model_copy(update={"stopping": why})
    return status.model_copy(update={"attempts": (*older, stopping)})


def next_attempt_number(status: StageStatus) -> int:
    """Give a number that no attempt of this stage has had."""
    return _last_attempt_number(status) + 1


def _last_attempt_number(status: StageStatus) -> int:
    return status.last_attempt.number if status.last_attempt else 0


def _count_outcome(status: StageStatus, ended: AttemptStatus, job: ObservedJob | None) -> StageStatus:
    ran = (ended.finished_at - ended.started_at).total_seconds() if ended.finished_at and ended.started_at else 0.0
    counts = ended.number > status.budget_base_attempt
    counted: dict[str, object] = {
        "failures": status.failures + (counts and ended.outcome is Outcome.FAILED),
        "interruptions": status.interruptions + (counts and ended.outcome is Outcome.INTERRUPTED),
        "active_seconds": status.active_seconds + (max(ran, 0.0) if ended.identity == status.identity else 0.0),
    }
    result = result_of(ended, job) if job else None
    if result and ended.identity == status.identity:
        counted |= {"result": result, "finished_at": ended.finished_at}
    return status.model_copy(update=counted)


def _settle_lost_steps(status: StageStatus) -> StageStatus:
    """Settle what was lost before the last attempt, as soon as that one says where it began."""
    *older, last = status.attempts
    place = _unsettled(older, last.identity)
    if place is None or last.start_step is None:
        return status
    steps = max(0, (older[place].last_step or 0) - last.start_step)
    seconds = round(steps * (older[place].step_seconds or 0.0), 3)
    older[place] = older[place].model_copy(update={"lost_steps": steps, "lost_seconds": seconds})
    return status.model_copy(
        update={
            "attempts": (*older, last),
            "lost_steps": status.lost_steps + steps,
            "lost_seconds": status.lost_seconds + seconds,
        }
    )


def _unsettled(older: Sequence[AttemptStatus], identity: str) -> int | None:
    """Find the newest attempt that got anywhere, unless its loss is known or it made something else."""
    for place in reversed(range(len(older))):
        attempt = older[place]
        if attempt.identity != identity:
            return None
        if attempt.last_step is not None:
            return place if attempt.lost_steps is None else None
    return None
