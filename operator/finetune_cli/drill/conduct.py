"""Ask before a drill, watch it, and print its report."""

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable

from finetune_cli.diagnostics import UsageError
from finetune_cli.drill.cost import cost_line
from finetune_cli.drill.record import Drill, Look
from finetune_cli.exit_codes import FAILED, INTERRUPTED
from finetune_cli.output.table import aligned
from finetune_operator.api.status import AttemptStatus
from finetune_operator.errors import ClusterError

# The pause between two looks limits how exact the reported times are. It grows with the time since the eviction,
# so that a drill of minutes does not load the API server as one of seconds may.
POLL_FRACTION = 0.03
"""Pause between two looks, as a fraction of the time since the eviction."""
POLL_SECONDS = 0.2
"""Shortest pause."""
MAX_POLL_SECONDS = 1.0
"""Longest pause."""


def confirm(announcement: str, *, yes: bool) -> bool:
    """Print what will happen and return whether the user agrees; raises UsageError without a terminal to ask on."""
    # All on stderr: stdout holds the report alone, which may be JSON.
    print(announcement, file=sys.stderr, flush=True)
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(
            "nothing was evicted: there is no terminal to ask on; add --yes to evict without asking"
        )
    print("Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    # Empty at the end of the input (Ctrl-D), which is no agreement.
    answer = sys.stdin.readline().strip().lower()
    agreed = answer in {"y", "yes"}
    if not agreed:
        print("nothing was evicted", file=sys.stderr)
    return agreed


async def watch(
    drill: Drill, look: Callable[[], Awaitable[Look]], timeout_seconds: float | None
) -> None:
    """Look until the drill is over; a timeout and a ClusterError end it with what was seen so far."""
    printed: set[str] = set()
    loop = asyncio.get_running_loop()
    started = loop.time()
    try:
        async with asyncio.timeout(timeout_seconds):
            while not drill.record(await look()):
                _print_new(drill, printed)
                pause = (loop.time() - started) * POLL_FRACTION
                await asyncio.sleep(min(max(pause, POLL_SECONDS), MAX_POLL_SECONDS))
    except TimeoutError:
        drill.problem = f"not over {timeout_seconds:g} s after the eviction (--timeout)"
    except ClusterError as error:
        # The eviction stands, so the report with what was seen is worth more than the error alone.
        drill.problem = f"cannot watch any longer: {error}"
    _print_new(drill, printed)


def conclude(
    drill: Drill, evict_and_watch: Callable[[], None], arguments: argparse.Namespace
) -> int:
    """Evict and watch, print the report, and return the exit code; Ctrl-C ends the watching only."""
    code = 0
    try:
        evict_and_watch()
    except KeyboardInterrupt:
        # Before the eviction there is nothing to report.
        if not drill.evicted:
            raise
        code = INTERRUPTED
        drill.problem = "stopped watching (Ctrl-C): the eviction stands, and `finetune get` shows what follows"
    if arguments.json:
        print(json.dumps(drill.as_json(), indent=1))
    else:
        print("\n".join(report(drill)))
    if code == 0 and drill.problem:
        return FAILED
    return code


def report(drill: Drill) -> list[str]:
    """Return the costs of a drill as lines of text."""
    target = drill.target
    verb = "evicted"
    if target.kill:
        verb = "killed"
    attempt = f"attempt {target.attempt.number} of {target.stage}"
    heading = f"{target.pipeline}: {attempt} was {verb}"
    if drill.step is not None:
        heading += f" at step {drill.step}"
    rows = [
        (_title(drill, name), f"{seconds:.1f}s", _detail(drill, name))
        for name, seconds in drill.seconds.items()
    ]
    if drill.lost_steps is not None:
        rows.append(("steps lost", str(drill.lost_steps), ""))
    lines = [heading]
    if rows:
        lines += aligned(rows)
    if drill.cost:
        lines.append(f"money: {cost_line(drill.cost)}")
    if drill.problem:
        lines.append(drill.problem)
    return lines


def _title(drill: Drill, name: str) -> str:
    titles = {
        "durable": "work durable, attempt ended",
        "nextJob": "next attempt's Job",
        "nextStep": "next step",
    }
    if drill.target.kill:
        # A killed process saves nothing when it ends.
        titles["durable"] = "attempt ended"
    return titles[name]


def _detail(drill: Drill, name: str) -> str:
    match name:
        case "durable":
            return _ending(drill.attempt or drill.target.attempt)
        case "nextJob":
            if drill.following is None:
                return ""
            return f"attempt {drill.following.number}"
        case _:
            return f"step {drill.next_step}, resumed at {drill.resumed_at}"


def _ending(attempt: AttemptStatus) -> str:
    parts = []
    if attempt.saved_step is not None:
        parts.append(f"saved at step {attempt.saved_step}")
    if attempt.exit_code is not None:
        parts.append(f"exit code {attempt.exit_code}")
    return ", ".join(parts)


def _print_new(drill: Drill, printed: set[str]) -> None:
    """Print the moments that were not printed before to standard error: a drill may take minutes."""
    for name, seconds in drill.seconds.items():
        if name not in printed:
            print(
                f"after {seconds:.1f}s: {_title(drill, name)}",
                file=sys.stderr,
                flush=True,
            )
            printed.add(name)
