"""What is only said to the operator of a cluster: commands that differ in nothing but their words."""

import argparse
from collections.abc import Callable

from finetune_cli.commands import Commands
from finetune_cli.places import add_name, only_on_cluster, run_on_cluster


def wish(name: str, words: str, description: str, here: str) -> Callable[[Commands], None]:
    """Give the command's `register`; `here` says what is done in its place for a run on this machine."""

    def run(arguments: argparse.Namespace) -> int:
        only_on_cluster(arguments, here)
        return run_on_cluster("asking", arguments)

    def register(commands: Commands) -> None:
        parser = commands.add_parser(name, help=words, description=description)
        add_name(parser)
        parser.set_defaults(run=run)

    return register
