"""Output while a pipeline runs: a live table on a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from finetune_cli.output.status.failures import (
    PIPELINE_FAILED,
    STAGE_FAILED,
    FailureLog,
)
from finetune_cli.output.status.text import format_progress, joined, loading_text
from finetune_cli.output.status.tree import live_table
from finetune_operator.api.status import PipelineStatus, StageState
from finetune_operator.core.events import Event
from finetune_operator.core.report import percent

# A log of a run of hours must stay readable, so progress is rarer there than in a live table.
PROGRESS_SECONDS = 5.0
"""Shortest time between two lines of progress."""
LOADING_SECONDS = 10.0
"""Time between two lines about a stage that has not done a step yet."""


class Display(Protocol):
    """Output of a run; a context manager that is entered before the first event."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def event(self, event: Event) -> None:
        """Print an event."""

    def update(self, status: PipelineStatus) -> None:
        """Show the current status."""


class LineOutput:
    """One line for each event, and a line of progress every PROGRESS_SECONDS at most."""

    def __init__(self, console: Console, *, status_follows: bool = True) -> None:
        self.console = console
        self.failures = FailureLog(status_follows=status_follows)
        self.started = time.monotonic()
        self.last_progress_at = self.started
        self.last_progress = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._print_failures()

    def event(self, event: Event) -> None:
        """Print the event with the time since the start."""
        for text in self.failures.lines(event):
            self._line(text)

    def update(self, status: PipelineStatus) -> None:
        """Print the progress of the running stage if it has changed, else now and then that the stage loads."""
        # A reconcile emits its events before it shows the status, so no event explains a held failure any more.
        self._print_failures()
        stage = status.stages.get(status.stage)
        if stage is None or stage.state is not StageState.RUNNING:
            return
        waited = time.monotonic() - self.last_progress_at
        progress = format_progress(stage.progress)
        text = joined([status.stage, percent(stage), progress])
        if progress and text != self.last_progress:
            # The first progress is printed at once: it shows that training has begun.
            if waited >= PROGRESS_SECONDS or not self.last_progress:
                self.last_progress = text
                self._progress(text)
            return
        loading = loading_text(stage, _now())
        if loading and waited >= LOADING_SECONDS:
            self._progress(f"{status.stage}  {loading}")

    def _progress(self, text: str) -> None:
        self.last_progress_at = time.monotonic()
        self._line(text)

    def _print_failures(self) -> None:
        for text in self.failures.flush():
            self._line(text)

    def _line(self, text: str) -> None:
        elapsed = timedelta(seconds=int(time.monotonic() - self.started))
        # No markup: an error may contain square brackets. No wrapping: an event stays one line for grep.
        self.console.print(
            f"[{elapsed}] {text}", markup=False, highlight=False, soft_wrap=True
        )


class LiveTable:
    """A table of stages that is redrawn in place."""

    def __init__(
        self,
        console: Console,
        title: str,
        *,
        status_follows: bool = True,
        until: str | None = None,
    ) -> None:
        self.title = title
        self.until = until
        self.failures = FailureLog(status_follows=status_follows)
        # One spinner for all updates: a new spinner would begin with its first frame each time.
        self.spinner = Spinner("dots", style="cyan")
        checking = Spinner("dots", Text(f"{title}: checking its sources"), style="cyan")
        # Transient: the command prints the final status in place of the last table.
        self.live = Live(
            checking, console=console, refresh_per_second=8, transient=True
        )

    def __enter__(self) -> Self:
        self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Before the end: what is printed above a live table stays when the table goes.
        self._print(self.failures.flush())
        self.live.stop()

    def event(self, event: Event) -> None:
        """Print a warning above the table; the table itself shows all other events, and the error of a stage."""
        if event.type != "Warning":
            return
        # Also for an event that is not printed: the log counts errors and holds back the first attempt's.
        lines = list(self.failures.lines(event))
        ends_the_run = event.reason in {STAGE_FAILED, PIPELINE_FAILED}
        if not (self.failures.status_follows and ends_the_run):
            self._print(lines)

    def update(self, status: PipelineStatus) -> None:
        """Redraw the table."""
        self._print(self.failures.flush())
        self.live.update(
            live_table(
                self.title,
                status,
                now=_now(),
                spinner=self.spinner,
                until=self.until,
            )
        )

    def _print(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.live.console.print(Text(line, style="yellow"))


def _now() -> datetime:
    return datetime.now(UTC)  # noqa: TID251  an edge


def display_for(title: str, *, to_stderr: bool, until: str | None = None) -> Display:
    """Return a live table if the output is a terminal, else line output; `until` is the last stage asked for."""
    console = Console(stderr=to_stderr)
    # Output on stderr is followed by JSON on stdout, and by no status for people.
    status_follows = not to_stderr
    if console.is_terminal:
        return LiveTable(console, title, status_follows=status_follows, until=until)
    return LineOutput(console, status_follows=status_follows)
