"""`finetune workspaces`: list what lies in workspaces, and delete what nothing uses."""

import argparse

from finetune_cli.arguments import (
    add_run_arguments,
    run_on_cluster,
    targets_cluster,
)
from finetune_cli.commands import Commands
from finetune_cli.diagnostics import UsageError
from finetune_cli.local import workspaces

DESCRIPTION = """\
List what lies in workspaces and what uses it. On this machine: the folders of results of one run, or of all. An unused
result is of an earlier edit. The newest of each stage stay, as workspace.keepUnused of the manifest says; --prune
deletes the others. On a cluster: the claims of a namespace, with the pipelines and pods that use them, and the kubectl
command that deletes those without. Nothing is deleted there: the trainer deletes unused results when a stage starts.
"""


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "workspaces",
        help="list the results in workspaces, and delete unused results",
        description=DESCRIPTION,
    )
    add_run_arguments(parser)
    parser.add_argument(
        "-A",
        "--all-namespaces",
        action="store_true",
        help="list the claims of all namespaces",
    )
    parser.add_argument(
        "--prune",
        action="store_true",
        help="on this machine: delete the unused results that do not stay",
    )
    parser.add_argument(
        "--keep",
        type=_number,
        metavar="N",
        help="on this machine: unused results of each stage that stay, in place of workspace.keepUnused",
    )
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.set_defaults(run=run)


def _number(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is less than 0")
    return number


def run(arguments: argparse.Namespace) -> int:
    """Print the list; with --prune, delete first."""
    if not targets_cluster(arguments.name, arguments):
        return workspaces.run(arguments)
    if arguments.prune or arguments.keep is not None:
        raise UsageError(
            "--prune and --keep work on this machine only: on a cluster, the trainer deletes unused results when a "
            "stage starts, and kubectl deletes claims"
        )
    return run_on_cluster("workspaces", arguments)
