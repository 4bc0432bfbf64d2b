"""`finetune logs`: print the logs of a stage's attempts, oldest first."""

import argparse
import sys
import time
from pathlib import Path

from finetune_cli.arguments import add_run_arguments, find_workdir, run_on_cluster, targets_cluster
from finetune_cli.commands import Commands
from finetune_cli.display import no_attempt, print_attempt
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import AttemptStatus
from finetune_operator.local.job_folder import is_locked
from finetune_operator.local.pipeline_file import PipelineFile
from finetune_operator.local.runner import LOG

DESCRIPTION = """\
Print the log of a stage. On this machine (FILE, or the only run in .finetune): all attempts, oldest first; -f follows
the newest attempt until it ends. On a cluster (NAME): the newest attempt; -f follows it and all later attempts until
the stage ends.
"""
POLL_SECONDS = 0.2


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("logs", help="print a stage's log", description=DESCRIPTION)
    add_run_arguments(parser)
    parser.add_argument("stage", choices=[stage.name for stage in STAGES], help="stage whose log is printed")
    parser.add_argument("--attempt", type=int, metavar="N", help="print only attempt N")
    parser.add_argument("-f", "--follow", action="store_true", help="print new lines as they are written")
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


def _attempts(workdir: Path, stage: str) -> tuple[AttemptStatus, ...]:
    pipeline = PipelineFile(workdir).read()
    known = pipeline.status.stages.get(stage) if pipeline else None
    return known.attempts if known else ()


def _print(folder: Path, attempt: AttemptStatus, *, follow: bool) -> None:
    print_attempt(attempt)
    try:
        with (folder / LOG).open(errors="replace") as log:
            while True:
                # Check before reading: lines that the process writes before it exits are then read too.
                is_running = follow and is_locked(folder)
                sys.stdout.write(log.read())
                sys.stdout.flush()
                if not is_running:
                    return
                time.sleep(POLL_SECONDS)
    except FileNotFoundError:
        print(f"{folder / LOG} does not exist; the attempt may not have started", file=sys.stderr)
