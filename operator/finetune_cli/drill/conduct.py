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
from finetune_cli.listing import aligned
from finetune_operator.errors import ClusterError

POLL_SECONDS, MAX_POLL_SECONDS, POLL_FRACTION = 0.2, 1.0, 0.03
"""Between two looks: a fraction of the time since the eviction, within these bounds. So exact are the times."""


def confirm(announcement: str, *, yes: bool) -> bool:
    """Print what will happen and return whether the user agrees; raises UsageError without a terminal to ask on."""
    print(announcement, file=sys.stderr, flush=True)
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(
            "nothing was evicted: there is no terminal to ask on; add --yes to evict without asking"
        )
    print("Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    try:
        agreed = input().strip().lower() in {"y", "yes"}
    except EOFError:
        agreed = False
    if not agreed:
        print("nothing was evicted", file=sys.stderr)
    return agreed


async def watch(
    drill: Drill, look: Callable[[], Awaitable[Look]], timeout_seconds: float | None
) -> None:
    """Look until the drill is over; a timeout and a ClusterError end it with what was seen so far."""
    told: set[str] = set()
    loop = asyncio.get_running_loop()
    started = loop.time()
    try:
        async with asyncio.timeout(timeout_seconds):
            while not drill.record(await look()):
                _print_new(drill, told)
                pause = (loop.time() - started) * POLL_FRACTION
                await asyncio.sleep(min(max(pause, POLL_SECONDS), MAX_POLL_SECONDS))
    except TimeoutError:
        drill.problem = f"not over {timeout_seconds:g} s after the eviction (--timeout)"
    except ClusterError as error:
        drill.problem = f"cannot watch any longer: {error}"
    _print_new(drill, told)


def conclude(
    drill: Drill, evict_and_watch: Callable[[], None], arguments: argparse.Namespace
) -> int:
    """Evict and watch, print the report, and return the exit code; Ctrl-C ends the watching only."""
    code = 0
    try:
        evict_and_watch()
    except KeyboardInterrupt:
        if not drill.evicted:
            raise
        code = INTERRUPTED
        drill.problem = (
            "stopped watching (Ctrl-C): the eviction stands, and `finetune get` shows what follows"
        )
    if arguments.json:
        print(json.dumps(drill.as_json(), indent=1))
    else:
        print("\n".join(report(drill)))
    return code or (FAILED if drill.problem else 0)


def report(drill: Drill) -> list[str]:
    """Return what a drill cost as lines of text."""
    target, at = drill.target, "" if drill.step is None else f" at step {drill.step}"
    done = "killed" if target.kill else "evicted"
    lines = [f"{target.pipeline}: attempt {target.attempt.number} of {target.stage} was {done}{at}"]
    rows = [
        (_title(drill, name), f"{seconds:.1f}s", _detail(drill, name))
        for name, seconds in drill.seconds.items()
    ]
    if drill.lost_steps is not None:
        rows.append(("steps lost", str(drill.lost_steps), ""))
    money = [f"money: {cost_line(drill.cost)}"] if drill.cost else []
    return [
        *lines,
        *(aligned(rows) if rows else ()),
        *money,
        *([drill.problem] if drill.problem else []),
    ]


def _title(drill: Drill, name: str) -> str:
    ended = "attempt ended" if drill.target.kill else "work durable, attempt ended"
    return {"durable": ended, "nextJob": "next attempt's Job", "nextStep": "next step"}[name]


def _detail(drill: Drill, name: str) -> str:
    ended, later = drill.attempt or drill.target.attempt, drill.following
    match name:
        case "durable":
            saved = "" if ended.saved_step is None else f"saved at step {ended.saved_step}"
            code = "" if ended.exit_code is None else f"exit code {ended.exit_code}"
            return ", ".join(filter(None, (saved, code)))
        case "nextJob":
            return f"attempt {later.number}" if later else ""
        case _:
            return f"step {drill.next_step}, resumed at {drill.resumed_at}"


def _print_new(drill: Drill, told: set[str]) -> None:
    """Print the moments that were not printed before to standard error: a drill may take minutes."""
    for name, seconds in drill.seconds.items():
        if name not in told:
            print(f"after {seconds:.1f}s: {_title(drill, name)}", file=sys.stderr, flush=True)
            told.add(name)
