"""Events: what became true between two statuses, each once. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from finetune_operator.api.conditions import FINISHED, READY, Reason
from finetune_operator.api.status import Outcome, PipelineStatus, StageState, StageStatus
from finetune_operator.core.report import ConditionStatus


@dataclass(frozen=True)
class Event:
    """Something that has just become true."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def events_between(before: PipelineStatus, after: PipelineStatus) -> tuple[Event, ...]:
    """Give what became true between two statuses; nothing twice, and nothing from nothing."""
    found = [
        event for name, stage in after.stages.items() for event in _stage_events(name, before.stages.get(name), stage)
    ]
    if after.finished_at and _finished_condition(before) != _finished_condition(after):
        word: Literal["Normal", "Warning"] = "Normal" if after.phase in {"Succeeded", "BelowThreshold"} else "Warning"
        ready = next(c for c in after.conditions if c.type == READY)
        found.append(Event(word, f"Pipeline{after.phase}", ready.message))
    return tuple(found)


def _finished_condition(status: PipelineStatus) -> tuple[ConditionStatus, Reason] | None:
    """Give how it finished; a finished pipeline may come to another end at once, by an edit of its gate."""
    return next(((c.status, c.reason) for c in status.conditions if c.type == FINISHED), None)


def _stage_events(name: str, before: StageStatus | None, after: StageStatus) -> Iterator[Event]:
    outcomes = {attempt.number: attempt.outcome for attempt in before.attempts} if before else {}
    for attempt in after.attempts:
        was = outcomes.get(attempt.number)
        if was is attempt.outcome:
            continue
        words = f"{name} attempt {attempt.number}"
        match attempt.outcome:
            case Outcome.RUNNING:
                yield Event("Normal", "AttemptStarted", words)
            case Outcome.SUCCEEDED:
                yield Event("Normal", "StageSucceeded", words)
            case Outcome.INTERRUPTED | Outcome.STOPPED:
                yield Event("Normal", f"Attempt{attempt.outcome}", f"{words}: {attempt.message or attempt.reason}")
            case Outcome.FAILED:
                yield Event("Warning", "AttemptFailed", f"{words}: {attempt.message or attempt.reason}")
    if before and before.state is not after.state and after.state in {StageState.FAILED, StageState.SKIPPED}:
        kind: Literal["Normal", "Warning"] = "Warning" if after.state is StageState.FAILED else "Normal"
        yield Event(kind, f"Stage{after.state}", f"{name}: {after.message or after.reason}")
