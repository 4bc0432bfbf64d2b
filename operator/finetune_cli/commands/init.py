"""`finetune init`: write a manifest to start from."""

import argparse
import sys
from importlib.resources import files
from pathlib import Path

from finetune_cli.commands import Commands
from finetune_cli.exit_codes import INVALID

DESCRIPTION = "Write a valid manifest with comments; set model.uri and dataset.uri to your model and data set."
FILE_HELP = "manifest to write (default: pipeline.yaml)"


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("init", help="write a manifest with comments to start from", description=DESCRIPTION)
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", default=Path("pipeline.yaml"), help=FILE_HELP)
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the manifest; return INVALID where the file exists or cannot be written."""
    file: Path = arguments.file
    template = (files("finetune_cli") / "template.yaml").read_text("utf-8")
    try:
        with file.open("w" if arguments.force else "x", encoding="utf-8") as stream:
            stream.write(template)
    except FileExistsError:
        print(f"{file}: already exists; --force overwrites it", file=sys.stderr)
        return INVALID
    except OSError as error:
        print(f"{file}: cannot be written: {error.strerror}", file=sys.stderr)
        return INVALID
    print(f"{file}: written; next: finetune validate {file}")
    return 0
