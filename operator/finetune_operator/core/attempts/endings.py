"""How an attempt ended: the decision table that distinguishes an eviction from a bug."""

import string
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal

from finetune_operator.api.conditions import NEEDS_PERSON, Reason
from finetune_operator.api.status import AttemptStatus, Outcome, truncate_message
from finetune_operator.core.attempts.costs import seconds_until
from finetune_operator.core.observation import JobState, ObservedJob
from finetune_trainer.contract import AnyResult, ExitCode, Interruption, Progress

SIGNAL_EXIT_CODES = (137, 143)
"""Exit codes of a process that was ended by SIGKILL or SIGTERM: 128 + signal, as in a shell."""

PERMANENT_REASONS: dict[int, Reason] = {
    ExitCode.CONFIG: Reason.SPEC_INVALID,
    ExitCode.DATA: Reason.DATA_INVALID,
    ExitCode.NOT_FOUND: Reason.SOURCE_NOT_FOUND,
    ExitCode.CREDENTIALS: Reason.CREDENTIALS_REJECTED,
}
"""The reason of each permanent exit code."""

NON_RETRYABLE = frozenset(
    {
        *PERMANENT_REASONS.values(),
        Reason.EPHEMERAL_STORAGE_EXCEEDED,
        Reason.OUT_OF_MEMORY,
    }
)
"""Reasons after which a stage is not retried automatically: the next attempt would fail in the same way."""
FAILURES = (
    NON_RETRYABLE
    | NEEDS_PERSON
    | {
        Reason.DEVICE_FAILED,
        Reason.INIT_CONTAINER_FAILED,
        Reason.RESULT_MISSING,
        Reason.SOURCE_UNAVAILABLE,
        Reason.STAGE_FAILED,
    }
)
"""Every reason of an attempt that has failed."""
INTERRUPTIONS = frozenset(
    {
        Reason.DEVICE_FAILED,
        Reason.INTERRUPTED,
        Reason.JOB_DISAPPEARED,
        Reason.NODE_PRESSURE,
        Reason.RESULT_MISSING,
    }
)
"""Every reason of an attempt that was interrupted."""

ENDS = {
    Outcome.FAILED: "failed",
    Outcome.INTERRUPTED: "was interrupted",
    Outcome.STOPPED: "was stopped",
}
"""How an attempt ended that is tried again."""


@dataclass(frozen=True)
class Ending:
    """How an attempt ended, and why."""

    outcome: Outcome
    reason: Reason
    message: str


def update_attempt(
    attempt: AttemptStatus, job: ObservedJob | None, now: datetime
) -> AttemptStatus:
    """Return the attempt updated from its observed Job. An attempt that has ended never changes again."""
    if attempt.outcome is not Outcome.RUNNING:
        return attempt
    if job is None:
        return _update_without_job(attempt, now)
    updated = _record_observation(attempt, job, now)
    if job.state in {JobState.WAITING, JobState.RUNNING}:
        return updated
    ending = classify_ending(updated, job)
    return _close(updated, ending, job.finished_at or now, job.exit_code)


def classify_ending(attempt: AttemptStatus, job: ObservedJob) -> Ending:
    """Return the ending of a finished Job, from the first rule in ENDING_RULES that matches."""
    endings = (rule(attempt, job) for rule in ENDING_RULES)
    # The last rule matches always.
    ending = next(match for match in endings if match)
    message = ending.message
    if job.sidecar and ending.outcome is Outcome.FAILED:
        message = "; ".join(part for part in (message, job.sidecar) if part)
    if job.pod and message:
        message = f"{job.pod}: {message}"
    return replace(ending, message=message)


def _succeeded(attempt: AttemptStatus, job: ObservedJob) -> Ending | None:
    if result_of(attempt, job) is None:
        return None
    return Ending(Outcome.SUCCEEDED, Reason.STAGE_SUCCEEDED, "")


def _stopped(attempt: AttemptStatus, job: ObservedJob) -> Ending | None:
    # The process had ended before, and only its sidecars were stopped.
    if not attempt.stopping or attempt.stopping is Reason.SIDECAR_RUNNING:
        return None
    return _end_of_stop(attempt, _termination_text(job))


