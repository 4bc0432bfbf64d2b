"""`finetune wait` and `finetune get -w` of a run on this machine."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from finetune_cli.arguments import find_workdir, parse_timeout
from finetune_cli.local.look import RunLook, look_at
from finetune_cli.local.summary import next_commands, summary_lines
from finetune_cli.outcome import ready_message
from finetune_cli.output.status.tree import live_table
from finetune_operator.errors import ClusterError

# A file on this machine may be read more often than an API server is asked (cluster/session.py).
POLL_SECONDS = 0.2


def wait(arguments: argparse.Namespace) -> int:
    """Wait for the condition, print the end, and return the exit code; raises ClusterError on a timeout."""
    timeout = parse_timeout(arguments.timeout)
    folder = find_workdir(arguments.name, arguments.workdir)
    started = time.monotonic()
    look = look_at(folder)
    code = look.exit_code(arguments.condition)
    while code is None:
        if timeout is not None and time.monotonic() - started > timeout:
            raise ClusterError(
                f"{summary(look)} (not {arguments.condition} after {arguments.timeout})"
            )
        time.sleep(POLL_SECONDS)
        look = look_at(folder)
        code = look.exit_code(arguments.condition)
    print(summary(look))
    return code


def summary(look: RunLook) -> str:
    """Return the state of a run in a line, as for a pipeline on a cluster."""
    message = look.continuation() or ready_message(look.pipeline.status)
    return f"{look.key}: {look.pipeline.status.phase}: {message or 'starting'}"


def get_watch(folder: Path, condition: str = "Finished") -> int:
    """Show the run until it ends: redrawn in place on a terminal, else printed again on every change."""
    console = Console(highlight=False, soft_wrap=True)
    show: Callable[[RunLook], None] = _ChangePrinter()
    if not console.is_terminal:
        return _show_until_end(folder, condition, show)
    # By default, rich cuts off the end of what is higher than the terminal.
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        return _show_until_end(
            folder, condition, lambda look: live.update(tree(look), refresh=True)
        )


def _show_until_end(
    folder: Path, condition: str, show: Callable[[RunLook], None]
) -> int:
    while True:
        look = look_at(folder)
        show(look)
        code = look.exit_code(condition)
        if code is not None:
            return code
        time.sleep(POLL_SECONDS)


class _ChangePrinter:
    """Prints a run when it has changed."""

    def __init__(self) -> None:
        self.printed = ""

    def __call__(self, look: RunLook) -> None:
        console = Console(highlight=False, soft_wrap=True)
        with console.capture() as captured:
            # Without the time: it would print the same tree every second.
            console.print(tree(look, timed=False))
        text = captured.get()
        if text != self.printed:
            sys.stdout.write(text)
            sys.stdout.flush()
        self.printed = text


def tree(look: RunLook, *, timed: bool = True) -> RenderableType:
    """Return the tree of stages and attempts, followed by the summary; `timed` adds the time of what runs."""
    now = None
    # Without a process that works on the run, nothing runs, and the time since the start says nothing.
    if look.works and timed:
        now = datetime.now(UTC)  # noqa: TID251  an edge
    name = look.pipeline.key.name
    table = live_table(name, look.pipeline.status, now=now, until=look.until)
    return Group(table, *(Text(line) for line in _lines(look)))


def _lines(look: RunLook) -> Iterator[str]:
    continuation = look.continuation()
    lines = list(summary_lines(look.pipeline.status, look.folder))
    if continuation:
        # The last line is the outcome, and the run has none.
        lines[-1] = continuation
    yield from lines
    yield from next_commands(look.pipeline, look.folder)
