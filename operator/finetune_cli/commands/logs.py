"""`finetune logs`: what a stage's attempts printed, one after the other."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from finetune_cli.arguments import add_run_arguments, find_workdir, run_on_cluster, targets_cluster
from finetune_cli.commands import Commands
from finetune_cli.diagnostics import UsageError
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import AttemptStatus
from finetune_operator.local.job_folder import is_locked
from finetune_operator.local.pipeline_file import PipelineFile
from finetune_operator.local.runner import LOG

DESCRIPTION = """\
Print what a stage wrote. On this machine (FILE, or the only run in .finetune): all its attempts, oldest first; -f waits
for more until the newest ends. On a cluster (NAME): the newest attempt; -f goes on with the next until the stage ends.
"""
POLL_SECONDS = 0.2


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("logs", help="print a stage's log", description=DESCRIPTION)
    add_run_arguments(parser)
    parser.add_argument("stage", choices=[stage.name for stage in STAGES])
    parser.add_argument("--attempt", type=int, help="only this one")
    parser.add_argument("-f", "--follow", action="store_true", help="wait for more")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the logs."""
    if targets_cluster(arguments.name, arguments):
        return run_on_cluster("logs", arguments)
    workdir = find_workdir(arguments.name, arguments.workdir)
    attempts = _attempts(workdir, arguments.stage)
    chosen = [attempt for attempt in attempts if arguments.attempt in {None, attempt.number}]
    if not chosen:
        raise no_attempt(arguments.stage, arguments.attempt, attempts)
    for attempt in chosen:
        newest = attempt is attempts[-1]
        _print(workdir / "jobs" / attempt.job, attempt, follow=arguments.follow and newest)
    return 0


def no_attempt(stage: str, number: int | None, attempts: Sequence[AttemptStatus]) -> UsageError:
    """Say which attempts there are."""
    numbers = ", ".join(str(attempt.number) for attempt in attempts) or "none yet"
    return UsageError(f"{stage} has no attempt{f' {number}' if number else ''}: there are {numbers}")


def print_attempt(attempt: AttemptStatus) -> None:
    """Say whose log follows, where it is in nobody's way."""
    print(f"--- attempt {attempt.number}: {attempt.job}", file=sys.stderr, flush=True)


def _attempts(workdir: Path, stage: str) -> tuple[AttemptStatus, ...]:
    pipeline = PipelineFile(workdir).read()
    known = pipeline.status.stages.get(stage) if pipeline else None
    return known.attempts if known else ()


def _print(folder: Path, attempt: AttemptStatus, *, follow: bool) -> None:
    print_attempt(attempt)
    try:
        with (folder / LOG).open(errors="replace") as log:
            while True:
                alive = follow and is_locked(folder)  # before reading, so that its last words are not missed
                sys.stdout.write(log.read())
                sys.stdout.flush()
                if not alive:
                    return
                time.sleep(POLL_SECONDS)
    except FileNotFoundError:
        print(f"{folder / LOG} is not there", file=sys.stderr)
