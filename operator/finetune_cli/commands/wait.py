"""`finetune wait`: wait until a pipeline on a cluster has finished."""

import argparse

from finetune_cli.arguments import add_name, require_cluster, run_on_cluster
from finetune_cli.commands import Commands

DESCRIPTION = """\
Wait until a pipeline on a cluster has the condition Finished (it succeeded or failed), or Ready (all its stages are
done). A pipeline that can no longer become Ready also ends the wait. Exit code: 0 done, 1 failed or timed out, 2 wrong
arguments, 3 finished below the gate.
"""


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "wait",
        help="wait until a pipeline on a cluster has finished",
        description=DESCRIPTION,
    )
    add_name(parser)
    conditions = ("Finished", "Ready")
    parser.add_argument(
        "--for",
        choices=conditions,
        default="Finished",
        dest="condition",
        help="condition to wait for (default: Finished)",
    )
    parser.add_argument(
        "--timeout",
        metavar="30m",
        help="longest wait, as 90s, 30m or 1h30m (default: unlimited)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Wait and return the exit code."""
    require_cluster(arguments, "`finetune run` returns when the pipeline has finished")
    return run_on_cluster("wait", arguments)
