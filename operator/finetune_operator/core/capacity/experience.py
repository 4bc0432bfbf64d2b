"""The experience of a stage: measurements of its attempts that the choice of nodes needs. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import NamedTuple

from finetune_operator.api.conditions import Reason
from finetune_operator.api.placement import AUTO, SPOT, PlacementDefaults
from finetune_operator.api.spec import STAGES, PipelineSpec
from finetune_operator.api.stages.base import StageSpec
from finetune_operator.api.status import AttemptStatus, Outcome, StageStatus
from finetune_operator.core.attempts.costs import running_seconds, seconds_until
from finetune_operator.core.attempts.history import (
    interrupted_in_a_row,
    made_durable_step,
)
from finetune_operator.core.capacity.decision import (
    Cause,
    Experience,
    Limits,
    NodeGroup,
)
from finetune_operator.core.capacity.policy import HOUR, reason_to_give_up

STEPS_TO_MEASURE = 10
"""Steps after which the speed of an attempt counts as measured."""
# A timedelta holds a few thousand years, and a process may report any numbers.
LONGEST_SECONDS = 1e9
"""Longest duration that is calculated with: 30 years."""
# The stop of the attempt before belongs to a restart, up to its grace period.
SHORTEST_RESTART = timedelta(minutes=1)
"""Shortest restart that is calculated with."""


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
    statuses: Mapping[str, StageStatus],
    defaults: PlacementDefaults,
    now: datetime,
) -> Experience:
    """Return the experience of a stage. `statuses` has the status of each stage by its name."""
    status = statuses[spec.name]
    current = [
        attempt for attempt in status.attempts if attempt.identity == status.identity
    ]
    on_spot = [
        attempt
        for attempt in status.attempts
        if attempt.capacity == SPOT and attempt.started_at
    ]
    duration = _duration(spec, current, now)
    # A requested capacity is kept whatever the deadline: another class of it costs nothing but its price.
    deadline = None
    if pipeline.deadline and spec.placement.capacity == AUTO:
        deadline = pipeline.deadline - now
    experience = Experience(
        total=duration.total,
        remaining=duration.remaining,
        measured=duration.measured,
        restart=_restart(
            spec, current, timedelta(seconds=defaults.restart_seconds), now
        ),
        loss=_longest_loss(spec, current, duration.total),
        interruptions=sum(
            attempt.outcome is Outcome.INTERRUPTED for attempt in on_spot
        ),
        spot_time=timedelta(seconds=sum(_seconds(attempt, now) for attempt in on_spot)),
        on_demand_attempts=_on_demand_in_a_row(status),
        deadline=deadline,
        later_stages=_later_stages(pipeline, spec, statuses),
        interruptions_left=spec.max_interruptions - status.interruptions_counted,
    )
    given_up = _given_up(status, experience, limits_of(spec, defaults), now)
    return replace(experience, given_up=dict(given_up))


class _Duration(NamedTuple):
    """The running time of a stage."""

    total: timedelta | None
    remaining: timedelta | None
    measured: bool
    """Whether both are from the stage's own speed. Else they are an estimate."""


def _duration(
    spec: StageSpec, current: Sequence[AttemptStatus], now: datetime
) -> _Duration:
    """Return the running time of the whole stage and of the rest."""
    for attempt in reversed(current):
        if _has_measured(attempt):
            return _duration_by_speed(attempt, current, measured=True)
    expected = spec.placement.expected_seconds
    if not expected:
        return _Duration(None, None, measured=False)
    # Time without a durable step brought the stage no further.
    useful = [
        _seconds(attempt, now)
        for attempt in current
        if _durable_step(attempt) > (attempt.start_step or 0)
    ]
    rest = expected - sum(useful)
    if rest > 0:
        return _Duration(_time(expected), _time(rest), measured=False)
    # A few steps say more than an estimate that is used up.
    for attempt in reversed(current):
        if _has_speed(attempt) and _steps_of(attempt) > 0:
            return _duration_by_speed(attempt, current, measured=False)
    return _Duration(_time(expected), None, measured=False)


