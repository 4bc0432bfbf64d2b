"""`finetune card`: write a page about a run that can be shown and sent."""

import argparse
from pathlib import Path

from finetune_cli.arguments import (
    add_run_arguments,
    find_workdir,
    run_on_cluster,
    targets_cluster,
)
from finetune_cli.commands import Commands
from finetune_cli.diagnostics import UsageError
from finetune_cli.exit_codes import FAILED
from finetune_cli.local.card_file import record_of_run, write_card
from finetune_cli.local.card_tracking import track_card, trackers_of

DESCRIPTION = """\
Write a card of a run: one HTML file without scripts and without links to other files, so it can be sent by mail. It
shows what was asked for and what it gave, the scores before and after training, samples, the loss with its
interruptions, the time and the cost of each stage, how to load and serve the model, and the versions of all data.
NAME is a run on this machine, or a pipeline on a cluster. The card of a cluster has what the status has: the loss in at
most 64 points, and the samples in the logs of pods that still exist. A card leaves out the pods and trackers of the
manifest, which may hold tokens.
"""


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "card", help="write a page about a run, as HTML", description=DESCRIPTION
    )
    add_run_arguments(parser)
    text = "file to write, or - for the standard output (default: NAME.html in the current folder)"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=text)
    text = "also send the card of a finished run of this machine to its run in MLflow and W&B (spec.tracking)"
    parser.add_argument("--track", action="store_true", help=text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the card; return FAILED if the work folder holds no pipeline, or if a tracker does not get the card."""
    if targets_cluster(arguments.name, arguments):
        if arguments.track:
            # The server is one that the pipeline's author has named, and this machine's credentials are the user's.
            raise UsageError(
                "--track is for a run on this machine: a pipeline's server must not get the credentials of this shell; "
                "leave out --track"
            )
        return run_on_cluster("card", arguments)
    workdir = find_workdir(arguments.name, arguments.workdir)
    record = record_of_run(workdir)
    if record is None:
        return FAILED
    if not arguments.track:
        write_card(record, arguments.output)
        return 0
    tracking = trackers_of(record.pipeline)
    text = write_card(record, arguments.output)
    return track_card(tracking, record.pipeline, workdir, text)