def _end_of_stop(attempt: AttemptStatus, text: str) -> Ending:
    """Return the ending of an attempt that the operator has stopped: a failure if it waited too long for a person."""
    reason = attempt.stopping or Reason.SUSPENDED
    if attempt.message and reason in NEEDS_PERSON:
        return Ending(Outcome.FAILED, reason, attempt.message)
    return Ending(Outcome.STOPPED, reason, text)


def _result_missing(attempt: AttemptStatus, job: ObservedJob) -> Ending | None:
    # If another container fails, the Job does, although the process exited with 0.
    if job.state is not JobState.COMPLETE and job.exit_code != ExitCode.DONE:
        return None
    if job.exit_code is None:
        # The Job is Complete, but its pod and with it the result are gone. The program did nothing wrong.
        message = "the process succeeded, but its pod was deleted before the result was read; the stage runs again"
        return Ending(Outcome.INTERRUPTED, Reason.RESULT_MISSING, message)
    problem = _termination_text(job) or _describe_result_problem(attempt, job)
    message = f"the process exited with code 0, but {problem}"
    return Ending(Outcome.FAILED, Reason.RESULT_MISSING, message)


def _describe_result_problem(attempt: AttemptStatus, job: ObservedJob) -> str:
    if job.message is None or job.message.result is None:
        return "left no result in its termination message"
    identity = job.message.result.identity
    return f"its result has the identity {identity} instead of {attempt.identity}"


def _out_of_memory(_attempt: AttemptStatus, job: ObservedJob) -> Ending | None:
    if not job.out_of_memory:
        return None
    parts = (_more_memory(job), _termination_text(job))
    text = "; ".join(part for part in parts if part)
    return Ending(Outcome.FAILED, Reason.OUT_OF_MEMORY, text)


def _more_memory(job: ObservedJob) -> str:
    """Return which limit ended the process, and what to raise it to."""
    resources = f"{job.stage}.pod.resources" if job.stage else "pod.resources"
    if not job.memory_limit:
        fields = f"{resources}.requests.memory and {resources}.limits.memory"
        cause = "killed for memory without a limit of its own, so its node ran out of memory"
        return f"{cause}: set {fields} to what the stage needs"
    more = doubled(job.memory_limit)
    return f"killed at its limit {job.memory_limit}: raise {resources}.limits.memory to {more}"


def doubled(quantity: str) -> str:
    """Return twice a Kubernetes quantity, in the same unit: 512Mi for 256Mi."""
    number = quantity.rstrip(string.ascii_letters)
    return f"{Decimal(number) * 2:f}" + quantity.removeprefix(number)


def _fault(_attempt: AttemptStatus, job: ObservedJob) -> Ending | None:
    if job.fault is None:
        return None
    outcome = Outcome.INTERRUPTED if job.fault.interrupts else Outcome.FAILED
    parts = (job.fault.message, _termination_text(job))
    text = "; ".join(part for part in parts if part)
    return Ending(outcome, job.fault.reason, text)


def _disrupted(_attempt: AttemptStatus, job: ObservedJob) -> Ending | None:
    if not job.disruption:
        return None
    text = "; ".join(part for part in (job.disruption, _termination_text(job)) if part)
    return Ending(Outcome.INTERRUPTED, Reason.INTERRUPTED, text)


def _interrupted(_attempt: AttemptStatus, job: ObservedJob) -> Ending | None:
    if job.exit_code != ExitCode.INTERRUPTED:
        return None
    text = (
        _termination_text(job)
        or f"the process was interrupted (exit code {job.exit_code})"
    )
    return Ending(Outcome.INTERRUPTED, Reason.INTERRUPTED, text)


def _device_failed(_attempt: AttemptStatus, job: ObservedJob) -> Ending | None:
    failure = job.message.failure if job.message else None
    if failure is None or not failure.device:
        return None
    return Ending(Outcome.FAILED, Reason.DEVICE_FAILED, failure.message)