def _duration_by_speed(
    attempt: AttemptStatus, current: Sequence[AttemptStatus], *, measured: bool
) -> _Duration:
    """Return the running time of the whole stage and of the rest, at the speed of an attempt."""
    seconds = attempt.step_seconds or 0.0
    total = attempt.total_steps or 0
    durable = max((_durable_step(earlier) for earlier in current), default=0)
    return _Duration(
        _time(seconds * total), _time(seconds * (total - durable)), measured
    )


def _steps_of(attempt: AttemptStatus) -> int:
    return (attempt.last_step or 0) - (attempt.start_step or 0)


def _has_measured(attempt: AttemptStatus) -> bool:
    """Return whether the attempt has made enough steps: the first may be faster or slower than the rest."""
    needed = min(STEPS_TO_MEASURE, attempt.total_steps or 0)
    return _has_speed(attempt) and _steps_of(attempt) >= needed


def _has_speed(attempt: AttemptStatus) -> bool:
    has_time = attempt.step_seconds is not None and attempt.step_seconds > 0
    return has_time and bool(attempt.total_steps)


def _time(seconds: float) -> timedelta:
    """Return a duration within the bounds of a timedelta."""
    return timedelta(seconds=min(max(0.0, seconds), LONGEST_SECONDS))


def _durable_step(attempt: AttemptStatus) -> int:
    """Return the step after which another attempt would go on."""
    step = max(attempt.saved_step or 0, attempt.start_step or 0)
    # A running attempt saves its last step when it is stopped.
    if attempt.outcome is Outcome.RUNNING:
        return max(step, attempt.last_step or 0)
    return step


def _restart(
    spec: StageSpec,
    current: Sequence[AttemptStatus],
    otherwise: timedelta,
    now: datetime,
) -> timedelta:
    """Return the shortest measured time of an attempt without steps: before its process started, and in it.

    The shortest, because validation and checkpoints take time without steps, too. `otherwise` is the platform's
    setting.
    """
    measured = list(_measured_restarts(current, otherwise, now))
    # Another program than the trainer may report no steps at all.
    if measured or not trains(spec):
        return max(min(measured, default=otherwise), SHORTEST_RESTART)
    # An attempt that ended before its first step shows that a restart takes longer than the attempt ran.
    without_step = [
        _time(_seconds(attempt, now))
        for attempt in current
        if _steps_of(attempt) <= 0 and not attempt.saved_step
    ]
    return max(otherwise, SHORTEST_RESTART, *without_step)


def _measured_restarts(
    current: Sequence[AttemptStatus], otherwise: timedelta, now: datetime
) -> Iterator[timedelta]:
    for attempt in current:
        if (
            not attempt.created_at
            or not attempt.started_at
            or not _has_measured(attempt)
        ):
            continue
        steps = _steps_of(attempt) * (attempt.step_seconds or 0.0)
        # The time before its process started may have been a wait for capacity or quota.
        before = min(attempt.started_at - attempt.created_at, otherwise)
        yield before + _time(_seconds(attempt, now) - steps)


def _longest_loss(
    spec: StageSpec, current: Sequence[AttemptStatus], total: timedelta | None
) -> timedelta:
    """Return the most work that an interruption loses: the time between two checkpoints, or the largest loss so far.

    An interruption with notice loses nothing, which says nothing about the next interruption.
    """
    # Without checkpoints, all work may be lost.
    interval = total
    if saves(spec, current) and spec.checkpoint_interval:
        interval = spec.checkpoint_interval
    lost = [_time(attempt.lost_seconds or 0.0) for attempt in current]
    return max(interval or timedelta(), *lost, timedelta())


def saves(spec: StageSpec, current: Sequence[AttemptStatus]) -> bool:
    """Return whether the stage saves checkpoints: the trainer does, and another program if it has reported one."""
    return trains(spec) or any(attempt.saved_step is not None for attempt in current)


def trains(spec: StageSpec) -> bool:
    """Return whether the stage runs the trainer, which saves checkpoints and reports its steps."""
    return spec.checkpoint_interval is not None and not spec.pod.command


