"""What the attempts of a stage have lived through, as far as the choice of capacity needs it. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from finetune_operator.api.conditions import Reason
from finetune_operator.api.placement import AUTO, SPOT, PlacementDefaults
from finetune_operator.api.spec import STAGES, PipelineSpec
from finetune_operator.api.stages.base import StageSpec
from finetune_operator.api.status import AttemptStatus, Outcome, StageStatus
from finetune_operator.core.auto import HOUR, Cause, Experience, Limits, reason_to_give_up
from finetune_operator.core.costs import running_seconds
from finetune_operator.core.history import interrupted_in_a_row, made_durable_step
from finetune_operator.core.placement import any_nodes

STEPS_TO_MEASURE = 10
"""Steps after which the speed of an attempt counts as measured."""
LONGEST_SECONDS = 1e9
"""Longest duration that is calculated with, 30 years: a timedelta holds no more than a few thousand."""
SHORTEST_RESTART = timedelta(minutes=1)
"""Shortest restart that is calculated with: the stop of the attempt before, up to its grace period, belongs to it."""


def limits_of(spec: StageSpec, defaults: PlacementDefaults) -> Limits:
    """Return when the stage gives up a node class."""
    fallback = spec.placement.fallback
    pending = fallback.after_pending_seconds
    return Limits(
        interruptions=fallback.after_interruptions,
        pending=None if pending is None else timedelta(seconds=pending),
        fruitless=fallback.after_fruitless_attempts,
        short_stage=timedelta(seconds=defaults.short_stage_seconds),
        return_after=timedelta(seconds=defaults.return_seconds),
    )


def experience_of(
    pipeline: PipelineSpec,
    spec: StageSpec,
    statuses: Callable[[str], StageStatus],
    defaults: PlacementDefaults,
    now: datetime,
) -> Experience:
    """Return the experience of a stage. `statuses` returns the status of each stage by name."""
    status = statuses(spec.name)
    current = [one for one in status.attempts if one.identity == status.identity]
    on_spot = [one for one in status.attempts if one.capacity == SPOT and one.started_at]
    total, remaining, measured = _durations(spec, current, now)
    experience = Experience(
        total=total,
        remaining=remaining,
        measured=measured,
        restart=_restart(spec, current, timedelta(seconds=defaults.restart_seconds), now),
        loss=_longest_loss(spec, current, total),
        interruptions=sum(one.outcome is Outcome.INTERRUPTED for one in on_spot),
        spot_time=timedelta(seconds=sum(_seconds(one, now) for one in on_spot)),
        on_demand_attempts=_on_demand_in_a_row(status),
        # A requested capacity is kept whatever the deadline: another class of it costs nothing but its price.
        deadline=pipeline.deadline - now
        if pipeline.deadline and spec.placement.capacity == AUTO
        else None,
        later_stages=_later_stages(pipeline, spec, statuses),
        interruptions_left=spec.max_interruptions - status.interruptions_counted,
    )
    return replace(
        experience, given_up=dict(_given_up(status, experience, limits_of(spec, defaults), now))
    )


def _durations(
    spec: StageSpec, current: Sequence[AttemptStatus], now: datetime
) -> tuple[timedelta | None, timedelta | None, bool]:
    """Return the running time of the whole stage and of the rest, and whether they are measured or only expected."""
    newest = next((one for one in reversed(current) if _has_measured(one)), None)
    if newest:
        return *_by_speed(newest, current), True
    expected = spec.placement.expected_seconds or 0
    rest = expected - sum(
        _seconds(one, now) for one in current if _durable_step(one) > (one.start_step or 0)
    )
    if rest > 0:
        return _time(expected), _time(rest), False
    if not expected:
        return None, None, False
    # A few steps say more than an estimate that is used up.
    stepped = next(
        (one for one in reversed(current) if _has_speed(one) and _steps_of(one) > 0), None
    )
    return (*_by_speed(stepped, current), False) if stepped else (_time(expected), None, False)


def _by_speed(
    measured: AttemptStatus, current: Sequence[AttemptStatus]
) -> tuple[timedelta, timedelta]:
    """Return the running time of the whole stage and of the rest, at the speed of an attempt."""
    seconds, total = measured.step_seconds or 0.0, measured.total_steps or 0
    left = total - max((_durable_step(one) for one in current), default=0)
    return _time(seconds * total), _time(seconds * left)


def _steps_of(attempt: AttemptStatus) -> int:
    return (attempt.last_step or 0) - (attempt.start_step or 0)


def _has_measured(attempt: AttemptStatus) -> bool:
    """Return whether the attempt's speed is to be believed: the first steps may be faster or slower than the rest."""
    return _has_speed(attempt) and _steps_of(attempt) >= min(
        STEPS_TO_MEASURE, attempt.total_steps or 0
    )


