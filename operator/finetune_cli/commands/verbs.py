"""`finetune cancel`, `suspend` and `resume`: requests to the operator, which share their arguments."""

import argparse
from dataclasses import dataclass

from finetune_cli.arguments import add_name, require_cluster, run_on_cluster
from finetune_cli.commands import Commands


@dataclass(frozen=True)
class Verb:
    """One command that changes a pipeline on a cluster and returns at once."""

    name: str
    help: str
    description: str
    local_equivalent: str
    """How to get the same effect for a run on this machine; part of an error message."""


VERBS = (
    Verb(
        name="cancel",
        help="stop a pipeline on a cluster until it is retried",
        description="Stop the running stage, as an eviction would, and start no stage until `finetune retry`.",
        local_equivalent="Ctrl-C in `finetune run` stops the run",
    ),
    Verb(
        name="suspend",
        help="stop a pipeline on a cluster until it is resumed",
        description="Set spec.suspend: stop the running stage, as an eviction would, and start no stage until"
        " `finetune resume`.",
        local_equivalent="Ctrl-C in `finetune run` stops the run, and `finetune run` continues it",
    ),
    Verb(
        name="resume",
        help="resume a suspended pipeline on a cluster",
        description="Clear spec.suspend: the stage that was stopped resumes where it stopped.",
        local_equivalent="`finetune run` continues a stopped run",
    ),
)
NAMES = "NAME is a pipeline on a cluster; with -n or --context, it may be the manifest FILE instead."


def register(commands: Commands) -> None:
    """Add the three commands."""
    for verb in VERBS:
        parser = commands.add_parser(
            verb.name, help=verb.help, description=f"{verb.description} {NAMES}"
        )
        add_name(parser)
        parser.set_defaults(run=run, local_equivalent=verb.local_equivalent)


def run(arguments: argparse.Namespace) -> int:
    """Send the request and return without waiting for its effect."""
    require_cluster(arguments, arguments.local_equivalent)
    return run_on_cluster("annotate", arguments)
