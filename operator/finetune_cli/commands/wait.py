"""`finetune wait`: until a pipeline on a cluster has finished."""

import argparse

from finetune_cli.arguments import add_name, require_cluster, run_on_cluster
from finetune_cli.commands import Commands

DESCRIPTION = """\
Wait until a pipeline on a cluster has finished, well or not (Finished), or until all that was asked for is done
(Ready; a pipeline that ends otherwise ends the waiting, too). Exit code: 0 done, 1 failed or time is up, 2 wrong input,
3 finished below the gate.
"""


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "wait", help="wait until a pipeline on a cluster has finished", description=DESCRIPTION
    )
    add_name(parser)
    conditions = ("Finished", "Ready")
    parser.add_argument("--for", choices=conditions, default="Finished", dest="condition", help="default: Finished")
    parser.add_argument("--timeout", metavar="30m", help="as 90s, 30m, 1h30m (default: as long as it takes)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Wait, and say in a number how it ended."""
    require_cluster(arguments, "`finetune run` ends when it has ended")
    return run_on_cluster("wait", arguments)
