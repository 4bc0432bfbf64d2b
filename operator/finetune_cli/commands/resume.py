"""`finetune resume`: let a suspended pipeline go on."""

import argparse

from finetune_cli.commands import Commands
from finetune_cli.places import add_name, only_on_cluster, run_on_cluster

DESCRIPTION = """\
Take a suspension back (spec.suspend): the stage that was stopped goes on where it was. NAME is a pipeline on a
cluster; with -n or --context a FILE names it too.
"""


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("resume", help="let a suspended pipeline go on", description=DESCRIPTION)
    add_name(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ask the operator for it."""
    only_on_cluster(arguments, "`finetune run` goes on where it was")
    return run_on_cluster("asking", arguments)