def _has_speed(attempt: AttemptStatus) -> bool:
    return (
        attempt.step_seconds is not None and attempt.step_seconds > 0 and bool(attempt.total_steps)
    )


def _time(seconds: float) -> timedelta:
    """Return a duration; a process may report any numbers."""
    return timedelta(seconds=min(max(0.0, seconds), LONGEST_SECONDS))


def _durable_step(attempt: AttemptStatus) -> int:
    """Return the step after which another attempt would go on: a running attempt saves it when it is stopped."""
    running = attempt.outcome is Outcome.RUNNING
    return max(
        (attempt.last_step if running else None) or 0,
        attempt.saved_step or 0,
        attempt.start_step or 0,
    )


def _restart(
    spec: StageSpec, current: Sequence[AttemptStatus], otherwise: timedelta, now: datetime
) -> timedelta:
    """Return the shortest measured time of an attempt without steps: before its process started, and in it.

    The shortest, because validation and checkpoints take time without steps, too. Until there is one, an attempt that
    ended before its first step shows that a restart takes longer than it ran. Another program than the trainer may
    report no steps at all.
    """
    measured = list(_measured_restarts(current, otherwise, now))
    if measured or not trains(spec):
        return max(min(measured, default=otherwise), SHORTEST_RESTART)
    without_step = (one for one in current if _steps_of(one) <= 0 and not one.saved_step)
    return max(otherwise, SHORTEST_RESTART, *(_time(_seconds(one, now)) for one in without_step))


def _measured_restarts(
    current: Sequence[AttemptStatus], otherwise: timedelta, now: datetime
) -> Iterator[timedelta]:
    for one in current:
        if not one.created_at or not one.started_at or not _has_measured(one):
            continue
        steps = _steps_of(one) * (one.step_seconds or 0.0)
        # The time before its process started may have been a wait for capacity or quota.
        before = min(one.started_at - one.created_at, otherwise)
        yield before + _time(_seconds(one, now) - steps)


def _longest_loss(
    spec: StageSpec, current: Sequence[AttemptStatus], total: timedelta | None
) -> timedelta:
    """Return the most work that an interruption loses: the time between two checkpoints, or what one has lost.

    An interruption with notice loses nothing, which says nothing of the next one.
    """
    interval = spec.checkpoint_interval if saves(spec, current) else None
    return max(
        interval or total or timedelta(),
        *(_time(one.lost_seconds or 0.0) for one in current),
        timedelta(),
    )


def saves(spec: StageSpec, current: Sequence[AttemptStatus]) -> bool:
    """Return whether the stage saves checkpoints: the trainer does, another program that has reported one."""
    return trains(spec) or any(one.saved_step is not None for one in current)


def trains(spec: StageSpec) -> bool:
    """Return whether the stage runs the trainer, which saves checkpoints and reports its steps."""
    return spec.checkpoint_interval is not None and not spec.pod.command


