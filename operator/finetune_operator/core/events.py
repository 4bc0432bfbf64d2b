"""Events: the changes between two statuses, each reported once. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from finetune_operator.api.conditions import FINISHED, READY, Reason, link
from finetune_operator.api.status import (
    AttemptStatus,
    Outcome,
    PipelineStatus,
    PlacementStatus,
    StageState,
    StageStatus,
)
from finetune_operator.core.capacity.decision import Cause
from finetune_operator.core.report import ConditionStatus

ATTEMPT_STARTED = "AttemptStarted"
"""Reason of the event of a start on nodes that nothing is to be said about."""


@dataclass(frozen=True)
class Event:
    """One change, in the form of a Kubernetes Event."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str
    link: str = ""
    """End of the message that names the section of its reason in the documentation."""
    ordinary: bool = False
    """Whether conditions and other objects show it as well. A cluster stores no Kubernetes Event for it."""


def events_between(
    before: PipelineStatus, after: PipelineStatus, url: str
) -> tuple[Event, ...]:
    """Return the events for all changes between two statuses; equal statuses have none. They link to the page `url`."""
    events = [
        event
        for name, stage in after.stages.items()
        for event in _stage_events(name, before.stages.get(name), stage, url)
    ]
    if after.finished_at and _finished_condition(before) != _finished_condition(after):
        # A gate that is not passed is the answer the user asked for, and no fault.
        expected = after.phase in {"Succeeded", "BelowThreshold"}
        [ready] = [
            condition for condition in after.conditions if condition.type == READY
        ]
        # The message of the condition ends with the same link.
        more = link(ready.reason, url)
        message = ready.message.removesuffix(more)
        events.append(
            Event(
                "Normal" if expected else "Warning",
                f"Pipeline{after.phase}",
                message,
                more,
            )
        )
    return tuple(events)


def unreadable_event(message: str, url: str) -> Event:
    """Return the event of an object that the operator cannot read, with the message of its condition Ready."""
    return Event("Warning", "PipelineFailed", message, link(Reason.SPEC_INVALID, url))


def forbidden_event(problem: str) -> Event:
    """Return the event of a pipeline that waits because the API server forbids the operator a request."""
    return Event(
        "Warning",
        "OperatorForbidden",
        f"this pipeline waits: {problem}; the operator's role may lack a right, or a policy may forbid it: "
        "ask the platform team to allow it",
    )


def _started(subject: str, placement: PlacementStatus | None) -> Event:
    """Return the event of an attempt's start; a choice with a reason is worth a Kubernetes Event."""
    if placement is None or not placement.message:
        return Event("Normal", ATTEMPT_STARTED, subject, ordinary=True)
    if placement.cause == Cause.REQUESTED_DEARER:
        return Event("Warning", "SpotCostsMore", f"{subject}: {placement.message}")
    return Event("Normal", "CapacityChosen", f"{subject}: {placement.message}")


def _finished_condition(
    status: PipelineStatus,
) -> tuple[ConditionStatus, Reason] | None:
    """Return status and reason of the condition Finished.

    `finished_at` is not enough: an edit of the gate can change the outcome of a finished pipeline without any work.
    """
    for condition in status.conditions:
        if condition.type == FINISHED:
            return condition.status, condition.reason
    return None


def _stage_events(
    name: str, before: StageStatus | None, after: StageStatus, url: str
) -> Iterator[Event]:
    outcomes = {}
    if before:
        outcomes = {attempt.number: attempt.outcome for attempt in before.attempts}
    for attempt in after.attempts:
        if outcomes.get(attempt.number) is not attempt.outcome:
            yield _attempt_event(name, attempt, after.placement, url)
    ended = after.state in {StageState.FAILED, StageState.SKIPPED}
    if before and before.state is not after.state and ended:
        message = f"{name}: {after.message or after.reason}"
        failed = after.state is StageState.FAILED
        yield Event(
            "Warning" if failed else "Normal",
            f"Stage{after.state}",
            message,
            link(after.reason, url),
        )


def _attempt_event(
    stage: str, attempt: AttemptStatus, placement: PlacementStatus | None, url: str
) -> Event:
    """Return the event of an attempt that has started or ended."""
    subject = f"{stage} attempt {attempt.number}"
    message = f"{subject}: {attempt.message or attempt.reason}"
    match attempt.outcome:
        case Outcome.RUNNING:
            return _started(subject, placement)
        case Outcome.SUCCEEDED:
            return Event("Normal", "StageSucceeded", subject, ordinary=True)
        case Outcome.INTERRUPTED | Outcome.STOPPED:
            return Event("Normal", f"Attempt{attempt.outcome}", message)
        case Outcome.FAILED:
            return Event("Warning", "AttemptFailed", message, link(attempt.reason, url))
