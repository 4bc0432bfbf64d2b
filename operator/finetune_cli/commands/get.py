"""`finetune get`: a run on this machine, as a tree of stages and attempts."""

import argparse
import json

from rich.console import Console

from finetune_cli.commands import Commands
from finetune_cli.places import add_run, existing_workdir
from finetune_cli.view import board
from finetune_operator.api.conditions import READY
from finetune_operator.cluster.process.store import Store, as_object
from finetune_operator.pipeline import Pipeline

DESCRIPTION = "Show a run on this machine: stages, attempts, what was lost, and why something waits."


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("get", help="show a run", description=DESCRIPTION)
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="print the whole object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show the run."""
    pipeline = Store(existing_workdir(arguments.name, arguments.workdir)).read()
    if pipeline is None:
        return 1
    if arguments.json:
        print(json.dumps(as_object(pipeline), indent=1))
    else:
        _show(pipeline, Console(highlight=False, soft_wrap=True))
    return 0


def _show(pipeline: Pipeline, console: Console) -> None:
    status = pipeline.status
    console.print(board(pipeline.key.name, status))
    console.print(next((c.message for c in status.conditions if c.type == READY), ""), markup=False)
    if status.model:
        console.print(f"model {status.model.uri}  {status.model.digest}", markup=False)
