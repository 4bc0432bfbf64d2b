"""`finetune logs`: print the logs of a stage's attempts, oldest first, or the metrics of training."""

import argparse
import sys
import time
from pathlib import Path

from finetune_cli.arguments import (
    add_run_arguments,
    find_workdir,
    run_on_cluster,
    targets_cluster,
)
from finetune_cli.commands import Commands
from finetune_cli.diagnostics import UsageError
from finetune_cli.exit_codes import FAILED
from finetune_cli.output.metrics import TRAIN, print_rows, print_samples, rows_of_file
from finetune_cli.output.status.text import no_attempt, print_attempt, stage_with_log
from finetune_cli.runs import run_named
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import AttemptStatus
from finetune_operator.local.cluster import Folders
from finetune_operator.local.job_folder import is_locked
from finetune_operator.local.pipeline_file import PipelineFile
from finetune_operator.local.runner import LOG
from finetune_trainer.contract.metric_rows import METRICS
from finetune_trainer.contract.sample_rows import SAMPLES, read_samples

DESCRIPTION = """\
Print the log of a stage. On this machine (FILE, or the only run in .finetune): all attempts, oldest first; -f follows
the newest attempt until it ends. On a cluster (NAME): the newest attempt; -f follows it and all later attempts until
the stage ends. With --metrics, print the loss of training instead, over all attempts. On this machine: every step, with
all other metrics. On a cluster: what the status has, which is at most 64 points.
"""
STAGE_NAMES = tuple(stage.name for stage in STAGES)
# A file on this machine may be read more often than an API server is asked (cluster/session.py).
POLL_SECONDS = 0.2


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "logs", help="print a stage's log", description=DESCRIPTION
    )
    add_run_arguments(parser)
    text = "stage whose log is printed (default: the stage that runs, has failed or ran last)"
    parser.add_argument("stage", nargs="?", choices=STAGE_NAMES, help=text)
    parser.add_argument("--attempt", type=int, metavar="N", help="print only attempt N")
    parser.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="print new lines as they are written",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--metrics",
        action="store_true",
        help="print the metrics of training instead of a log",
    )
    text = "print the texts that training generated for train.samples, on a cluster as far as its pods exist"
    instead.add_argument("--samples", action="store_true", help=text)
    text = "form of metrics and samples: one JSON object a line, or a table (default: a table on a terminal, else json)"
    parser.add_argument("-o", "--output", choices=["json", "table"], help=text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the logs or the metrics."""
    _settle_arguments(arguments)
    if targets_cluster(arguments.name, arguments):
        return run_on_cluster("logs", arguments)
    workdir = find_workdir(arguments.name, arguments.workdir)
    pipeline = PipelineFile(workdir).read()
    if arguments.stage is None and pipeline:
        arguments.stage = stage_with_log(pipeline.status)
    if arguments.stage is None:
        raise UsageError(f"{workdir.name} has no log yet: no stage has started")
    if arguments.metrics or arguments.samples:
        return _print_rows(workdir, arguments.output, samples=arguments.samples)
    attempts = _attempts(workdir, arguments.stage)
    chosen = [
        attempt for attempt in attempts if arguments.attempt in {None, attempt.number}
    ]
    if not chosen:
        raise no_attempt(arguments.stage, arguments.attempt, attempts)
    for attempt in chosen:
        newest = attempt is attempts[-1]
        _print(
            workdir / "jobs" / attempt.job, attempt, follow=arguments.follow and newest
        )
    return 0


def _settle_arguments(arguments: argparse.Namespace) -> None:
    """Set the stage if it is the only positional argument; raise UsageError for arguments that do not go together."""
    # The name may be left out, so argparse takes a single argument for it.
    is_stage = arguments.stage is None and arguments.name in STAGE_NAMES
    if is_stage and not _names_run(arguments):
        arguments.stage = arguments.name
        arguments.name = None
    if arguments.metrics:
        _require_train(arguments, "metrics")
    elif arguments.samples:
        _require_train(arguments, "samples")
    elif arguments.output:
        raise UsageError(
            "-o is the form of metrics and samples: add --metrics or --samples, or leave out -o"
        )


def _names_run(arguments: argparse.Namespace) -> bool:
    """Return whether a run on this machine has the stage's name: `init` names it train if its data is train.jsonl."""
    if arguments.workdir or arguments.context or arguments.namespace:
        return False
    return run_named(arguments.name) is not None


def _require_train(arguments: argparse.Namespace, rows: str) -> None:
    """Set the stage to train; raise UsageError for arguments that --metrics or --samples cannot have."""
    if arguments.stage not in {None, TRAIN}:
        raise UsageError(
            f"--{rows} prints the {rows} of train: leave out {arguments.stage}"
        )
    if arguments.follow or arguments.attempt is not None:
        raise UsageError(
            f"--{rows} prints what all attempts have recorded so far: leave out -f and --attempt"
        )
    arguments.stage = TRAIN


def _print_rows(workdir: Path, output: str | None, *, samples: bool) -> int:
    """Print a file of the train stage; return FAILED if it has no rows."""
    folder = training_folder(workdir)
    if samples:
        return _print_samples(folder / SAMPLES, output)
    rows = rows_of_file(folder / METRICS)
    if not rows:
        reason = "training may not have finished a step yet"
        print(f"{folder / METRICS} has no rows: {reason}", file=sys.stderr)
        return FAILED
    print_rows(rows, output)
    return 0


def training_folder(workdir: Path) -> Path:
    """Return the folder of the current training of a run; raises UsageError before its first attempt."""
    pipeline = PipelineFile(workdir).read()
    stage = None
    if pipeline:
        stage = pipeline.status.stages.get(TRAIN)
    if pipeline is None or stage is None or not stage.attempts:
        raise no_attempt(TRAIN, None, ())
    # The folder of the current identity: rows of a training with other settings are in another one.
    return Folders.under(workdir, workdir).workspace(pipeline) / TRAIN / stage.identity


def _print_samples(file: Path, output: str | None) -> int:
    rows = read_samples(file)
    if not rows:
        reason = "train.samples may not be set, or no validation has run yet"
        print(f"{file} has no rows: {reason}", file=sys.stderr)
        return FAILED
    print_samples(rows, output)
    return 0


def _attempts(workdir: Path, stage: str) -> tuple[AttemptStatus, ...]:
    pipeline = PipelineFile(workdir).read()
    if pipeline is None or stage not in pipeline.status.stages:
        return ()
    return pipeline.status.stages[stage].attempts


def _print(folder: Path, attempt: AttemptStatus, *, follow: bool) -> None:
    print_attempt(attempt)
    try:
        # A program may write any bytes, and a log that grows may end within a character.
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
        print(
            f"{folder / LOG} does not exist; the attempt may not have started",
            file=sys.stderr,
        )
