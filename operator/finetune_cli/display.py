"""Output of a pipeline's status: a live table on a terminal, plain lines elsewhere."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from finetune_cli.costs import attempt_cost, attempt_place
from finetune_cli.diagnostics import UsageError, quoted
from finetune_cli.failures import PIPELINE_FAILED, STAGE_FAILED, FailureLog
from finetune_cli.forecast import Forecast
from finetune_cli.loss_lines import loss_lines
from finetune_operator.api.conditions import Reason
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import (
    AttemptStatus,
    Outcome,
    PipelineStatus,
    StageState,
    StageStatus,
)
from finetune_operator.core.durations import format_duration
from finetune_operator.core.events import Event
from finetune_operator.core.report import percent
from finetune_trainer.contract import DeployResult, Progress

FORECAST_STYLES = {
    "reuse": "green",
    "run": "cyan",
    "resume": "yellow",
    "skip": "dim",
    "blocked": "red",
}
MARKS: dict[StageState, tuple[str, str]] = {
    StageState.PENDING: ("○", "dim"),
    StageState.QUEUED: ("◌", "yellow"),
    StageState.RUNNING: ("●", "cyan"),
    StageState.SUCCEEDED: ("✔", "green"),
    StageState.FAILED: ("✗", "red"),
    StageState.SKIPPED: ("·", "dim"),
}

PROGRESS_SECONDS = 5.0
"""Shortest time between two lines of progress."""
LOADING_SECONDS = 10.0
"""Time between two lines about a stage that has not done a step yet."""
BAR_WIDTH = 16
"""So wide that a stage with steps of five digits fits a terminal of 80 columns."""

AttemptDetails = Callable[[AttemptStatus], Sequence[str]]
"""Returns the lines to print under an attempt, for example about its pod."""


class Display(Protocol):
    """Output of a run; a context manager that is entered before the first event."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def event(self, event: Event) -> None:
        """Print an event."""

    def update(self, status: PipelineStatus) -> None:
        """Show the current status."""


class LineOutput:
    """One line for each event, and a line of progress every PROGRESS_SECONDS at most."""

    def __init__(self, console: Console, *, status_follows: bool = True) -> None:
        self.console = console
        self.failures = FailureLog(status_follows=status_follows)
        self.started = self.last_progress_at = time.monotonic()
        self.last_progress = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._print_failures()

    def event(self, event: Event) -> None:
        """Print the event with the time since the start."""
        for text in self.failures.lines(event):
            self._line(text)

    def update(self, status: PipelineStatus) -> None:
        """Print the progress of the running stage if it has changed, and now and then that it still loads."""
        self._print_failures()
        stage = status.stages.get(status.stage)
        if stage is None or stage.state is not StageState.RUNNING:
            return
        waited = time.monotonic() - self.last_progress_at
        progress = format_progress(stage.progress)
        text = "  ".join(filter(None, [status.stage, percent(stage), progress]))
        if not progress or text == self.last_progress:
            if waited >= LOADING_SECONDS and (loading := _loading(stage, _now())):
                self._progress(f"{status.stage}  {loading}")
        elif waited >= PROGRESS_SECONDS or not self.last_progress:
            self.last_progress = text
            self._progress(text)

    def _progress(self, text: str) -> None:
        self.last_progress_at = time.monotonic()
        self._line(text)

    def _print_failures(self) -> None:
        for text in self.failures.flush():
            self._line(text)

    def _line(self, text: str) -> None:
        elapsed = timedelta(seconds=int(time.monotonic() - self.started))
        self.console.print(f"[{elapsed}] {text}", markup=False, highlight=False, soft_wrap=True)


