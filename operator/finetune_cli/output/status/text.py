"""Stages and attempts in words, one line each."""

import sys
from collections.abc import Iterable, Sequence
from datetime import datetime

from finetune_cli.comparison.attempts import reused_text
from finetune_cli.diagnostics import UsageError, quoted
from finetune_cli.output.costs import attempt_cost, attempt_place
from finetune_operator.api.conditions import Reason
from finetune_operator.api.status import (
    AttemptStatus,
    Outcome,
    PipelineStatus,
    StageState,
    StageStatus,
)
from finetune_operator.core.durations import format_duration
from finetune_trainer.contract import DeployResult, EvaluateResult, Progress
from finetune_trainer.exit_codes import ExitCode


def joined(parts: Iterable[str]) -> str:
    """Return the parts that are not empty, with two spaces between them."""
    return "  ".join(part for part in parts if part)


def stage_summary(stage: StageStatus, now: datetime | None = None) -> str:
    """Return a stage's state in one line, with its progress, duration or reason, and the model's answer."""
    match stage.state:
        case StageState.RUNNING:
            # A stage reports its first progress when its libraries are loaded.
            progress = format_progress(stage.progress) or "starting"
            return joined([progress, _elapsed(stage, now), _reason(stage)])
        case StageState.SUCCEEDED:
            return joined([_done(stage), _message(stage), _answer(stage)])
        case StageState.QUEUED:
            return joined(["queued", _reason(stage), _elapsed(stage, now)])
        case StageState.FAILED:
            return joined(["failed", _reason(stage)])
        case StageState.PENDING | StageState.SKIPPED:
            message = stage.message or _reason(stage)
            return joined([stage.state.lower(), message])
        case _:
            # A state that another version of the operator has written.
            return joined([stage.state, _reason(stage)])


def _done(stage: StageStatus) -> str:
    reused = reused_text(stage)
    if reused:
        return reused
    if not stage.active_seconds:
        return "done"
    return f"done in {format_duration(stage.active_seconds)}"


def _message(stage: StageStatus) -> str:
    """Return the stage's message; empty if it repeats scores, which the stage's line and the gates have."""
    if isinstance(stage.result, EvaluateResult):
        return ""
    return stage.message


def _answer(stage: StageStatus) -> str:
    """Return the model's answer to the prompt of deploy, in quotes: it may be empty or begin with a space."""
    if not isinstance(stage.result, DeployResult):
        return ""
    return f"answered {quoted(stage.result.answer)}"


def loading_text(stage: StageStatus, now: datetime) -> str:
    """Return what a stage without a step is doing and for how long; empty once it has done a step."""
    elapsed = _elapsed(stage, now)
    if not elapsed:
        return ""
    doing = format_progress(stage.progress) or "starting"
    return f"{doing}, {elapsed}"


def _elapsed(stage: StageStatus, now: datetime | None) -> str:
    """Return how long the attempt runs while it has not done a step yet; empty for other attempts."""
    attempt = stage.running_attempt
    if attempt is None or now is None or _has_stepped(stage.progress):
        return ""
    # A queued attempt has no start, so its waiting time counts from its Job.
    since = attempt.started_at or attempt.created_at
    if since is None:
        return ""
    return format_duration((now - since).total_seconds())


def _has_stepped(progress: Progress | None) -> bool:
    if progress is None:
        return False
    # A resumed attempt begins at the step of its checkpoint, not at 0.
    return progress.step > (progress.start_step or 0)


def _reason(stage: StageStatus) -> str:
    """Return the stage's reason and message; the reason Progressing adds nothing and is left out."""
    parts = [stage.reason, stage.message]
    if stage.reason is Reason.PROGRESSING:
        parts = [stage.message]
    return ": ".join(part for part in parts if part)


def format_progress(progress: Progress | None) -> str:
    """Return step, loss, tokens per second, remaining seconds and note, as far as they are known."""
    if progress is None:
        return ""
    parts = [_step(progress)]
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.3f}")
    if progress.tokens_per_second:
        parts.append(f"{progress.tokens_per_second:,.0f} tok/s")
    if progress.eta_seconds is not None:
        parts.append(f"{format_duration(progress.eta_seconds)} left")
    parts.append(progress.note)
    return joined(parts)


