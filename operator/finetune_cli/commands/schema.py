"""`finetune schema`: print the JSON Schema of the manifest."""

import argparse
import sys

from finetune_cli.commands import Commands
from finetune_cli.manifest.json_schema import EDITOR_LINE, schema_text

DESCRIPTION = f"""\
Print the JSON Schema of the manifest. Editors with a YAML language server complete and check fields with it, if the
manifest has the line `{EDITOR_LINE}`; `finetune init` writes the line and the file.
"""


def register(commands: Commands) -> None:
    """Add the command, which has no arguments."""
    parser = commands.add_parser(
        "schema", help="print the JSON Schema of the manifest", description=DESCRIPTION
    )
    parser.set_defaults(run=run)


def run(_arguments: argparse.Namespace) -> int:
    """Print the schema."""
    sys.stdout.write(schema_text())
    return 0
