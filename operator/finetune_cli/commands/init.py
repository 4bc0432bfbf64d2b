"""`finetune init`: a manifest to start from."""

import argparse
import sys
from importlib.resources import files
from pathlib import Path

from finetune_cli.commands import Commands

DESCRIPTION = "Write a commented manifest that is valid as it stands; change model.uri and dataset.uri to yours."


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("init", help="write a commented manifest to start from", description=DESCRIPTION)
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", default=Path("pipeline.yaml"))
    parser.add_argument("--force", action="store_true", help="replace the file if there is one")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the manifest; give 2 where that cannot be."""
    file: Path = arguments.file
    template = (files("finetune_cli") / "template.yaml").read_text("utf-8")
    try:
        with file.open("w" if arguments.force else "x", encoding="utf-8") as stream:
            stream.write(template)
    except FileExistsError:
        print(f"{file}: is there already; --force replaces it", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{file}: cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    print(f"{file}: written; next: finetune validate {file}")
    return 0
