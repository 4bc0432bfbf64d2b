"""`finetune suspend`: stop a pipeline on a cluster for a while."""

import argparse

from finetune_cli.commands import Commands
from finetune_cli.places import add_name, only_on_cluster, run_on_cluster

DESCRIPTION = """\
Stop what is running, as an eviction would, and start nothing until `finetune resume` (spec.suspend). NAME is a
pipeline on a cluster; with -n or --context a FILE names it too.
"""


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("suspend", help="stop a pipeline on a cluster for a while", description=DESCRIPTION)
    add_name(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ask the operator for it."""
    only_on_cluster(arguments, "Ctrl-C in `finetune run` stops it, and running it again goes on")
    return run_on_cluster("asking", arguments)
