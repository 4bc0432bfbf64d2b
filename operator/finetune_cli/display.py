"""Output of a pipeline's status: a live table on a terminal, plain lines elsewhere."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from finetune_cli.diagnostics import UsageError
from finetune_cli.forecast import Forecast
from finetune_operator.api.conditions import Reason
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import AttemptStatus, GateStatus, Outcome, PipelineStatus, StageState, StageStatus
from finetune_operator.core.events import Event
from finetune_operator.core.report import percent
from finetune_trainer.contract import Progress

FORECAST_STYLES = {"reuse": "green", "run": "cyan", "resume": "yellow", "skip": "dim", "blocked": "red"}
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

AttemptDetails = Callable[[AttemptStatus], Sequence[str]]
"""Returns the lines to print under an attempt, for example about its pod."""


class Display(Protocol):
    """Output of a run; a context manager that is entered before the first event."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def event(self, event: Event) -> None:
        """Print an event."""

    def update(self, status: PipelineStatus) -> None:
        """Show the current status."""


class LineOutput:
    """One line for each event, and a line of progress every PROGRESS_SECONDS at most."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.started = time.monotonic()
        self.last_progress_at = 0.0
        self.last_progress = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def event(self, event: Event) -> None:
        """Print the event with the time since the start."""
        self._line(f"{event.reason}: {event.message}")

    def update(self, status: PipelineStatus) -> None:
        """Print the progress of the running stage if it has changed."""
        stage = status.stages.get(status.stage)
        now = time.monotonic()
        if stage is None or stage.state is not StageState.RUNNING:
            return
        if now - self.last_progress_at < PROGRESS_SECONDS:
            return
        progress = format_progress(stage.progress)
        text = "  ".join(filter(None, [status.stage, percent(stage), progress]))
        if progress and text != self.last_progress:
            self.last_progress_at, self.last_progress = now, text
            self._line(text)

    def _line(self, text: str) -> None:
        elapsed = timedelta(seconds=int(time.monotonic() - self.started))
        self.console.print(f"[{elapsed}] {text}", markup=False, highlight=False, soft_wrap=True)


class LiveTable:
    """A table of stages that is redrawn in place."""

    def __init__(self, console: Console, title: str) -> None:
        self.title = title
        self.live = Live(console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.stop()

    def event(self, event: Event) -> None:
        """Print a warning above the table; the table itself shows all other events."""
        if event.type == "Warning":
            self.live.console.print(Text(f"{event.reason}: {event.message}", style="yellow"))

    def update(self, status: PipelineStatus) -> None:
        """Redraw the table."""
        self.live.update(live_table(self.title, status))


def live_table(title: str, status: PipelineStatus, details: AttemptDetails = lambda _: ()) -> RenderableType:
    """Return the pipeline as a tree of stages and attempts, with the lines of `details` under each attempt.

    An attempt that succeeded or runs, and did not resume earlier work, is left out unless it has details.
    """
    lines: list[RenderableType] = [Text(f"{title}  {status.phase}", style="bold")]
    # In the order of STAGES: an API server returns status.stages sorted by name.
    for name in (kind.name for kind in STAGES if kind.name in status.stages):
        stage = status.stages[name]
        lines.append(_stage_line(name, stage))
        for attempt in stage.attempts:
            details_lines = details(attempt)
            if details_lines or _is_notable(attempt):
                lines.append(Text(f"  ↳ {attempt_line(attempt)}", style="dim"))
            lines += [Text(f"      {text}", style="dim") for text in details_lines]
    return Group(*lines)


def _stage_line(name: str, stage: StageStatus) -> RenderableType:
    mark, style = MARKS[stage.state]
    parts = (Text(mark, style=style), Text(f"{name:<9}", style="bold"), Text(stage_summary(stage), style))
    bar = _bar(stage)
    if bar is None:
        return Text(" ").join(parts)  # a table cell would truncate a long message
    line = Table.grid(padding=(0, 1))
    line.add_row(*parts[:2], bar, parts[2])
    return line


def _is_notable(attempt: AttemptStatus) -> bool:
    """Whether the attempt failed, was interrupted or resumed earlier work."""
    return attempt.outcome not in {Outcome.SUCCEEDED, Outcome.RUNNING} or bool(attempt.start_step)


def _bar(stage: StageStatus) -> RenderableType | None:
    progress = stage.progress
    if stage.state is not StageState.RUNNING or progress is None or not progress.total:
        return None
    return ProgressBar(total=progress.total, completed=progress.step, width=24)


def stage_summary(stage: StageStatus) -> str:
    """Return a stage's state in one line, with its progress, duration or reason."""
    match stage.state:
        case StageState.RUNNING:
            parts = [format_progress(stage.progress) or "starting", _reason(stage)]
        case StageState.SUCCEEDED:
            parts = ["done", _duration(stage), stage.message]
        case StageState.QUEUED | StageState.FAILED:
            parts = [stage.state.lower(), _reason(stage)]
        case StageState.PENDING | StageState.SKIPPED:
            parts = [stage.state.lower(), stage.message or _reason(stage)]
    return "  ".join(filter(None, parts))


