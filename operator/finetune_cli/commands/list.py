"""`finetune list`: one line for each run on this machine, or for each pipeline on a cluster."""

import argparse
import json
import shlex
from datetime import UTC, datetime
from pathlib import Path

from finetune_cli.arguments import add_cluster_arguments, run_on_cluster
from finetune_cli.commands import Commands
from finetune_cli.diagnostics import UsageError
from finetune_cli.local.history_list import print_history
from finetune_cli.local.look import look_at
from finetune_cli.output.notes import with_notes
from finetune_cli.output.table import COLUMNS, fitted, row
from finetune_cli.runs import RUNS, find_runs, run_named, runs_elsewhere
from finetune_operator.api.group import API_VERSION, KIND
from finetune_operator.errors import ClusterError
from finetune_operator.local.pipeline_file import to_object
from finetune_trainer.contract.results import LAST_STEPS

DESCRIPTION = f"""\
List the runs on this machine, one a line, with phase, score, duration, age and notes. Of a score with an arrow, the
first number is the base model's. A run whose `finetune run` has ended early is Stopped. FOLDER holds runs that were
started with --workdir. With -n, -A or --context, list the pipelines on the cluster. Without runs in {RUNS} and
without a FOLDER, nothing is listed. With --history, each run has a line for each generation, named NAME@N as for
`finetune compare`; a cluster has the newest generations only. LOSS is the training loss, the {LAST_STEPS}.
"""


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "list", help="list runs, or pipelines on a cluster", description=DESCRIPTION
    )
    text = f"name of a run, or folder with runs or of one run (default: {RUNS})"
    parser.add_argument(
        "folders",
        nargs="*",
        type=Path,
        metavar="NAME|FOLDER",
        default=[RUNS],
        help=text,
    )
    add_cluster_arguments(parser)
    parser.add_argument(
        "-A",
        "--all-namespaces",
        action="store_true",
        help="list the pipelines of all namespaces",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the whole objects as JSON"
    )
    parser.add_argument(
        "--history",
        action="store_true",
        help="list the generations of each run: what an edit changed, and what was measured before and after it",
    )
    parser.set_defaults(run=run, name=None, watch=False)


def run(arguments: argparse.Namespace) -> int:
    """Print the list."""
    if arguments.context or arguments.namespace or arguments.all_namespaces:
        return run_on_cluster("history" if arguments.history else "get", arguments)
    runs = [run for folder in arguments.folders for run in _runs(folder)]
    # With --json, an empty list is an answer.
    if not runs and not arguments.json:
        _print_none(arguments.folders)
    elif arguments.history:
        print_history(runs, as_json=arguments.json)
    else:
        print_runs(runs, as_json=arguments.json)
    return 0


def _runs(folder: Path) -> list[Path]:
    """Return the runs in a folder, or the run of this name; raises UsageError if there is neither."""
    # The usual folder comes with the first run.
    if folder == RUNS or folder.is_dir():
        return find_runs(folder)
    named = run_named(str(folder))
    if named:
        return [named]
    raise UsageError(
        f"there is no folder {folder}; list the runs in {RUNS} without a FOLDER"
    )


def _print_none(folders: list[Path]) -> None:
    """Print the other folders that have runs."""
    names = ", ".join(map(str, folders))
    print(
        f"no runs in {names}; list the pipelines on a cluster with -n NAMESPACE or -A"
    )
    # As arguments of this command, to be copied.
    others = sorted({str(run.parent) for run in runs_elsewhere()})
    if others:
        print(f"runs in other folders: finetune list {shlex.join(others)}")


def print_runs(runs: list[Path], *, as_json: bool) -> None:
    """Print the runs in these folders; one that cannot be read is listed with the phase Unreadable."""
    if as_json:
        items = [with_notes(to_object(look_at(run).pipeline)) for run in runs]
        # As the API server lists pipelines: the same tools read both.
        listed = {"apiVersion": API_VERSION, "kind": f"{KIND}List", "items": items}
        print(json.dumps(listed, indent=1))
        return
    now = datetime.now(UTC)  # noqa: TID251  an edge
    for line in fitted(
        lambda gain: [COLUMNS, *(_row(run, now, gain=gain) for run in runs)]
    ):
        print(line)


def _row(run: Path, now: datetime, *, gain: bool) -> tuple[str, ...]:
    # As the user selects the run: by its name, or by --workdir with its folder.
    name = run.name
    if run.parent != RUNS:
        name = str(run)
    try:
        look = look_at(run)
    except ClusterError:
        # One damaged file must not hide the other runs.
        return (name, "Unreadable", *[""] * (len(COLUMNS) - 2))
    cells = row(to_object(look.pipeline), now, working=look.works, gain=gain)
    return (name, *cells[1:])
