"""The history of a stage: its attempts, their costs and the counters, carried from one reconcile to the next."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import takewhile

from finetune_operator.api.conditions import Reason
from finetune_operator.api.status import (
    ATTEMPTS_KEPT,
    AttemptStatus,
    Begun,
    Outcome,
    PlacementStatus,
    StageState,
    StageStatus,
    truncate_message,
)
from finetune_operator.core.attempts.costs import (
    drop_oldest,
    running_seconds,
    seconds_until,
    with_costs,
)
from finetune_operator.core.attempts.endings import result_of, update_attempt
from finetune_operator.core.attempts.pending import blocked_at
from finetune_operator.core.identity import identity_of
from finetune_operator.core.observation import Blocker, ObservedJob, ObservedServer
from finetune_trainer.contract import (
    RESULTS_VERSION,
    DeployResult,
    PrepareResult,
    Progress,
)

# Anything else that stops an attempt before its start concerns its nodes.
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


def active_time(status: StageStatus, now: datetime) -> timedelta:
    """Return the running time of a stage's attempts with its current identity, including the running attempt."""
    ended = timedelta(seconds=status.active_seconds)
    last = status.last_attempt
    # A superseded attempt that is slow to stop has another identity and must not use up the new one's time.
    if (
        last
        and last.started_at
        and last.finished_at is None
        and last.identity == status.identity
    ):
        return ended + timedelta(seconds=seconds_until(now, last))
    return ended


def record_attempts(
    before: StageStatus,
    jobs: Mapping[str, ObservedJob],
    now: datetime,
    refusal: Blocker | None = None,
) -> StageStatus:
    """Update the running attempt from its observed Job. Count its outcome once, at the moment when it ends.

    `refusal` is why the API server last refused the Job.
    """
    running = before.running_attempt
    if running is None:
        return before
    job = jobs.get(running.job)
    updated = update_attempt(running, job, now)
    since = blocked_at(running, job, refusal, now)
    if updated.outcome is not Outcome.RUNNING:
        since = None
    updated = updated.model_copy(update={"blocked_at": since})
    fields: dict[str, object] = {
        "attempts": (*before.attempts[:-1], updated),
        "started_at": before.started_at or updated.started_at,
    }
    if before.counts(updated):
        suspensions = updated.suspensions - running.suspensions
        fields["interruptions"] = before.interruptions + suspensions
    if job and job.progress:
        fields |= _progress(before, running, job.progress)
    # Lost steps first: what an attempt has cost in vain depends on them.
    status = with_costs(_settle_lost_steps(before.model_copy(update=fields)))
    if updated.outcome is Outcome.RUNNING:
        return status
    return _count_outcome(status, updated, job)


def _progress(
    before: StageStatus, running: AttemptStatus, progress: Progress
) -> dict[str, object]:
    """Return the fields of a progress report: the curve apart, because it outlives the attempt."""
    # If the spec has changed, an attempt that is being stopped reports the curve of another training.
    curve = progress.loss_curve if running.identity == before.identity else None
    return {
        "progress": progress.model_copy(update={"loss_curve": None}),
        "loss_curve": curve or before.loss_curve,
    }


def reset_if_changed(status: StageStatus, inputs: str, execution: str) -> StageStatus:
    """Return a new status if the inputs changed, or fresh retry budgets if only the execution changed."""
    if status.inputs != inputs:
        return begin_anew(status, inputs, execution)
    if status.execution != execution:
        reset = {"execution": execution, "placement": None}
        return _reset_baseline(status, _last_attempt_number(status)).model_copy(
            update=reset
        )
    return status


def begin_anew(status: StageStatus, inputs: str, execution: str) -> StageStatus:
    """Return the status of a stage that has another result to make."""
    # The attempts are kept although they had another identity: their numbers must not be reused.
    return StageStatus(
        identity=identity_of(inputs),
        inputs=inputs,
        results_version=RESULTS_VERSION,
        execution=execution,
        attempts=status.attempts,
        costs=status.costs,
        earlier_costs=status.earlier_costs,
        budget_base_attempt=_last_attempt_number(status),
    ).with_unknown_fields_of(status)


