"""`finetune cancel`, `suspend`, `stop`, `resume` and `delete`: requests, which share their arguments."""

import argparse
from dataclasses import dataclass

from finetune_cli.arguments import add_target, run_on_cluster, targets_cluster
from finetune_cli.commands import Commands
from finetune_cli.commands import run as local_run
from finetune_cli.local import requests


@dataclass(frozen=True)
class Verb:
    """One command that changes a pipeline. On a cluster it returns at once."""

    name: str
    help: str
    description: str


VERBS = (
    Verb(
        name="cancel",
        help="stop a pipeline until it is retried",
        description="Stop the running stage, as an eviction would, and start no stage until `finetune retry`.",
    ),
    Verb(
        name="suspend",
        help="stop a pipeline until it is resumed",
        description="Set spec.suspend: stop the running stage, as an eviction would, and start no stage until"
        " `finetune resume`.",
    ),
    Verb(
        name="stop",
        help="the same as suspend",
        description="The same as `finetune suspend`: stop the running stage, as an eviction or Ctrl-C would, until"
        " `finetune resume`.",
    ),
    Verb(
        name="resume",
        help="resume a pipeline that was suspended or stopped",
        description="Clear spec.suspend: the stage that was stopped resumes where it stopped. On this machine, the run"
        " goes on in the background, up to the stage that --until named.",
    ),
    Verb(
        name="delete",
        help="delete a pipeline with its results",
        description="Stop the running stage, then delete the pipeline: on this machine with its checkpoints, results"
        " and logs, on a cluster with its Jobs and its server. Published models stay. On a terminal, the command asks"
        " first; elsewhere it needs --yes.",
    ),
)
NAMES = "NAME or FILE is a run on this machine; with -n or --context, and without such a run, a pipeline on a cluster."
WAITS = (
    " On this machine, the command waits until the running stage has saved its work."
)


def register(commands: Commands) -> None:
    """Add the commands."""
    for verb in VERBS:
        waits = "" if verb.name == "resume" else WAITS
        parser = commands.add_parser(
            verb.name,
            help=verb.help,
            description=f"{verb.description} {NAMES}{waits}",
        )
        add_target(parser)
        if verb.name == "delete":
            parser.add_argument(
                "-y", "--yes", action="store_true", help="do not ask first"
            )
        parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Send the request, or do what it asks on this machine."""
    if targets_cluster(arguments.name, arguments):
        return run_on_cluster("annotate", arguments)
    return requests.run(arguments, local_run.start)