def _permanent_failure(_attempt: AttemptStatus, job: ObservedJob) -> Ending | None:
    reason = PERMANENT_REASONS.get(job.exit_code or 0)
    if reason is None:
        return None
    text = _termination_text(job) or f"exit code {job.exit_code}"
    return Ending(Outcome.FAILED, reason, text)


def _service_unavailable(_attempt: AttemptStatus, job: ObservedJob) -> Ending | None:
    if job.exit_code != ExitCode.UNAVAILABLE:
        return None
    unavailable = f"a service or a disk was unavailable (exit code {job.exit_code})"
    text = _termination_text(job) or unavailable
    return Ending(Outcome.FAILED, Reason.SOURCE_UNAVAILABLE, text)


def _failed(_attempt: AttemptStatus, job: ObservedJob) -> Ending:
    text = f"exit code {job.exit_code}"
    if job.exit_code is None:
        text = "its Job failed, and its pod was gone before the exit code was read"
    if job.exit_code in SIGNAL_EXIT_CODES:
        text = f"killed by a signal (exit code {job.exit_code}), cause unknown; the node may be out of memory"
    return Ending(Outcome.FAILED, Reason.STAGE_FAILED, _termination_text(job) or text)


# The first rule that matches decides. They are ordered from certain to uncertain: the result, then the operator's own
# request, then evidence about the pod, then exit codes, also 0. Evidence comes before exit codes because a process that
# is evicted or runs out of memory may exit with any code.
ENDING_RULES: tuple[Callable[[AttemptStatus, ObservedJob], Ending | None], ...] = (
    # A valid result counts even if the operator was stopping the attempt, or the pod was evicted.
    _succeeded,
    # Any other ending after the operator's own request counts against no budget.
    _stopped,
    # Before _disrupted: another attempt with the same limit would be killed again.
    _out_of_memory,
    # Before _disrupted: it knows more than that the pod was evicted.
    _fault,
    # An eviction is no failure, whatever the exit code; a process may also exit with 0 on SIGTERM.
    _disrupted,
    # Complete without a valid result is not a success.
    _result_missing,
    # Exit code 75 without evidence: the process itself reports an interruption.
    _interrupted,
    # Before the exit codes: the process itself knows that it is not at fault.
    _device_failed,
    _permanent_failure,
    _service_unavailable,
    # Matches always: a bug, or a signal of unknown origin.
    _failed,
)


def result_of(attempt: AttemptStatus, job: ObservedJob) -> AnyResult | None:
    """Return the result of a completed Job, or None if there is none or it has another identity than the attempt."""
    if job.message is None or job.state is not JobState.COMPLETE:
        return None
    result = job.message.result
    if result is None or result.identity != attempt.identity:
        return None
    return result


def _update_without_job(attempt: AttemptStatus, now: datetime) -> AttemptStatus:
    # No Job was ever observed: the attempt was recorded, but the operator has not created its Job yet.
    if attempt.created_at is None and not attempt.stopping:
        return attempt
    if attempt.stopping:
        return _close(attempt, _end_of_stop(attempt, ""), now, None)
    deleted = "its Job was deleted before the operator observed how it ended"
    return _close(
        attempt, Ending(Outcome.INTERRUPTED, Reason.JOB_DISAPPEARED, deleted), now, None
    )


def _record_observation(
    attempt: AttemptStatus, job: ObservedJob, now: datetime
) -> AttemptStatus:
    failed_node = job.failed_node if job.failed_node != job.node else None
    observed: dict[str, object] = {
        "failed_node": failed_node or None,
        "created_at": attempt.created_at or job.created_at or job.started_at or now,
        "started_at": attempt.started_at or job.started_at,
        "node": attempt.node or job.node or None,
    }
    overdue = attempt.stopping is Reason.DEADLINE_EXCEEDED
    if overdue and attempt.stopped_after_seconds is None and attempt.started_at:
        # The operator's clock decided that the time is used up. The kubelet's clock may be behind it, and by its times
        # alone there would be time left for another attempt, which the operator would stop again, and so on.
        observed["stopped_after_seconds"] = max(0.0, seconds_until(now, attempt))
    steps = _reported_steps(attempt, job)
    return attempt.model_copy(update=observed | _suspension(attempt, job) | steps)


