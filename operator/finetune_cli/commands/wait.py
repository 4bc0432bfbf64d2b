"""`finetune wait`: wait until a pipeline has finished."""

import argparse

from finetune_cli.arguments import add_target, run_on_cluster, targets_cluster
from finetune_cli.commands import Commands
from finetune_cli.local import watch

DESCRIPTION = """\
Wait until a pipeline has the condition Finished (it succeeded or failed), or Ready (all its stages are done). A
pipeline that can no longer become Ready also ends the wait. So does a run on this machine that no process works on:
with 0 or 3 if it has done all that --until asked for, else with 1. Exit code: 0 done, 1 failed, stopped or timed out,
2 wrong arguments, 3 finished below the gate.
"""


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "wait",
        help="wait until a pipeline has finished",
        description=DESCRIPTION,
    )
    add_target(parser)
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
    if targets_cluster(arguments.name, arguments):
        return run_on_cluster("wait", arguments)
    return watch.wait(arguments)
