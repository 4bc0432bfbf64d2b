"""`finetune logs`: print the logs of a stage's attempts, oldest first, or the metrics of training."""

import argparse
import sys
import time
from pathlib import Path

from finetune_cli.arguments import add_run_arguments, find_workdir, run_on_cluster, targets_cluster
from finetune_cli.commands import Commands
from finetune_cli.diagnostics import UsageError
from finetune_cli.display import no_attempt, print_attempt
from finetune_cli.exit_codes import FAILED
from finetune_cli.metrics import TRAIN, print_rows, rows_of_file
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import AttemptStatus
from finetune_operator.local.cluster import Folders
from finetune_operator.local.job_folder import is_locked
from finetune_operator.local.pipeline_file import PipelineFile
from finetune_operator.local.runner import LOG
from finetune_trainer.contract.metric_rows import METRICS

DESCRIPTION = """\
Print the log of a stage. On this machine (FILE, or the only run in .finetune): all attempts, oldest first; -f follows
the newest attempt until it ends. On a cluster (NAME): the newest attempt; -f follows it and all later attempts until
the stage ends. With --metrics, print the loss of training instead, over all attempts. On this machine: every step, with
all other metrics. On a cluster: what the status has, which is at most 64 points.
"""
STAGE_NAMES = tuple(stage.name for stage in STAGES)
POLL_SECONDS = 0.2


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("logs", help="print a stage's log", description=DESCRIPTION)
    add_run_arguments(parser)
    text = "stage whose log is printed; not needed with --metrics"
    parser.add_argument("stage", nargs="?", choices=STAGE_NAMES, help=text)
    parser.add_argument("--attempt", type=int, metavar="N", help="print only attempt N")
    parser.add_argument("-f", "--follow", action="store_true", help="print new lines as they are written")
    parser.add_argument("--metrics", action="store_true", help="print the metrics of training instead of a log")
    text = "form of the metrics: one JSON object a line, or a table (default: a table on a terminal, else json)"
    parser.add_argument("-o", "--output", choices=["json", "table"], help=text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the logs or the metrics."""
    _settle_arguments(arguments)
    if targets_cluster(arguments.name, arguments):
        return run_on_cluster("logs", arguments)
    workdir = find_workdir(arguments.name, arguments.workdir)
    if arguments.metrics:
        return _print_metrics(workdir, arguments.output)
    attempts = _attempts(workdir, arguments.stage)
    chosen = [attempt for attempt in attempts if arguments.attempt in {None, attempt.number}]
    if not chosen:
        raise no_attempt(arguments.stage, arguments.attempt, attempts)
    for attempt in chosen:
        newest = attempt is attempts[-1]
        _print(workdir / "jobs" / attempt.job, attempt, follow=arguments.follow and newest)
    return 0


def _settle_arguments(arguments: argparse.Namespace) -> None:
    """Set the stage where it is the only positional argument; raise UsageError for what does not go together."""
    if arguments.stage is None and arguments.name in STAGE_NAMES:
        arguments.name, arguments.stage = None, arguments.name
    if arguments.metrics:
        if arguments.stage not in {None, TRAIN}:
            raise UsageError(f"--metrics prints the metrics of train: leave out {arguments.stage}")
        if arguments.follow or arguments.attempt is not None:
            raise UsageError("--metrics prints what all attempts have recorded so far: leave out -f and --attempt")
        arguments.stage = TRAIN
    elif arguments.output:
        raise UsageError("-o is the form of metrics: add --metrics, or leave out -o")
    elif arguments.stage is None:
        raise UsageError(f"name the stage whose log is printed: {', '.join(STAGE_NAMES)}")


def _print_metrics(workdir: Path, output: str | None) -> int:
    pipeline = PipelineFile(workdir).read()
    stage = pipeline.status.stages.get(TRAIN) if pipeline else None
    if pipeline is None or stage is None or not stage.attempts:
        raise no_attempt(TRAIN, None, ())
    path = Folders.under(workdir, workdir).workspace(pipeline) / TRAIN / stage.identity / METRICS
    rows = rows_of_file(path)
    if not rows:
        print(f"{path} has no rows: training may not have finished a step yet", file=sys.stderr)
        return FAILED
    print_rows(rows, output)
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