class LiveTable:
    """A table of stages that is redrawn in place."""

    def __init__(self, console: Console, title: str, *, status_follows: bool = True) -> None:
        self.title = title
        self.failures = FailureLog(status_follows=status_follows)
        self.spinner = Spinner("dots", style="cyan")
        looking = Spinner("dots", Text(f"{title}: looking at its sources"), style="cyan")
        self.live = Live(looking, console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._print(self.failures.flush())
        self.live.stop()

    def event(self, event: Event) -> None:
        """Print a warning above the table; the table itself shows all other events, and the error of a stage."""
        if event.type != "Warning":
            return
        lines = list(self.failures.lines(event))
        if not (self.failures.status_follows and event.reason in {STAGE_FAILED, PIPELINE_FAILED}):
            self._print(lines)

    def update(self, status: PipelineStatus) -> None:
        """Redraw the table."""
        self._print(self.failures.flush())
        self.live.update(live_table(self.title, status, now=_now(), spinner=self.spinner))

    def _print(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.live.console.print(Text(line, style="yellow"))


def _now() -> datetime:
    return datetime.now(UTC)  # noqa: TID251  an edge


def live_table(
    title: str,
    status: PipelineStatus,
    details: AttemptDetails = lambda _: (),
    *,
    now: datetime | None = None,
    spinner: Spinner | None = None,
) -> RenderableType:
    """Return the pipeline as a tree of stages and attempts, with the lines of `details` under each attempt.

    A stage with a loss curve has it in a line below.

    An attempt that succeeded or runs, and did not resume earlier work, is left out unless it has details. Attempts
    that failed with the same error are one line. With `now`, what runs has its time so far.
    """
    lines: list[RenderableType] = [
        Text("  ".join(filter(None, [title, status.phase, _total(status, now)])), "bold")
    ]
    # In the order of STAGES: an API server returns status.stages sorted by name.
    for name in (kind.name for kind in STAGES if kind.name in status.stages):
        stage = status.stages[name]
        lines.append(_stage_line(name, stage, now, spinner))
        lines += loss_lines(stage)
        for attempts in _same_failures(stage.attempts, details):
            details_lines = details(attempts[-1])
            if details_lines or _is_notable(attempts[-1]):
                lines.append(
                    Text(f"  ↳ {attempts_line(attempts, shown=stage.message)}", style="dim")
                )
            lines += [Text(f"      {text}", style="dim") for text in details_lines]
    return Group(*lines)


def _total(status: PipelineStatus, now: datetime | None) -> str:
    """Return the time from the start of the first attempt to the end, or to now."""
    end = status.finished_at or now
    return (
        format_duration((end - status.started_at).total_seconds())
        if status.started_at and end
        else ""
    )


def _same_failures(
    attempts: Sequence[AttemptStatus], details: AttemptDetails
) -> Iterator[list[AttemptStatus]]:
    """Yield the attempts, with those together that followed one another and failed with the same error."""
    group: list[AttemptStatus] = []
    for attempt in attempts:
        if group and not (_same_failure(group[-1], attempt) and not details(attempt)):
            yield group
            group = []
        group.append(attempt)
    if group:
        yield group


def _same_failure(one: AttemptStatus, other: AttemptStatus) -> bool:
    failed = one.outcome is other.outcome is Outcome.FAILED
    return failed and (one.message, one.exit_code) == (other.message, other.exit_code)


def _stage_line(
    name: str, stage: StageStatus, now: datetime | None, spinner: Spinner | None
) -> RenderableType:
    mark, style = MARKS[stage.state]
    bar = _bar(stage)
    running = spinner if stage.state in {StageState.QUEUED, StageState.RUNNING} else None
    parts = (
        Text(mark, style=style),
        Text(f"{name:<9}", style="bold"),
        Text(stage_summary(stage, now), style),
    )
    if bar is None and running is None:
        return Text(" ").join(parts)  # a table cell would truncate a long message
    line = Table.grid(padding=(0, 1))
    line.add_row(running or parts[0], parts[1], *([bar] if bar else []), parts[2])
    return line


def _is_notable(attempt: AttemptStatus) -> bool:
    """Whether the attempt failed, was interrupted or resumed earlier work."""
    return attempt.outcome not in {Outcome.SUCCEEDED, Outcome.RUNNING} or bool(attempt.start_step)


def _bar(stage: StageStatus) -> RenderableType | None:
    progress = stage.progress
    if stage.state is not StageState.RUNNING or progress is None or not progress.total:
        return None
    return ProgressBar(total=progress.total, completed=progress.step, width=BAR_WIDTH)


def stage_summary(stage: StageStatus, now: datetime | None = None) -> str:
    """Return a stage's state in one line, with its progress, duration or reason, and the model's answer."""
    match stage.state:
        case StageState.RUNNING:
            parts = [
                format_progress(stage.progress) or "starting",
                _elapsed(stage, now),
                _reason(stage),
            ]
        case StageState.SUCCEEDED:
            parts = [
                " ".join(filter(None, ["done", _duration(stage)])),
                stage.message,
                _answer(stage),
            ]
        case StageState.QUEUED:
            parts = ["queued", _reason(stage), _elapsed(stage, now)]
        case StageState.FAILED:
            parts = ["failed", _reason(stage)]
        case StageState.PENDING | StageState.SKIPPED:
            parts = [stage.state.lower(), stage.message or _reason(stage)]
        case _:  # a state of another version of the operator
            parts = [stage.state, _reason(stage)]
    return "  ".join(filter(None, parts))


def _answer(stage: StageStatus) -> str:
    """Return the model's answer to the prompt of deploy, in quotes: it may be empty or begin with a space."""
    return (
        f"answered {quoted(stage.result.answer)}" if isinstance(stage.result, DeployResult) else ""
    )


def _loading(stage: StageStatus, now: datetime) -> str:
    """Return what a stage without a step is doing and for how long; empty once it has one."""
    elapsed = _elapsed(stage, now)
    return f"{format_progress(stage.progress) or 'starting'}, {elapsed}" if elapsed else ""


def _elapsed(stage: StageStatus, now: datetime | None) -> str:
    """Return how long the attempt runs while it has not done a step yet; empty for the others."""
    attempt, progress = stage.running_attempt, stage.progress
    since = (attempt.started_at or attempt.created_at) if attempt else None
    if now is None or since is None or (progress and progress.step > (progress.start_step or 0)):
        return ""
    return format_duration((now - since).total_seconds())


def _reason(stage: StageStatus) -> str:
    """Return the stage's reason and message; the reason Progressing adds nothing and is left out."""
    reason = "" if stage.reason is Reason.PROGRESSING else stage.reason
    return ": ".join(filter(None, [reason, stage.message]))


def _duration(stage: StageStatus) -> str:
    return f"in {format_duration(stage.active_seconds)}" if stage.active_seconds else ""


def format_progress(progress: Progress | None) -> str:
    """Return step, loss, tokens per second, remaining seconds and note, as far as they are known."""
    if progress is None:
        return ""
    parts = (
        f"{progress.step}/{progress.total}"
        if progress.total
        else f"{progress.step}"
        if progress.step
        else "",
        f"loss {progress.loss:.3f}" if progress.loss is not None else "",
        f"{progress.tokens_per_second:,.0f} tok/s" if progress.tokens_per_second else "",
        f"{format_duration(progress.eta_seconds)} left" if progress.eta_seconds is not None else "",
        progress.note,
    )
    return "  ".join(part for part in parts if part)


def attempt_line(attempt: AttemptStatus) -> str:
    """Return one attempt in a line: the step it resumed at, its outcome, its message and the lost steps."""
    return attempts_line([attempt])


def attempts_line(attempts: Sequence[AttemptStatus], shown: str = "") -> str:
    """Return an attempt, or several that failed with the same error, in a line; an error in `shown` is left out."""
    first, last = attempts[0], attempts[-1]
    number = (
        f"attempt {last.number}" if first is last else f"attempts {first.number} to {last.number}"
    )
    start = (
        number + attempt_place(last) + (f" resumed at {last.start_step}" if last.start_step else "")
    )
    if last.outcome is Outcome.RUNNING:
        return start
    times = f" {len(attempts)} times" if len(attempts) > 1 else ""
    at = f" at {last.last_step}" if last.last_step is not None else ""
    message = "" if last.outcome is Outcome.FAILED and last.message in shown else last.message
    parts = [f"{start}, {last.outcome.lower()}{times}{at}", _exit_code(last), message]
    if any(attempt.lost_steps is not None for attempt in attempts):
        steps = sum(attempt.lost_steps or 0 for attempt in attempts)
        seconds = sum(attempt.lost_seconds or 0 for attempt in attempts)
        parts.append(f"{steps} steps lost ({format_duration(seconds)})")
    parts += [attempt_cost(last)] if first is last else []
    return "; ".join(part for part in parts if part)


def _exit_code(attempt: AttemptStatus) -> str:
    text = f"exit code {attempt.exit_code}"
    return text if attempt.exit_code and text not in attempt.message else ""


def interruptions_line(status: PipelineStatus) -> str:
    """Return the number of interruptions and the steps and seconds of work that they cost."""
    count = f"{status.interruptions} interruption{'s' if status.interruptions > 1 else ''}"
    return f"{count}; {status.lost_steps} steps lost ({format_duration(status.lost_seconds)})"


def display_for(title: str, *, to_stderr: bool) -> Display:
    """Return a live table if the output is a terminal, else line output."""
    console = Console(stderr=to_stderr)
    # What goes to stderr is followed by JSON on stdout, and by no status for people.
    follows = not to_stderr
    return (
        LiveTable(console, title, status_follows=follows)
        if console.is_terminal
        else LineOutput(console, status_follows=follows)
    )


def print_forecast_json(stages: Sequence[Forecast], **more: Any) -> None:
    """Print the forecasts as JSON; `more` adds keys to the object."""
    print(json.dumps({"stages": [vars(stage) for stage in stages], **more}, indent=1))


def print_forecast(stages: Sequence[Forecast], console: Console) -> None:
    """Print a line for each stage: action, name, reason."""
    for stage in stages:
        style = FORECAST_STYLES[stage.action]
        console.print(
            f"[{style}]{stage.action:<7}[/{style}] [bold]{stage.stage:<9}[/bold]", end=" "
        )
        console.print(stage.why, markup=False)


def no_attempt(stage: str, number: int | None, attempts: Sequence[AttemptStatus]) -> UsageError:
    """Return the error for a stage without attempts, or without the attempt of this number."""
    if not attempts:
        return UsageError(f"{stage} has no attempts yet")
    numbers = ", ".join(str(attempt.number) for attempt in attempts)
    return UsageError(f"{stage} has no attempt {number}; its attempts are {numbers}")


def print_attempt(attempt: AttemptStatus) -> None:
    """Print the attempt whose log follows to stderr, so that stdout holds the log alone."""
    print(f"--- attempt {attempt.number}: {attempt.job}", file=sys.stderr, flush=True)
