"""The history of a stage: its attempts, their costs and the counters, carried from one reconcile to the next."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import takewhile

from finetune_operator.api.conditions import Reason
from finetune_operator.api.status import (
    ATTEMPTS_KEPT,
    AttemptStatus,
    Outcome,
    PlacementStatus,
    StageState,
    StageStatus,
)
from finetune_operator.core.costs import drop_oldest, running_seconds, with_costs
from finetune_operator.core.endings import result_of, update_attempt
from finetune_operator.core.observation import ObservedJob, ObservedServer
from finetune_trainer.contract import DeployResult, PrepareResult, Progress

REQUESTED = frozenset(
    {
        Reason.CANCELLED,
        Reason.DEADLINE_EXCEEDED,
        Reason.PLACEMENT_CHANGED,
        Reason.SPEC_CHANGED,
        Reason.SUSPENDED,
    }
)
"""Why an attempt is stopped whose pods could start."""


def record_attempts(
    before: StageStatus, jobs: Mapping[str, ObservedJob], now: datetime
) -> StageStatus:
    """Update the running attempt from its observed Job. Count its outcome once, at the moment when it ends."""
    running = before.running_attempt
    if running is None:
        return before
    job = jobs.get(running.job)
    updated = update_attempt(running, job, now)
    status = before.model_copy(
        update={
            "attempts": (*before.attempts[:-1], updated),
            "started_at": before.started_at or updated.started_at,
            **(_progress(before, running, job.progress) if job and job.progress else {}),
        }
    )
    status = with_costs(_settle_lost_steps(status))
    return (
        _count_outcome(status, updated, job) if updated.outcome is not Outcome.RUNNING else status
    )


def _progress(before: StageStatus, running: AttemptStatus, progress: Progress) -> dict[str, object]:
    """Return the fields of a report: the curve apart, because it outlives the attempt."""
    # The curve of an attempt that is being stopped, because the spec has changed, is that of another training.
    curve = progress.loss_curve if running.identity == before.identity else None
    return {
        "progress": progress.model_copy(update={"loss_curve": None}),
        "loss_curve": curve or before.loss_curve,
    }


def reset_if_changed(status: StageStatus, identity: str, execution: str) -> StageStatus:
    """Return a new status if the identity changed, or fresh retry budgets if only the execution changed."""
    if status.identity != identity:
        # The attempts are kept although they had another identity: their numbers must not be reused.
        return StageStatus(
            identity=identity,
            execution=execution,
            attempts=status.attempts,
            costs=status.costs,
            earlier_costs=status.earlier_costs,
            budget_base_attempt=_last_attempt_number(status),
        ).with_unknown_fields_of(status)
    if status.execution != execution:
        reset = {"execution": execution, "placement": None}
        return _reset_baseline(status, _last_attempt_number(status)).model_copy(update=reset)
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


def fruitless_interruptions(status: StageStatus) -> int:
    """Return how many of the newest attempts in a row were interrupted before they made a new durable step.

    Attempts before a retry request or a change of the spec do not count.
    """
    counted = [one for one in status.attempts if status.counts(one)]
    return interrupted_in_a_row(counted, lambda one: not made_durable_step(one, status.attempts))


def releases_in_a_row(status: StageStatus) -> int:
    """Return how many of the newest attempts in a row were stopped because not all of their pods could start."""
    counted = (one for one in reversed(status.attempts) if status.counts(one))
    run = takewhile(
        lambda one: one.stopping and one.stopping not in REQUESTED and one.started_at is None,
        counted,
    )
    return sum(1 for _ in run)


def interrupted_in_a_row(
    attempts: Sequence[AttemptStatus], matches: Callable[[AttemptStatus], bool]
) -> int:
    """Return how many of the newest attempts were interrupted and match."""
    run = takewhile(
        lambda one: one.outcome is Outcome.INTERRUPTED and matches(one), reversed(attempts)
    )
    return sum(1 for _ in run)


def made_durable_step(attempt: AttemptStatus, attempts: Iterable[AttemptStatus]) -> bool:
    """Return whether an attempt of these has saved a step beyond the one at which it began."""
    if attempt.saved_step is None:
        return False
    if attempt.start_step is not None:
        return attempt.saved_step > attempt.start_step
    # Its progress was never read. The step at which it resumed is the newest that was durable before it.
    earlier = (
        one for one in attempts if one.number < attempt.number and one.identity == attempt.identity
    )
    saved = (one.saved_step or 0 for one in earlier)
    return attempt.saved_step > max(saved, default=0)


def start_attempt(
    status: StageStatus, attempt: AttemptStatus, placement: PlacementStatus | None
) -> StageStatus:
    """Record the next attempt, before its Job is created."""
    started = status.model_copy(
        update={
            "attempts": (*status.attempts, attempt),
            "placement": placement,
            "progress": None,
            "state": StageState.QUEUED,
        }
    )
    return drop_oldest(started, ATTEMPTS_KEPT)


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


def _count_outcome(
    status: StageStatus, ended: AttemptStatus, job: ObservedJob | None
) -> StageStatus:
    counts, current = status.counts(ended), ended.identity == status.identity
    counted: dict[str, object] = {
        "failures": status.failures + (counts and ended.outcome is Outcome.FAILED),
        "interruptions": status.interruptions + (counts and ended.outcome is Outcome.INTERRUPTED),
        "active_seconds": status.active_seconds + (running_seconds(ended) if current else 0.0),
    }
    result = result_of(ended, job) if job else None
    if result and current:
        counted |= {"result": result, "finished_at": ended.finished_at}
        if isinstance(result, PrepareResult):
            counted |= {"model_digest": result.model_digest, "model_pin": result.model_pin}
            counted |= {"start_digest": result.start_digest, "start_pin": result.start_pin}
    return status.model_copy(update=counted)


def _settle_lost_steps(status: StageStatus) -> StageStatus:
    """Compute the lost steps of earlier attempts, as soon as the last one reports its start step.

    An attempt has lost those of its steps that are beyond it. A later attempt may begin even earlier, where two
    checkpoints were damaged; then more is lost of the attempts before it, too.
    """
    *older, last = status.attempts
    if last.start_step is None:
        return status
    settled = [
        _settle(attempt, last, last.start_step)
        for attempt in _with_durable_end(older, last, last.start_step)
    ]
    new = [(now, before) for now, before in zip(settled, older, strict=True) if now is not before]
    return status.model_copy(
        update={
            "attempts": (*settled, last),
            "lost_steps": status.lost_steps
            + sum((now.lost_steps or 0) - (was.lost_steps or 0) for now, was in new),
            "lost_seconds": status.lost_seconds
            + sum((now.lost_seconds or 0.0) - (was.lost_seconds or 0.0) for now, was in new),
        }
    )


def _with_durable_end(
    older: Sequence[AttemptStatus], last: AttemptStatus, start: int
) -> Sequence[AttemptStatus]:
    """Return the older attempts; the newest that ran has made at least the steps with which the last one begins.

    Its progress may have been read long before it was killed.
    """
    before = next((one for one in reversed(older) if one.started_at), None)
    if before is None or before.identity != last.identity or before.start_step is None:
        return older
    if before.last_step is None or before.last_step >= start:
        return older
    reached = before.model_copy(update={"last_step": start, "saved_step": start})
    return [reached if one is before else one for one in older]


def _settle(attempt: AttemptStatus, last: AttemptStatus, start: int) -> AttemptStatus:
    """Return the attempt with its lost steps if the last one begins at this step; the same one if nothing changes."""
    if attempt.identity != last.identity or attempt.last_step is None:
        return attempt
    lost = max(0, attempt.lost_steps or 0, attempt.last_step - max(attempt.start_step or 0, start))
    if lost == attempt.lost_steps:
        return attempt
    seconds = round(lost * (attempt.step_seconds or 0.0), 3)
    return attempt.model_copy(update={"lost_steps": lost, "lost_seconds": seconds})
