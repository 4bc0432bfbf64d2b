"""`finetune get`: print a pipeline as a tree of stages and attempts, on a cluster with their pods."""

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from finetune_cli.arguments import (
    add_run_arguments,
    find_workdir,
    run_on_cluster,
    targets_cluster,
)
from finetune_cli.commands import Commands
from finetune_cli.commands.list import print_runs
from finetune_cli.diagnostics import UsageError
from finetune_cli.exit_codes import FAILED
from finetune_cli.local.summary import run_argument, summary_lines
from finetune_cli.output.notes import with_notes
from finetune_cli.output.status_tree import live_table
from finetune_cli.runs import find_runs
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.local.job_folder import is_locked
from finetune_operator.local.pipeline_file import PipelineFile, to_object

DESCRIPTION = """\
Show a pipeline: its stages and attempts, the lost steps, and the reason why a stage waits. A note below a stage that
succeeded says what may be wrong with its result; with --json, the notes are status.notes. NAME is a run on this
machine (see `finetune list`), or a pipeline on a cluster, shown with its pods. FILE is the manifest of a run on this
machine. Without either, show the only run in .finetune, or list several; if there is none, list the pipelines of the
namespace. With -w, the exit codes are the same as for `finetune wait`.
"""


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "get",
        help="show a pipeline, or list the pipelines of a namespace",
        description=DESCRIPTION,
    )
    add_run_arguments(parser)
    parser.add_argument(
        "-A",
        "--all-namespaces",
        action="store_true",
        help="list the pipelines of all namespaces",
    )
    parser.add_argument(
        "-w",
        "--watch",
        action="store_true",
        help="on a cluster: update the output until the pipeline has finished",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the whole object as JSON"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show a pipeline; return FAILED if the work folder holds none."""
    if targets_cluster(arguments.name, arguments):
        return run_on_cluster("get", arguments)
    if arguments.watch:
        raise UsageError(
            "-w works on clusters only: `finetune run` shows the progress of a run on this machine"
        )
    # Several runs are an error for other commands, which work on one run; here they are a list.
    if not arguments.name and not arguments.workdir:
        runs = find_runs()
        if len(runs) > 1:
            print_runs(runs, as_json=arguments.json)
            return 0
    workdir = find_workdir(arguments.name, arguments.workdir)
    pipeline = PipelineFile(workdir).read()
    if pipeline is None:
        return FAILED
    if arguments.json:
        print(json.dumps(with_notes(to_object(pipeline)), indent=1))
    else:
        _show(pipeline, workdir, Console(highlight=False, soft_wrap=True))
    return 0


def _show(pipeline: Pipeline, workdir: Path, console: Console) -> None:
    working = is_locked(workdir)
    # Without a process that works on the run, nothing runs, and the time since the start says nothing.
    now = None
    if working:
        now = datetime.now(UTC)  # noqa: TID251  an edge
    console.print(live_table(pipeline.key.name, pipeline.status, now=now))
    for line in summary_lines(pipeline.status, workdir):
        console.print(line, markup=False)
    if not working and not pipeline.status.finished_at:
        command = f"finetune run {run_argument(workdir)}"
        console.print(
            f"no `finetune run` works on it; to continue: {command}", markup=False
        )
