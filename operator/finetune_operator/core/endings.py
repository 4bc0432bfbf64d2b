"""How an attempt ended: the decision table that tells an eviction from a bug."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from finetune_operator.api.conditions import Reason
from finetune_operator.api.status import AttemptStatus, Outcome, truncate_message
from finetune_operator.core.observation import JobState, ObservedJob
from finetune_trainer.contract import AnyResult, ExitCode

SIGNAL_EXIT_CODES = (137, 143)
"""What a shell says of a process that SIGKILL or SIGTERM ended."""

PERMANENT_REASONS: dict[int, Reason] = {
    ExitCode.CONFIG: Reason.SPEC_INVALID,
    ExitCode.DATA: Reason.DATA_INVALID,
    ExitCode.NOT_FOUND: Reason.SOURCE_NOT_FOUND,
    ExitCode.CREDENTIALS: Reason.CREDENTIALS_REJECTED,
}
"""The reason of each permanent exit code."""

NON_RETRYABLE = frozenset({*PERMANENT_REASONS.values(), Reason.OUT_OF_MEMORY})
"""Reasons after which a stage is not started again by itself."""


@dataclass(frozen=True)
class Ending:
    """What became of an attempt."""

    outcome: Outcome
    reason: Reason
    message: str


def update_attempt(attempt: AttemptStatus, job: ObservedJob | None, now: datetime) -> AttemptStatus:
    """Give the attempt as it is now; one that has ended stays as it is."""
    if attempt.outcome is not Outcome.RUNNING:
        return attempt
    if job is None:
        return _update_without_job(attempt, now)
    seen = _record_observation(attempt, job, now)
    if job.state in {JobState.WAITING, JobState.RUNNING}:
        return seen
    end = classify_ending(seen, job)
    return _close(seen, end, job.finished_at or now, job.exit_code)


def classify_ending(attempt: AttemptStatus, job: ObservedJob) -> Ending:
    """Judge a Job that is over: the first entry of the table that knows an answer."""
    found = (check(attempt, job) for check in ENDING_RULES)
    return next(end for end in found if end)


def _succeeded(attempt: AttemptStatus, job: ObservedJob) -> Ending | None:
    return Ending(Outcome.SUCCEEDED, Reason.STAGE_SUCCEEDED, "") if result_of(attempt, job) else None


def _stopped(attempt: AttemptStatus, job: ObservedJob) -> Ending | None:
    return Ending(Outcome.STOPPED, attempt.stopping, _termination_text(job)) if attempt.stopping else None


def _result_missing(attempt: AttemptStatus, job: ObservedJob) -> Ending | None:
    if job.state is not JobState.COMPLETE:
        return None
    if job.disruption:
        return _disrupted(attempt, job)
    if job.exit_code is None:
        unread = "it ended well, but its pod was gone before anybody read the result, so the stage is run again"
        return Ending(Outcome.INTERRUPTED, Reason.RESULT_MISSING, unread)
    said = _termination_text(job) or _describe_result_problem(attempt, job)
    return Ending(Outcome.FAILED, Reason.RESULT_MISSING, f"the process ended with 0, but {said}")


def _describe_result_problem(attempt: AttemptStatus, job: ObservedJob) -> str:
    if job.message is None or job.message.result is None:
        return "left no result in its termination message"
    return f"its result has the identity {job.message.result.identity}, and {attempt.identity} was asked for"


def _out_of_memory(_attempt: AttemptStatus, job: ObservedJob) -> Ending | None:
    said = "the process needed more memory than it was given: raise resources.memory"
    return Ending(Outcome.FAILED, Reason.OUT_OF_MEMORY, _termination_text(job) or said) if job.out_of_memory else None


def _disrupted(_attempt: AttemptStatus, job: ObservedJob) -> Ending | None:
    said = "; ".join(words for words in (job.disruption, _termination_text(job)) if words)
    return Ending(Outcome.INTERRUPTED, Reason.INTERRUPTED, said) if job.disruption else None


def _interrupted(_attempt: AttemptStatus, job: ObservedJob) -> Ending | None:
    interrupted = job.exit_code == ExitCode.INTERRUPTED
    return (
        Ending(Outcome.INTERRUPTED, Reason.INTERRUPTED, _termination_text(job) or "asked to stop")
        if interrupted
        else None
    )


def _permanent_failure(_attempt: AttemptStatus, job: ObservedJob) -> Ending | None:
    reason = PERMANENT_REASONS.get(job.exit_code or 0)
    return Ending(Outcome.FAILED, reason, _termination_text(job) or f"exit code {job.exit_code}") if reason else None


def _service_unavailable(_attempt: AttemptStatus, job: ObservedJob) -> Ending | None:
    said = _termination_text(job) or "a service or a disk was not available"
    unavailable = job.exit_code == ExitCode.UNAVAILABLE
    return Ending(Outcome.FAILED, Reason.SOURCE_UNAVAILABLE, said) if unavailable else None


def _failed(_attempt: AttemptStatus, job: ObservedJob) -> Ending:
    killed = "killed, and nothing says by whom; often the node's memory was full"
    said = killed if job.exit_code in SIGNAL_EXIT_CODES else f"exit code {job.exit_code}"
    return Ending(Outcome.FAILED, Reason.STAGE_FAILED, _termination_text(job) or said)


# The order is the meaning: what the process made, what we asked of it, evidence, exit codes, and a guess last.
ENDING_RULES: tuple[Callable[[AttemptStatus, ObservedJob], Ending | None], ...] = (
    _succeeded,
    _stopped,
    _result_missing,  # Complete without a result is believed by nobody
    _out_of_memory,  # more of the same would only be killed again
    _disrupted,  # an eviction, whatever the exit code
    _interrupted,
    _permanent_failure,
    _service_unavailable,
    _failed,
)


def result_of(attempt: AttemptStatus, job: ObservedJob) -> AnyResult | None:
    """Give the result that a completed Job left, if it is of what the attempt was to make."""
    result = job.message.result if job.message and job.state is JobState.COMPLETE else None
    return result if result and result.identity == attempt.identity else None


def _update_without_job(attempt: AttemptStatus, now: datetime) -> AttemptStatus:
    # Never seen: its number was written down but the Job not made yet, so making it is still to be done.
    if attempt.created_at is None and not attempt.stopping:
        return attempt
    if attempt.stopping:
        return _close(attempt, Ending(Outcome.STOPPED, attempt.stopping, ""), now, None)
    gone = Ending(Outcome.INTERRUPTED, Reason.JOB_DISAPPEARED, "its Job is gone, and nobody saw how it ended")
    return _close(attempt, gone, now, None)


def _record_observation(attempt: AttemptStatus, job: ObservedJob, now: datetime) -> AttemptStatus:
    noted: dict[str, object] = {
        "created_at": attempt.created_at or job.started_at or now,
        "started_at": attempt.started_at or job.started_at,
    }
    if job.progress and job.progress.start_step is not None:  # until it knows, step says nothing either
        noted |= {
            "start_step": job.progress.start_step,
            "last_step": job.progress.step,
            "step_seconds": job.progress.step_seconds,
        }
    interruption = job.message.interruption if job.message else None
    if interruption and interruption.step is not None:
        noted["last_step"] = interruption.step
    return attempt.model_copy(update=noted)


def _close(attempt: AttemptStatus, end: Ending, at: datetime, code: int | None) -> AttemptStatus:
    return attempt.model_copy(
        update={
            "outcome": end.outcome,
            "reason": end.reason,
            "message": truncate_message(end.message),
            "finished_at": at,
            "exit_code": code,
        }
    )


def _termination_text(job: ObservedJob) -> str:
    if job.message is None:
        return ""
    if job.message.failure:
        return job.message.failure.message
    if (where := job.message.interruption) and where.step is not None:
        return f"stopped at step {where.step}, saved at step {where.saved_step or 0}"
    return ""
