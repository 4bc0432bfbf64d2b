"""The history of a stage: its attempts, their costs and the counters, carried from one reconcile to the next."""

from collections.abc import Mapping, Sequence
from datetime import datetime

from finetune_operator.api.conditions import Reason
from finetune_operator.api.status import ATTEMPTS_KEPT, AttemptStatus, Outcome, StageState, StageStatus
from finetune_operator.core.endings import result_of, update_attempt
from finetune_operator.core.observation import ObservedJob, ObservedServer
from finetune_trainer.contract import DeployResult, PrepareResult


def record_attempts(before: StageStatus, jobs: Mapping[str, ObservedJob], now: datetime) -> StageStatus:
    """Update the running attempt from its observed Job. Count its outcome once, at the moment when it ends."""
    last = before.last_attempt
    if last is None or last.outcome is not Outcome.RUNNING:
        return before
    job = jobs.get(last.job)
    updated = update_attempt(last, job, now)
    status = before.model_copy(
        update={
            "attempts": (*before.attempts[:-1], updated),
            "progress": job.progress if job and job.progress else before.progress,
            "started_at": before.started_at or updated.started_at,
        }
    )
    status = _settle_lost_steps(status)
    return _count_outcome(status, updated, job) if updated.outcome is not Outcome.RUNNING else status


def reset_if_changed(status: StageStatus, identity: str, execution: str) -> StageStatus:
    """Return a new status if the identity changed, or fresh retry budgets if only the execution changed."""
    if status.identity != identity:
        # The attempts are kept although they had another identity: their numbers must not be reused.
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
    """Reset the running time of a stage, and the retry budgets of a stage without a result.

    With `repeat`, a stage that is done runs again, to verify that its files are still there.
    """
    cleared: dict[str, object] = {"result": None, "finished_at": None} if repeat else {}
    reset = status.model_copy(update={"active_seconds": 0.0, **cleared})
    # Only ended attempts move into the baseline. One that runs during the retry request still counts when it ends.
    ended = [attempt.number for attempt in status.attempts if attempt.finished_at]
    return reset if reset.result else _reset_baseline(reset, max(ended, default=0))


def _reset_baseline(status: StageStatus, up_to: int) -> StageStatus:
    # The counters are not reset, because the user sees them. The budgets subtract the baseline instead.
    baseline = {
        "budget_base_attempt": max(up_to, status.budget_base_attempt),
        "budget_base_failures": status.failures,
        "budget_base_interruptions": status.interruptions,
    }
    return status.model_copy(update=baseline)


def server_job(status: StageStatus) -> str | None:
    """Return the Job whose server is the result of the stage, or None if the result is no running server."""
    long_running = isinstance(status.result, DeployResult) and status.result.long_running
    return status.last_attempt.job if long_running and status.last_attempt else None


def drop_lost_server(status: StageStatus, servers: Mapping[str, ObservedServer]) -> StageStatus:
    """Remove the result if it is a server that no longer exists, so that the stage runs again."""
    job = server_job(status)
    lost = job is not None and job not in servers
    return status.model_copy(update={"result": None, "finished_at": None}) if lost else status


def start_attempt(status: StageStatus, job: str) -> StageStatus:
    """Record the next attempt, before its Job is created."""
    attempt = AttemptStatus(
        number=next_attempt_number(status), job=job, identity=status.identity, execution=status.execution
    )
    attempts = (*status.attempts, attempt)[-ATTEMPTS_KEPT:]
    return status.model_copy(update={"attempts": attempts, "progress": None, "state": StageState.QUEUED})


def mark_stopping(status: StageStatus, reason: Reason) -> StageStatus:
    """Record why the running attempt is stopped, before it is stopped."""
    *older, last = status.attempts
    stopping = last.model_copy(update={"stopping": reason})
    return status.model_copy(update={"attempts": (*older, stopping)})


def next_attempt_number(status: StageStatus) -> int:
    """Return a number that no attempt of this stage has had."""
    return _last_attempt_number(status) + 1


def _last_attempt_number(status: StageStatus) -> int:
    return status.last_attempt.number if status.last_attempt else 0


def _count_outcome(status: StageStatus, ended: AttemptStatus, job: ObservedJob | None) -> StageStatus:
    seconds = (ended.finished_at - ended.started_at).total_seconds() if ended.finished_at and ended.started_at else 0.0
    counts = ended.number > status.budget_base_attempt
    counted: dict[str, object] = {
        "failures": status.failures + (counts and ended.outcome is Outcome.FAILED),
        "interruptions": status.interruptions + (counts and ended.outcome is Outcome.INTERRUPTED),
        "active_seconds": status.active_seconds + (max(seconds, 0.0) if ended.identity == status.identity else 0.0),
    }
    result = result_of(ended, job) if job else None
    if result and ended.identity == status.identity:
        counted |= {"result": result, "finished_at": ended.finished_at}
        if isinstance(result, PrepareResult):
            counted |= {"model_digest": result.model_digest}
    return status.model_copy(update=counted)


def _settle_lost_steps(status: StageStatus) -> StageStatus:
    """Compute the lost steps of the previous attempt, as soon as the last one reports its start step.

    Lost steps = last step of the previous attempt - start step of the last one.
    """
    *older, last = status.attempts
    index = _unsettled(older, last.identity)
    if index is None or last.start_step is None:
        return status
    steps = max(0, (older[index].last_step or 0) - last.start_step)
    seconds = round(steps * (older[index].step_seconds or 0.0), 3)
    older[index] = older[index].model_copy(update={"lost_steps": steps, "lost_seconds": seconds})
    return status.model_copy(
        update={
            "attempts": (*older, last),
            "lost_steps": status.lost_steps + steps,
            "lost_seconds": status.lost_seconds + seconds,
        }
    )


def _unsettled(older: Sequence[AttemptStatus], identity: str) -> int | None:
    """Return the index of the newest attempt that finished a step, if its lost steps are not yet known.

    Return None at an attempt with another identity, because its steps are not part of this result.
    """
    for index in reversed(range(len(older))):
        attempt = older[index]
        if attempt.identity != identity:
            return None
        if attempt.last_step is not None:
            return index if attempt.lost_steps is None else None
    return None
