"""`finetune list`: one line for each run on this machine, or for each pipeline on a cluster."""

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path

from finetune_cli.arguments import add_cluster_arguments, run_on_cluster
from finetune_cli.commands import Commands
from finetune_cli.listing import COLUMNS, aligned, row
from finetune_cli.runs import RUNS, find_runs
from finetune_operator.api.group import API_VERSION, KIND
from finetune_operator.errors import ClusterError
from finetune_operator.local.job_folder import is_locked
from finetune_operator.local.pipeline_file import PipelineFile, to_object

DESCRIPTION = f"""\
List the runs on this machine, one a line, with phase, score, duration and age. A run whose `finetune run` has ended
early is Stopped. FOLDER holds runs that were started with --workdir. With -n, -A or --context, list the pipelines on
the cluster. Without runs in {RUNS} and without a FOLDER, nothing is listed.
"""


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "list", help="list runs, or pipelines on a cluster", description=DESCRIPTION
    )
    text = f"folders with runs, or of one run (default: {RUNS})"
    parser.add_argument(
        "folders", nargs="*", type=Path, metavar="FOLDER", default=[RUNS], help=text
    )
    add_cluster_arguments(parser)
    parser.add_argument(
        "-A", "--all-namespaces", action="store_true", help="list the pipelines of all namespaces"
    )
    parser.add_argument("--json", action="store_true", help="print the whole objects as JSON")
    parser.set_defaults(run=run, name=None, watch=False)


def run(arguments: argparse.Namespace) -> int:
    """Print the list."""
    if arguments.context or arguments.namespace or arguments.all_namespaces:
        return run_on_cluster("get", arguments)
    runs = [found for folder in arguments.folders for found in find_runs(folder)]
    if not runs and not arguments.json:
        folders = ", ".join(map(str, arguments.folders))
        print(f"no runs in {folders}; list the pipelines on a cluster with -n NAMESPACE or -A")
        return 0
    print_runs(runs, as_json=arguments.json)
    return 0


def print_runs(runs: list[Path], *, as_json: bool) -> None:
    """Print the runs in these folders; one that cannot be read is listed with the phase Unreadable."""
    if as_json:
        items = [to_object(pipeline) for found in runs if (pipeline := PipelineFile(found).read())]
        print(
            json.dumps({"apiVersion": API_VERSION, "kind": f"{KIND}List", "items": items}, indent=1)
        )
        return
    now = datetime.now(UTC)  # noqa: TID251  an edge
    for line in aligned([COLUMNS, *(_row(found, now) for found in runs)]):
        print(line)


def _row(run: Path, now: datetime) -> tuple[str, ...]:
    name = (
        run.name if run.parent == RUNS else str(run)
    )  # what selects the run: its name, or --workdir with its folder
    try:
        pipeline = PipelineFile(run).read()
    except ClusterError:
        pipeline = None
    if pipeline is None:
        return (name, "Unreadable", *[""] * (len(COLUMNS) - 2))
    return (name, *row(to_object(pipeline), now, working=is_locked(run))[1:])
