"""`finetune get`: print a pipeline as a tree of stages and attempts, on a cluster with their pods."""

import argparse
import json

from rich.console import Console

from finetune_cli.arguments import add_run_arguments, find_workdir, run_on_cluster, targets_cluster
from finetune_cli.commands import Commands
from finetune_cli.diagnostics import UsageError
from finetune_cli.display import live_table
from finetune_cli.exit_codes import FAILED
from finetune_cli.pipeline_status import ready_message
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.local.pipeline_file import PipelineFile, to_object

DESCRIPTION = """\
Show a pipeline: its stages and attempts, the lost steps, and the reason why a stage waits. NAME is a pipeline on a
cluster, shown with its pods. FILE is the manifest of a run on this machine. Without either, show the only run in
.finetune; if there is none, list the pipelines of the namespace. With -w, the exit code is that of `finetune wait`.
"""


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("get", help="show a pipeline, or list those of a namespace", description=DESCRIPTION)
    add_run_arguments(parser)
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="list the pipelines of all namespaces")
    parser.add_argument(
        "-w", "--watch", action="store_true", help="on a cluster: update the output until the pipeline has finished"
    )
    parser.add_argument("--json", action="store_true", help="print the whole object as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show a pipeline; return FAILED where the work folder holds none."""
    if targets_cluster(arguments.name, arguments):
        return run_on_cluster("get", arguments)
    if arguments.watch:
        raise UsageError("-w works on clusters only: `finetune run` shows the progress of a run on this machine")
    pipeline = PipelineFile(find_workdir(arguments.name, arguments.workdir)).read()
    if pipeline is None:
        return FAILED
    if arguments.json:
        print(json.dumps(to_object(pipeline), indent=1))
    else:
        _show(pipeline, Console(highlight=False, soft_wrap=True))
    return 0


def _show(pipeline: Pipeline, console: Console) -> None:
    status = pipeline.status
    console.print(live_table(pipeline.key.name, status))
    console.print(ready_message(status), markup=False)
    if status.model:
        console.print(f"model {status.model.uri}  {status.model.digest}", markup=False)