def _on_demand_in_a_row(status: StageStatus) -> int:
    """Return how many attempts on other nodes have begun since the last one that ran on spot nodes."""
    count = 0
    for one in reversed(_counted(status)):
        if one.capacity == SPOT and one.started_at:
            break
        has_run = one.started_at is not None or one.outcome is Outcome.RUNNING
        count += one.capacity != SPOT and has_run
    return count


def _given_up(
    status: StageStatus, experience: Experience, limits: Limits, now: datetime
) -> Iterator[tuple[str, Cause]]:
    """Yield the node classes that are not tried for a while, in the order in which they were given up.

    An attempt that was moved back to spot nodes ends that while.
    """
    by_class: dict[str, list[AttemptStatus]] = {}
    for attempt in _since_return(_counted(status)):
        if attempt.outcome is not Outcome.RUNNING:
            by_class.setdefault(class_of(attempt), []).append(attempt)
    causes = (
        (attempts[-1], _cause(attempts, status, experience, limits))
        for attempts in by_class.values()
    )
    found = ((last, cause) for last, cause in causes if cause)
    for last, cause in sorted(found, key=lambda one: one[0].number):
        # Only a wait that was not for nodes counts: several full classes would forget one another in turn.
        has_run = any(one.started_at and one.number > last.number for one in status.attempts)
        if not has_run or now - (last.finished_at or now) < limits.return_after:
            yield class_of(last), cause


def _since_return(attempts: Sequence[AttemptStatus]) -> Sequence[AttemptStatus]:
    moved = [
        number for number, one in enumerate(attempts) if one.stopping is Reason.PLACEMENT_CHANGED
    ]
    return attempts[moved[-1] + 1 :] if moved else attempts


def wait_of(status: StageStatus, node_class: str) -> timedelta:
    """Return how long the last attempt on a node class existed that ended without a node; zero where none did."""
    waits = (
        one.finished_at - one.created_at
        for one in reversed(_counted(status))
        if class_of(one) == node_class and one.stopping is Reason.WAITING_FOR_CAPACITY
        if one.finished_at and one.created_at
    )
    return next(waits, timedelta())


def class_of(attempt: AttemptStatus) -> str:
    """Return the name of an attempt's node class, or what stands for it."""
    return attempt.node_class or any_nodes(attempt.capacity or "")


def _counted(status: StageStatus) -> list[AttemptStatus]:
    """Return the attempts since the last retry request or change of the spec."""
    return [one for one in status.attempts if one.capacity and status.counts(one)]


def _cause(
    attempts: Sequence[AttemptStatus], status: StageStatus, experience: Experience, limits: Limits
) -> Cause | None:
    """Return why a node class is given up after these attempts on it, or None."""
    if attempts[-1].stopping is Reason.WAITING_FOR_CAPACITY:
        return Cause.NO_CAPACITY
    fruitless = interrupted_in_a_row(
        attempts, lambda one: not made_durable_step(one, status.attempts)
    )
    return reason_to_give_up(
        interrupted_in_a_row(attempts, _was_short), fruitless, experience, limits
    )


def _was_short(attempt: AttemptStatus) -> bool:
    return timedelta(seconds=running_seconds(attempt)) < HOUR


def _seconds(attempt: AttemptStatus, now: datetime) -> float:
    if attempt.outcome is Outcome.RUNNING and attempt.started_at:
        return max(0.0, (now - attempt.started_at).total_seconds())
    return running_seconds(attempt)


def _later_stages(
    pipeline: PipelineSpec, spec: StageSpec, statuses: Callable[[str], StageStatus]
) -> timedelta:
    """Return the expected running time of the stages after this one, as far as the user has said it."""
    order = [kind.name for kind in STAGES]
    later = (pipeline.stage(name) for name in order[order.index(spec.name) + 1 :])
    seconds = (
        one.placement.expected_seconds or 0
        for one in later
        if one and statuses(one.name).result is None
    )
    return timedelta(seconds=sum(seconds))