def _on_demand_in_a_row(status: StageStatus) -> int:
    """Return how many attempts on on-demand nodes have begun since the last attempt that ran on spot nodes."""
    count = 0
    for attempt in reversed(_counted(status)):
        if attempt.capacity == SPOT and attempt.started_at:
            break
        has_run = attempt.started_at is not None or attempt.outcome is Outcome.RUNNING
        if attempt.capacity != SPOT and has_run:
            count += 1
    return count


def _given_up(
    status: StageStatus, experience: Experience, limits: Limits, now: datetime
) -> Iterator[tuple[NodeGroup, Cause]]:
    """Yield the nodes that are not tried for a while, in the order in which the stage gave them up.

    An attempt that was moved back to spot nodes ends that while.
    """
    by_nodes: dict[NodeGroup, list[AttemptStatus]] = {}
    for attempt in _since_return(_counted(status)):
        if attempt.outcome is not Outcome.RUNNING:
            by_nodes.setdefault(nodes_of(attempt), []).append(attempt)
    for attempts in sorted(by_nodes.values(), key=lambda attempts: attempts[-1].number):
        cause = _cause(attempts, status, experience, limits)
        last = attempts[-1]
        if cause is None:
            continue
        # Only a wait that was not for nodes counts: several full classes would forget one another in turn.
        later = [attempt for attempt in status.attempts if attempt.number > last.number]
        has_run = any(attempt.started_at for attempt in later)
        if not has_run or now - (last.finished_at or now) < limits.return_after:
            yield nodes_of(last), cause


def _since_return(attempts: Sequence[AttemptStatus]) -> Sequence[AttemptStatus]:
    """Return the attempts after the last that was moved back to spot nodes."""
    start = 0
    for number, attempt in enumerate(attempts, 1):
        if attempt.stopping is Reason.PLACEMENT_CHANGED:
            start = number
    return attempts[start:]


def wait_of(status: StageStatus, nodes: NodeGroup) -> timedelta:
    """Return how long the last attempt on these nodes existed that ended without a node; zero if none did."""
    for attempt in reversed(_counted(status)):
        if (
            nodes_of(attempt) != nodes
            or attempt.stopping is not Reason.WAITING_FOR_CAPACITY
        ):
            continue
        if attempt.finished_at and attempt.created_at:
            return attempt.finished_at - attempt.created_at
    return timedelta()


def nodes_of(attempt: AttemptStatus) -> NodeGroup:
    """Return the nodes that were chosen for an attempt."""
    return NodeGroup(attempt.capacity or "", attempt.node_class)


def _counted(status: StageStatus) -> list[AttemptStatus]:
    """Return the attempts since the last retry request or change of the spec."""
    return [
        attempt
        for attempt in status.attempts
        if attempt.capacity and status.counts(attempt)
    ]


def _cause(
    attempts: Sequence[AttemptStatus],
    status: StageStatus,
    experience: Experience,
    limits: Limits,
) -> Cause | None:
    """Return why a node class is given up after these attempts on it, or None."""
    if attempts[-1].stopping is Reason.WAITING_FOR_CAPACITY:
        return Cause.NO_CAPACITY
    short = interrupted_in_a_row(attempts, _was_short)
    fruitless = interrupted_in_a_row(
        attempts, lambda attempt: not made_durable_step(attempt, status.attempts)
    )
    return reason_to_give_up(short, fruitless, experience, limits)


def _was_short(attempt: AttemptStatus) -> bool:
    return timedelta(seconds=running_seconds(attempt)) < HOUR


def _seconds(attempt: AttemptStatus, now: datetime) -> float:
    if attempt.outcome is Outcome.RUNNING and attempt.started_at:
        return max(0.0, seconds_until(now, attempt))
    return running_seconds(attempt)


def _later_stages(
    pipeline: PipelineSpec, spec: StageSpec, statuses: Mapping[str, StageStatus]
) -> timedelta:
    """Return the expected running time of the stages after this one, as far as the user has given it."""
    order = [kind.name for kind in STAGES]
    seconds = 0
    for name in order[order.index(spec.name) + 1 :]:
        later = pipeline.stage(name)
        if later and statuses[name].result is None:
            seconds += later.placement.expected_seconds or 0
    return timedelta(seconds=seconds)