def _step(progress: Progress) -> str:
    if progress.total:
        return f"{progress.step}/{progress.total}"
    # Step 0 of an unknown total says nothing: the stage still loads.
    if progress.step:
        return str(progress.step)
    return ""


def attempt_line(attempt: AttemptStatus) -> str:
    """Return one attempt in a line: the step it resumed at, its outcome, its message and the lost steps."""
    return attempts_line([attempt])


def attempts_line(attempts: Sequence[AttemptStatus], shown: str = "") -> str:
    """Return an attempt, or several that failed with the same error, in a line; an error in `shown` is left out."""
    last = attempts[-1]
    start = _numbers(attempts) + attempt_place(last)
    if last.start_step:
        start += f" resumed at {last.start_step}"
    if last.outcome is Outcome.RUNNING:
        return start
    parts = [f"{start}, {_ending(attempts)}", _exit_code(last)]
    # The message of an interruption is no error, and the stage's line does not have it.
    is_shown = last.outcome is Outcome.FAILED and last.message in shown
    if not is_shown:
        parts.append(last.message)
    parts.append(_lost_steps(attempts))
    # The cost of the last attempt would read as the cost of all.
    if len(attempts) == 1:
        parts.append(attempt_cost(last))
    return "; ".join(part for part in parts if part)


def _numbers(attempts: Sequence[AttemptStatus]) -> str:
    last = attempts[-1].number
    if len(attempts) == 1:
        return f"attempt {last}"
    return f"attempts {attempts[0].number} to {last}"


def _ending(attempts: Sequence[AttemptStatus]) -> str:
    last = attempts[-1]
    text = last.outcome.lower()
    if len(attempts) > 1:
        text += f" {len(attempts)} times"
    if last.last_step is not None:
        text += f" at {last.last_step}"
    return text


def _exit_code(attempt: AttemptStatus) -> str:
    if attempt.exit_code == ExitCode.INTERRUPTED:
        return "saved and stopped"
    text = f"exit code {attempt.exit_code}"
    # The message of a process without a report names its exit code already.
    if not attempt.exit_code or text in attempt.message:
        return ""
    return text


def _lost_steps(attempts: Sequence[AttemptStatus]) -> str:
    if all(attempt.lost_steps is None for attempt in attempts):
        return ""
    steps = sum(attempt.lost_steps or 0 for attempt in attempts)
    seconds = sum(attempt.lost_seconds or 0 for attempt in attempts)
    return _lost(steps, seconds)


def _lost(steps: int, seconds: float) -> str:
    noun = "step" if steps == 1 else "steps"
    return f"{steps} {noun} lost ({format_duration(seconds)})"


def interruptions_line(status: PipelineStatus) -> str:
    """Return the number of interruptions and the steps and seconds of work that they cost."""
    noun = "interruption"
    if status.interruptions > 1:
        noun = "interruptions"
    lost = _lost(status.lost_steps, status.lost_seconds)
    return f"{status.interruptions} {noun}; {lost}"


def no_attempt(
    stage: str, number: int | None, attempts: Sequence[AttemptStatus]
) -> UsageError:
    """Return the error for a stage without attempts, or without the attempt of this number."""
    if not attempts:
        return UsageError(f"{stage} has no attempts yet")
    numbers = ", ".join(str(attempt.number) for attempt in attempts)
    return UsageError(f"{stage} has no attempt {number}; its attempts are {numbers}")


def stage_with_log(status: PipelineStatus) -> str | None:
    """Return the stage whose log shows what happens: it runs, has failed, or had the newest attempt; None without."""
    current = status.stages.get(status.stage)
    if current is not None and current.attempts:
        return status.stage
    newest = None
    for name, stage in status.stages.items():
        # The stages run in their order, so the last with an attempt is the newest.
        if stage.attempts:
            newest = name
    return newest


def print_attempt(attempt: AttemptStatus) -> None:
    """Print the attempt whose log follows to stderr, so that stdout holds the log alone."""
    print(f"--- attempt {attempt.number}: {attempt.job}", file=sys.stderr, flush=True)
