"""`finetune get`: print a pipeline as a tree of stages and attempts, on a cluster with their pods."""

import argparse
import json

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
from finetune_cli.local.look import look_at
from finetune_cli.local.watch import get_watch, tree
from finetune_cli.output.notes import with_notes
from finetune_cli.runs import find_runs
from finetune_operator.local.pipeline_file import to_object

DESCRIPTION = """\
Show a pipeline: its stages and attempts, the lost steps, and the reason why a stage waits. A note below a stage that
succeeded says what may be wrong with its result; with --json, the notes are status.notes. NAME is a run on this
machine (see `finetune list`), or a pipeline on a cluster, shown with its pods. FILE is the manifest of a run on this
machine. Without either, show the only run in .finetune, or list several; if there is none, list the pipelines of the
namespace. With -w, the exit codes are the same as for `finetune wait`.
"""
WATCHES_ONE = "-w watches one pipeline: give its name, and leave out --json"


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
        help="update the output until the pipeline has finished",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the whole object as JSON"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show a pipeline; with -w, return the exit code of `finetune wait`."""
    if targets_cluster(arguments.name, arguments):
        return run_on_cluster("get", arguments)
    if arguments.watch and arguments.json:
        raise UsageError(WATCHES_ONE)
    # Several runs are an error for other commands, which work on one run; here they are a list.
    if not arguments.name and not arguments.workdir:
        runs = find_runs()
        if len(runs) > 1:
            if arguments.watch:
                raise UsageError(WATCHES_ONE)
            print_runs(runs, as_json=arguments.json)
            return 0
    workdir = find_workdir(arguments.name, arguments.workdir)
    if arguments.watch:
        return get_watch(workdir)
    look = look_at(workdir)
    if arguments.json:
        print(json.dumps(with_notes(to_object(look.pipeline)), indent=1))
    else:
        Console(highlight=False, soft_wrap=True).print(tree(look))
    return 0