def reset_budgets(status: StageStatus, *, repeat: bool = False) -> StageStatus:
    """Reset the running time of a stage, and the retry budgets of a stage without a result.

    With `repeat`, a stage that is done runs again, to verify that its files are still there.
    """
    reset = status.model_copy(update={"active_seconds": 0.0})
    if repeat:
        reset = reset.model_copy(update={"result": None, "finished_at": None})
    if reset.result:
        return reset
    # Only ended attempts move into the baseline. A running attempt still counts when it ends.
    ended = [attempt.number for attempt in status.attempts if attempt.finished_at]
    return _reset_baseline(reset, max(ended, default=0))


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
    if not isinstance(status.result, DeployResult) or not status.result.long_running:
        return None
    return status.last_attempt.job if status.last_attempt else None


def drop_lost_server(
    status: StageStatus, servers: Mapping[str, ObservedServer]
) -> StageStatus:
    """Remove the result if it is a server that no longer exists, so that the stage runs again."""
    job = server_job(status)
    if job is None or job in servers:
        return status
    return status.model_copy(update={"result": None, "finished_at": None})


def fruitless_interruptions(status: StageStatus) -> int:
    """Return how many of the newest attempts in a row were interrupted before they made a new durable step.

    Attempts before a retry request or a change of the spec do not count.
    """
    counted = [attempt for attempt in status.attempts if status.counts(attempt)]
    return interrupted_in_a_row(
        counted, lambda attempt: not made_durable_step(attempt, status.attempts)
    )


def releases_in_a_row(status: StageStatus) -> int:
    """Return how many of the newest attempts in a row were stopped because not all of their pods could start."""
    counted = [attempt for attempt in status.attempts if status.counts(attempt)]
    return sum(1 for _ in takewhile(_was_released, reversed(counted)))


def _was_released(attempt: AttemptStatus) -> bool:
    """Return whether the attempt was stopped before its start, and not by a request of the user."""
    if attempt.stopping is None or attempt.started_at:
        return False
    return attempt.stopping not in REQUESTED


def interrupted_in_a_row(
    attempts: Sequence[AttemptStatus], matches: Callable[[AttemptStatus], bool]
) -> int:
    """Return how many of the newest attempts were interrupted and match."""
    count = 0
    for attempt in reversed(attempts):
        if attempt.outcome is not Outcome.INTERRUPTED or not matches(attempt):
            break
        count += 1
    return count


def made_durable_step(
    attempt: AttemptStatus, attempts: Iterable[AttemptStatus]
) -> bool:
    """Return whether an attempt of these has saved a step beyond the one at which it began."""
    if attempt.saved_step is None:
        return False
    if attempt.start_step is not None:
        return attempt.saved_step > attempt.start_step
    # Its progress was never read. The step at which it resumed is the newest that was durable before it.
    saved = [
        earlier.saved_step or 0
        for earlier in attempts
        if earlier.number < attempt.number and earlier.identity == attempt.identity
    ]
    return attempt.saved_step > max(saved, default=0)


def start_attempt(
    status: StageStatus,
    attempt: AttemptStatus,
    placement: PlacementStatus | None,
    begun: Begun,
) -> StageStatus:
    """Record the next attempt, before its Job is created. `begun` is kept from the first attempt of an identity."""
    started = status.model_copy(
        update={
            "attempts": (*status.attempts, attempt),
            "placement": placement,
            "begun": status.begun or begun,
            "progress": None,
            "state": StageState.QUEUED,
        }
    )
    return drop_oldest(started, ATTEMPTS_KEPT)


