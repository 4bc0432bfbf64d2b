"""`finetune convert`: write the manifest of a config of axolotl or TRL."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from finetune_cli.commands import Commands
from finetune_cli.convert import axolotl, trl
from finetune_cli.convert.text import manifest_text
from finetune_cli.diagnostics import UsageError
from finetune_cli.exit_codes import INVALID
from finetune_cli.manifest.json_schema import write_schema
from finetune_cli.manifest.manifest import read_text
from finetune_cli.manifest.pipeline_name import pipeline_name

DESCRIPTION = """\
Write the manifest that a config of axolotl or TRL means, with the defaults of that tool. What has no counterpart here,
or means something else, is a comment at the top of the manifest and a line on stderr. Look at the records with
`finetune preview` afterwards: the tools frame some kinds of records in other ways. Exit code: 0, or 2 if the file is no
such config, or the manifest still has an error, which is printed.
"""
TOOLS: dict[str, ModuleType] = {"axolotl": axolotl, "TRL": trl}


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "convert",
        help="write the manifest of a config of axolotl or TRL",
        description=DESCRIPTION,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="config, in YAML")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="manifest to write (default: standard output)",
    )
    parser.add_argument(
        "--force", action="store_true", help="overwrite an existing file"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the manifest; return INVALID if it has an error that the user must mend."""
    output: Path | None = arguments.output
    if output and output.exists() and not arguments.force:
        raise UsageError(f"{output} already exists; --force overwrites it")
    config = _read(arguments.file)
    tool = _tool_of(arguments.file, config)
    conversion = TOOLS[tool].convert(config)
    name = pipeline_name(arguments.file.stem) or "converted"
    text = manifest_text(conversion, name, tool, arguments.file.name)
    if output:
        output.write_text(text, encoding="utf-8")
        write_schema(output)
        print(f"{output}: written; next: finetune validate --check {output}")
    else:
        sys.stdout.write(text)
    for setting, note in conversion.notes:
        print(f"{arguments.file}: {setting}: {note}", file=sys.stderr)
    problems = read_text(output or Path("converted manifest"), text).diagnostics
    for problem in problems:
        print(problem, file=sys.stderr)
    return INVALID if problems else 0


def _read(file: Path) -> Mapping[str, Any]:
    try:
        config = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise UsageError(f"{file} cannot be read as YAML: {problem}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{file} is no config of axolotl or TRL: it has no settings")
    return {str(key): value for key, value in config.items()}


def _tool_of(file: Path, config: Mapping[str, Any]) -> str:
    """Return the tool whose settings the config has; raises UsageError if it has too few of any."""
    counts = {name: len(tool.KEYS & config.keys()) for name, tool in TOOLS.items()}
    name = max(counts, key=lambda tool: counts[tool])
    if not counts[name]:
        keys = ", ".join(sorted({*axolotl.KEYS, *trl.KEYS}))
        raise UsageError(
            f"{file} is no config of axolotl or TRL: it has none of {keys}"
        )
    return name
