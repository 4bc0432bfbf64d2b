"""A run as people see it: a table that stays in place on a terminal, lines anywhere else."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from finetune_operator.api.conditions import Reason
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import AttemptStatus, GateStatus, Outcome, PipelineStatus, StageState, StageStatus
from finetune_operator.core.events import Event
from finetune_operator.core.report import percent
from finetune_trainer.contract import Progress

MARKS: dict[StageState, tuple[str, str]] = {
    StageState.PENDING: ("○", "dim"),
    StageState.QUEUED: ("◌", "yellow"),
    StageState.RUNNING: ("●", "cyan"),
    StageState.SUCCEEDED: ("✔", "green"),
    StageState.FAILED: ("✗", "red"),
    StageState.SKIPPED: ("·", "dim"),
}

PROGRESS_SECONDS = 5.0

AttemptDetails = Callable[[AttemptStatus], Sequence[str]]
"""What is to be said under an attempt: of its pods."""


class Display(Protocol):
    """Where a run is shown."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def event(self, event: Event) -> None:
        """Say what has just become true."""

    def update(self, status: PipelineStatus) -> None:
        """Show how things stand."""


class LineOutput:
    """One line for each thing that happens, and one now and then for progress."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.began = time.monotonic()
        self.said = 0.0
        self.last = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def event(self, event: Event) -> None:
        """Say it, with the time since the beginning."""
        self._line(f"{event.reason}: {event.message}")

    def update(self, status: PipelineStatus) -> None:
        """Say how far the running stage is, if that is news."""
        stage = status.stages.get(status.stage)
        now = time.monotonic()
        if stage is None or stage.state is not StageState.RUNNING or now - self.said < PROGRESS_SECONDS:
            return
        told = numbers(stage.progress)
        words = "  ".join(filter(None, [status.stage, percent(stage), told]))
        if told and words != self.last:
            self.said, self.last = now, words
            self._line(words)

    def _line(self, words: str) -> None:
        passed = timedelta(seconds=int(time.monotonic() - self.began))
        self.console.print(f"[{passed}] {words}", markup=False, highlight=False, soft_wrap=True)


class LiveTable:
    """A table of stages that is drawn again and again in the same place."""

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
        """Let bad news scroll by above the table; the table shows the rest."""
        if event.type == "Warning":
            self.live.console.print(Text(f"{event.reason}: {event.message}", style="yellow"))

    def update(self, status: PipelineStatus) -> None:
        """Draw the table anew."""
        self.live.update(live_table(self.title, status))


def live_table(title: str, status: PipelineStatus, below: AttemptDetails = lambda _: ()) -> RenderableType:
    """Give the pipeline as a tree: its stages, the attempts that have something to tell, and what lies `below` them."""
    lines: list[RenderableType] = [Text(f"{title}  {status.phase}", style="bold")]
    for name in (kind.name for kind in STAGES if kind.name in status.stages):  # an API server sorts them by name
        stage = status.stages[name]
        lines.append(_stage_line(name, stage))
        for attempt in stage.attempts:
            under = below(attempt)
            if under or _has_details(attempt):
                lines.append(Text(f"  ↳ {attempt_line(attempt)}", style="dim"))
            lines += [Text(f"      {words}", style="dim") for words in under]
    return Group(*lines)


def _stage_line(name: str, stage: StageStatus) -> RenderableType:
    mark, style = MARKS[stage.state]
    parts = (Text(mark, style=style), Text(f"{name:<9}", style="bold"), Text(summary(stage), style))
    bar = _bar(stage)
    if bar is None:
        return Text(" ").join(parts)  # a cell of a table would cut a long message
    line = Table.grid(padding=(0, 1))
    line.add_row(*parts[:2], bar, parts[2])
    return line


def _has_details(attempt: AttemptStatus) -> bool:
    """Whether it did not simply succeed."""
    return attempt.outcome not in {Outcome.SUCCEEDED, Outcome.RUNNING} or bool(attempt.start_step)


def _bar(stage: StageStatus) -> RenderableType | None:
    progress = stage.progress
    if stage.state is not StageState.RUNNING or progress is None or not progress.total:
        return None
    return ProgressBar(total=progress.total, completed=progress.step, width=24)


def summary(stage: StageStatus) -> str:
    """Say in a line what a stage is."""
    match stage.state:
        case StageState.RUNNING:
            parts = [numbers(stage.progress) or "starting", _why(stage)]
        case StageState.SUCCEEDED:
            parts = ["done", _took(stage), stage.message]
        case StageState.QUEUED | StageState.FAILED:
            parts = [stage.state.lower(), _why(stage)]
        case StageState.PENDING | StageState.SKIPPED:
            parts = [stage.state.lower(), stage.message or _why(stage)]
    return "  ".join(filter(None, parts))


def _why(stage: StageStatus) -> str:
    """Give the reason and, where there is one, its message."""
    reason = "" if stage.reason is Reason.PROGRESSING else stage.reason
    return ": ".join(filter(None, [reason, stage.message]))


def _took(stage: StageStatus) -> str:
    return f"in {stage.active_seconds:.0f} s" if stage.active_seconds else ""


def numbers(progress: Progress | None) -> str:
    """Say step, loss, speed and what is left."""
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
    """Tell one attempt: where it began, how it ended, what was lost."""
    began = f"attempt {attempt.number}" + (f" resumed at {attempt.start_step}" if attempt.start_step else "")
    if attempt.outcome is Outcome.RUNNING:
        return began
    at = f" at {attempt.last_step}" if attempt.last_step is not None else ""
    parts = [f"{began}, {attempt.outcome.lower()}{at}", _exit_code(attempt), attempt.message]
    if attempt.lost_steps is not None:
        parts.append(f"{attempt.lost_steps} steps lost ({attempt.lost_seconds or 0:.1f} s)")
    return "; ".join(part for part in parts if part)


def _exit_code(attempt: AttemptStatus) -> str:
    words = f"exit code {attempt.exit_code}"
    return words if attempt.exit_code and words not in attempt.message else ""


def gate_line(gate: GateStatus) -> str:
    """Say which way the gate is."""
    return f"gate {'open' if gate.passed else 'closed'}: {gate.message}"


def interruptions_line(status: PipelineStatus) -> str:
    """Say what all interruptions together have cost."""
    times = f"{status.interruptions} interruption{'s' if status.interruptions > 1 else ''}"
    return f"{times}; {status.lost_steps} steps ({status.lost_seconds:.1f} s) had to be done again"


def display_for(title: str, *, to_stderr: bool) -> Display:
    """Choose by where the output goes."""
    console = Console(stderr=to_stderr)
    return LiveTable(console, title) if console.is_terminal else LineOutput(console)