def _reported_steps(attempt: AttemptStatus, job: ObservedJob) -> dict[str, object]:
    """Return the steps that the attempt's process has reported last."""
    steps: dict[str, object] = {}
    if job.progress:
        steps = _steps_of(job.progress)
    if attempt.suspensions and attempt.start_step is not None:
        # The attempt began with its first process.
        steps.pop("start_step", None)
    # The termination message of a process is newer than its last progress report.
    if job.message and job.message.interruption:
        steps |= _last_steps_of(job.message.interruption)
    return steps


def _suspension(attempt: AttemptStatus, job: ObservedJob) -> dict[str, object]:
    """Return what has changed about the suspensions of the attempt's Job. No clock runs while it has no process."""
    started = attempt.started_at or job.started_at
    if started is None or attempt.stopping:
        return {}
    if job.suspended_since:
        if attempt.suspended_at:
            return {}
        at = max(job.suspended_since, started)
        return {"suspended_at": at, "suspensions": attempt.suspensions + 1}
    began = attempt.resumed_at or started
    # The operator may have been away for the whole suspension. Then it is known only when it ended.
    missed = job.resumed_at is not None and job.resumed_at > began
    since = attempt.suspended_at or (job.resumed_at if missed else None)
    if since is None or job.started_at is None:
        return {}
    return {
        "suspended_at": None,
        # Clocks differ: a start before the end of the suspension would count as a missed suspension.
        "resumed_at": max(job.started_at, job.resumed_at or job.started_at),
        "suspensions": attempt.suspensions + (attempt.suspended_at is None),
        "suspended_seconds": attempt.suspended_seconds
        + max(0.0, (job.started_at - since).total_seconds()),
    }


def _steps_of(progress: Progress) -> dict[str, object]:
    """Return the steps of a progress report; nothing before the process knows its start step."""
    # Before the process knows the step at which it resumes, its step means nothing either.
    if progress.start_step is None:
        return {}
    steps: dict[str, object] = {
        "start_step": progress.start_step,
        "last_step": progress.step,
        "step_seconds": progress.step_seconds,
        "total_steps": progress.total,
    }
    if progress.saved_step is not None:
        steps["saved_step"] = progress.saved_step
    return steps


def _last_steps_of(interruption: Interruption) -> dict[str, object]:
    """Return the steps that a process reports when it is stopped."""
    steps: dict[str, object] = {}
    if interruption.step is not None:
        steps["last_step"] = interruption.step
    if interruption.saved_step is not None:
        steps["saved_step"] = interruption.saved_step
    return steps


def _close(
    attempt: AttemptStatus, ending: Ending, finished_at: datetime, exit_code: int | None
) -> AttemptStatus:
    return attempt.model_copy(
        update={
            "outcome": ending.outcome,
            "reason": ending.reason,
            "message": truncate_message(ending.message),
            "finished_at": finished_at,
            "exit_code": exit_code,
        }
    )


def _termination_text(job: ObservedJob) -> str:
    if job.message is None:
        return ""
    if job.message.failure:
        return job.message.failure.message
    interruption = job.message.interruption
    if interruption is None or interruption.step is None:
        return ""
    return f"stopped at step {interruption.step}, saved at step {interruption.saved_step or 0}"


def is_final(attempt: AttemptStatus) -> bool:
    """Return whether the next attempt would end in the same way."""
    if attempt.reason in NON_RETRYABLE:
        return True
    # An attempt that was stopped with such a reason has given its nodes back, and requests them again.
    return attempt.outcome is Outcome.FAILED and attempt.reason in NEEDS_PERSON


def describe_end(attempt: AttemptStatus) -> str:
    """Return how the attempt before the next one ended; empty for a server that was deleted after its answer."""
    verb = ENDS.get(attempt.outcome)
    if verb is None:
        return ""
    cause = f": {attempt.message}" if attempt.message else f" ({attempt.reason})"
    return f"attempt {attempt.number} {verb}{cause}"
