"""`finetune retry`: run again from the stage that failed, with fresh budgets."""

import argparse

from finetune_cli.arguments import add_cluster_arguments, run_on_cluster, targets_cluster
from finetune_cli.commands import Commands
from finetune_cli.commands import run as here

DESCRIPTION = """\
Start the stage that failed again, with fresh budgets for failures and interruptions; stages that succeeded are kept.
FILE: otherwise the same as `finetune run`. NAME: the pipeline on a cluster; it returns at once.
"""


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("retry", help="run again from the stage that failed", description=DESCRIPTION)
    here.add_arguments(parser)
    add_cluster_arguments(parser)
    parser.set_defaults(run=run, retry=True)


def run(arguments: argparse.Namespace) -> int:
    """Ask the operator for it, or run it here."""
    if targets_cluster(str(arguments.file), arguments):
        arguments.name = str(arguments.file)
        return run_on_cluster("annotate", arguments)
    return here.run(arguments)
