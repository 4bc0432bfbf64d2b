"""`finetune cancel`, `suspend` and `resume`: requests to the operator of a cluster; they differ in words only."""

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
    """What does the same to a run on this machine."""


VERBS = (
    Verb(
        name="cancel",
        help="stop a pipeline on a cluster for good",
        description="Stop what is running, as an eviction would, and start nothing more until `finetune retry`.",
        local_equivalent="Ctrl-C in `finetune run` stops it",
    ),
    Verb(
        name="suspend",
        help="stop a pipeline on a cluster for a while",
        description="Stop what is running, as an eviction would, and start nothing until `finetune resume`"
        " (spec.suspend).",
        local_equivalent="Ctrl-C in `finetune run` stops it, and running it again goes on",
    ),
    Verb(
        name="resume",
        help="let a suspended pipeline go on",
        description="Take a suspension back (spec.suspend): the stage that was stopped goes on where it was.",
        local_equivalent="`finetune run` goes on where it was",
    ),
)
NAMES = "NAME is a pipeline on a cluster; with -n or --context a FILE names it too."


def register(commands: Commands) -> None:
    """Add the three commands."""
    for verb in VERBS:
        parser = commands.add_parser(verb.name, help=verb.help, description=f"{verb.description} {NAMES}")
        add_name(parser)
        parser.set_defaults(run=run, local_equivalent=verb.local_equivalent)


def run(arguments: argparse.Namespace) -> int:
    """Send the request; nothing is waited for."""
    require_cluster(arguments, arguments.local_equivalent)
    return run_on_cluster("annotate", arguments)