def _reason(stage: StageStatus) -> str:
    """Return the stage's reason and message; the reason Progressing adds nothing and is left out."""
    reason = "" if stage.reason is Reason.PROGRESSING else stage.reason
    return ": ".join(filter(None, [reason, stage.message]))


def _duration(stage: StageStatus) -> str:
    return f"in {stage.active_seconds:.0f} s" if stage.active_seconds else ""


def format_progress(progress: Progress | None) -> str:
    """Return step, loss, tokens per second, remaining seconds and note, as far as they are known."""
    if progress is None:
        return ""
    parts = (
        f"{progress.step}/{progress.total}" if progress.total else f"{progress.step}" if progress.step else "",
        f"loss {progress.loss:.3f}" if progress.loss is not None else "",
        f"{progress.tokens_per_second:,.0f} tok/s" if progress.tokens_per_second else "",
        f"{progress.eta_seconds:.0f} s left" if progress.eta_seconds is not None else "",
        progress.note,
    )
    return "  ".join(part for part in parts if part)


def attempt_line(attempt: AttemptStatus) -> str:
    """Return one attempt in a line: the step it resumed at, its outcome, its message and the lost steps."""
    start = f"attempt {attempt.number}" + (f" resumed at {attempt.start_step}" if attempt.start_step else "")
    if attempt.outcome is Outcome.RUNNING:
        return start
    at = f" at {attempt.last_step}" if attempt.last_step is not None else ""
    parts = [f"{start}, {attempt.outcome.lower()}{at}", _exit_code(attempt), attempt.message]
    if attempt.lost_steps is not None:
        parts.append(f"{attempt.lost_steps} steps lost ({attempt.lost_seconds or 0:.1f} s)")
    return "; ".join(part for part in parts if part)


def _exit_code(attempt: AttemptStatus) -> str:
    text = f"exit code {attempt.exit_code}"
    return text if attempt.exit_code and text not in attempt.message else ""


def gate_line(gate: GateStatus) -> str:
    """Return whether the gate is open, with the reason."""
    return f"gate {'open' if gate.passed else 'closed'}: {gate.message}"


def interruptions_line(status: PipelineStatus) -> str:
    """Return the number of interruptions and the steps and seconds of work that they cost."""
    count = f"{status.interruptions} interruption{'s' if status.interruptions > 1 else ''}"
    return f"{count}; {status.lost_steps} steps lost ({status.lost_seconds:.1f} s)"


def display_for(title: str, *, to_stderr: bool) -> Display:
    """Return a live table if the output is a terminal, else line output."""
    console = Console(stderr=to_stderr)
    return LiveTable(console, title) if console.is_terminal else LineOutput(console)


def print_forecast_json(stages: Sequence[Forecast], **more: Any) -> None:
    """Print the forecasts as JSON; `more` adds keys to the object."""
    print(json.dumps({"stages": [vars(stage) for stage in stages], **more}, indent=1))


def print_forecast(stages: Sequence[Forecast], console: Console) -> None:
    """Print a line for each stage: action, name, reason."""
    for stage in stages:
        style = FORECAST_STYLES[stage.action]
        console.print(f"[{style}]{stage.action:<7}[/{style}] [bold]{stage.stage:<9}[/bold]", end=" ")
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