def mark_stopping(
    status: StageStatus, reason: Reason, message: str = ""
) -> StageStatus:
    """Record why the running attempt is stopped, before it is stopped. With a message, its end is a failure."""
    *older, last = status.attempts
    text = last.message or truncate_message(message)
    stopping = last.model_copy(update={"stopping": reason, "message": text})
    return status.model_copy(update={"attempts": (*older, stopping)})


def next_attempt_number(status: StageStatus) -> int:
    """Return a number that no attempt of this stage has had."""
    return _last_attempt_number(status) + 1


def _last_attempt_number(status: StageStatus) -> int:
    return status.last_attempt.number if status.last_attempt else 0


def _count_outcome(
    status: StageStatus, ended: AttemptStatus, job: ObservedJob | None
) -> StageStatus:
    fields: dict[str, object] = {}
    # An attempt before a retry request or a change of the spec is charged to no budget.
    if status.counts(ended):
        match ended.outcome:
            case Outcome.FAILED:
                fields["failures"] = status.failures + 1
            case Outcome.INTERRUPTED:
                fields["interruptions"] = status.interruptions + 1
            case _:
                pass
    # The time and result of a superseded attempt belong to another identity.
    if ended.identity == status.identity:
        fields["active_seconds"] = status.active_seconds + running_seconds(ended)
        result = result_of(ended, job) if job else None
        if result:
            fields |= {"result": result, "finished_at": ended.finished_at}
        if isinstance(result, PrepareResult):
            fields |= {
                "model_digest": result.model_digest,
                "model_pin": result.model_pin,
                "start_digest": result.start_digest,
                "start_pin": result.start_pin,
            }
    return status.model_copy(update=fields)


def _settle_lost_steps(status: StageStatus) -> StageStatus:
    """Compute the lost steps of earlier attempts, as soon as the last one reports its start step.

    An attempt has lost its steps beyond that start step. A later attempt may begin even earlier, if two checkpoints
    were damaged; then the attempts before it have lost more, too.
    """
    *older, last = status.attempts
    if last.start_step is None:
        return status
    settled = []
    lost_steps = status.lost_steps
    lost_seconds = status.lost_seconds
    for attempt in _with_durable_end(older, last, last.start_step):
        after = _settle(attempt, last, last.start_step)
        settled.append(after)
        lost_steps += (after.lost_steps or 0) - (attempt.lost_steps or 0)
        lost_seconds += (after.lost_seconds or 0.0) - (attempt.lost_seconds or 0.0)
    return status.model_copy(
        update={
            "attempts": (*settled, last),
            "lost_steps": lost_steps,
            "lost_seconds": lost_seconds,
        }
    )


def _with_durable_end(
    older: Sequence[AttemptStatus], last: AttemptStatus, start: int
) -> Sequence[AttemptStatus]:
    """Return the older attempts; the newest that ran has made at least the steps with which the last one begins.

    Its progress may have been read long before it was killed.
    """
    ran = [number for number, attempt in enumerate(older) if attempt.started_at]
    if not ran:
        return older
    before = older[ran[-1]]
    if before.identity != last.identity or before.start_step is None:
        return older
    if before.last_step is None or before.last_step >= start:
        return older
    corrected = list(older)
    corrected[ran[-1]] = before.model_copy(
        update={"last_step": start, "saved_step": start}
    )
    return corrected


def _settle(attempt: AttemptStatus, last: AttemptStatus, start: int) -> AttemptStatus:
    """Return the attempt with its lost steps if the last attempt begins at this step; itself if nothing changes."""
    if attempt.identity != last.identity or attempt.last_step is None:
        return attempt
    lost = max(
        0,
        attempt.lost_steps or 0,
        attempt.last_step - max(attempt.start_step or 0, start),
    )
    if lost == attempt.lost_steps:
        return attempt
    seconds = round(lost * (attempt.step_seconds or 0.0), 3)
    return attempt.model_copy(update={"lost_steps": lost, "lost_seconds": seconds})
