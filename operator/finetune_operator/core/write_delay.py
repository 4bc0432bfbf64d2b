"""Which changes of the status are worth a write at once: pure.

A stage that takes a second would otherwise cost three writes: its Job was created, its process started, it ended. Times
and progress of a young attempt wait and are written with the next change.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta

from finetune_operator.api.conditions import Reason
from finetune_operator.api.status import (
    AttemptStatus,
    PipelineStatus,
    StageState,
    StageStatus,
)

STARTING = frozenset({StageState.QUEUED, StageState.RUNNING})


def time_until_write(
    before: PipelineStatus, after: PipelineStatus, delay: timedelta, now: datetime
) -> timedelta | None:
    """Return after how long the status is to be written: zero is now, None is never because nothing has changed."""
    if before == after:
        return None
    pairs = zip(_essence(before), _essence(after), strict=True)
    if any(old != new for old, new in pairs):
        return timedelta()
    waits = (
        _remaining(attempt, delay, now) for attempt in after.running_attempts().values()
    )
    return min(waits, default=timedelta())


def _remaining(attempt: AttemptStatus, delay: timedelta, now: datetime) -> timedelta:
    began = attempt.started_at or attempt.created_at or now
    age = now - began
    # A time in the future was taken from a clock that is ahead: nothing can be waited for.
    if timedelta() <= age < delay:
        return delay - age
    return timedelta()


def _essence(status: PipelineStatus) -> Iterator[object]:
    """Yield everything but the times and the progress of running attempts; first what differs most often."""
    yield [
        (
            condition.type,
            condition.status,
            condition.reason,
            _message(condition.reason, condition.message),
        )
        for condition in status.conditions
    ]
    yield (
        status.observed_generation,
        status.observed_version,
        status.finished_at,
        status.cancelled,
        status.observed_annotations,
    )
    yield status.gates, status.model, status.refusals, status.interruptions
    yield [(name, *_stage_essence(stage)) for name, stage in status.stages.items()]


def _stage_essence(stage: StageStatus) -> tuple[object, ...]:
    # Queued and running differ by the start of the process, which is worth no write of its own.
    state = StageState.RUNNING if stage.state in STARTING else stage.state
    return (
        (
            stage.identity,
            stage.execution,
            stage.reason,
            _message(stage.reason, stage.message),
        ),
        state,
        (
            stage.failures,
            stage.interruptions,
            stage.active_seconds,
            stage.result is None,
            stage.model_digest,
            stage.model_pin,
            stage.start_digest,
            stage.start_pin,
        ),
        (
            stage.budget_base_attempt,
            stage.budget_base_failures,
            stage.budget_base_interruptions,
        ),
        [
            (attempt.number, attempt.job, attempt.outcome, attempt.stopping)
            for attempt in stage.attempts
        ],
    )


def _message(reason: Reason, message: str) -> str:
    # The message of progress changes with every report.
    return "" if reason is Reason.PROGRESSING else message
