"""`finetune compare`: runs, pipelines of a cluster or generations of one name beside each other."""

import argparse

from finetune_cli.arguments import add_cluster_arguments, run_on_cluster
from finetune_cli.commands import Commands
from finetune_cli.diagnostics import UsageError
from finetune_cli.local.generations import is_local, local_run
from finetune_cli.output.comparison_lines import print_comparison

DESCRIPTION = """\
Compare runs on this machine, or with -n or --context pipelines on a cluster: the fields of the manifests that differ,
losses, scores, times, costs, and the loss curves with one scale. Differences of scores are from the first run; on equal
questions they are paired, as a gate's difference from the base model is. NAME@2 is the second generation of a run: an
edit of its manifest begins the next (see `finetune list --history`).
"""
BEST = """\
name the best run and begin with it: loss, validation_loss, time, cost, a metric of a task, or TASK/METRIC; write
max:METRIC or min:METRIC if its direction is not known
"""


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "compare",
        help="show how runs differ, and which is better",
        description=DESCRIPTION,
    )
    text = "name of a run or a pipeline, NAME@N for a generation, the manifest or the work folder of a run"
    parser.add_argument("names", nargs="+", metavar="NAME", help=text)
    add_cluster_arguments(parser)
    parser.add_argument("--best", metavar="METRIC", help=BEST)
    parser.add_argument(
        "-o",
        "--output",
        choices=("json", "table"),
        default="table",
        help="form of the output (default: table)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison."""
    names = arguments.names
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise UsageError(f"{repeated.pop()} is named twice: name different runs")
    if len(names) == 1:
        raise UsageError(
            f"name two runs or more; for the effect of an edit: finetune compare {names[0]}@1 {names[0]}"
        )
    has_flag = arguments.context or arguments.namespace
    # Without a flag, what exists on this machine decides, as for other commands.
    if has_flag or not any(map(is_local, names)):
        return run_on_cluster("compare", arguments)
    print_comparison([local_run(name) for name in names], arguments)
    return 0
