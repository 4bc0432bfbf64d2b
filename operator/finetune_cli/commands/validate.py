"""`finetune validate`: report all errors of a manifest at once."""

import argparse
import json
from pathlib import Path
from typing import Any

from finetune_cli.commands import Commands
from finetune_cli.diagnostics import Diagnostic
from finetune_cli.exit_codes import INVALID
from finetune_cli.manifest.manifest import ReadResult, read_all

DESCRIPTION = """\
Check manifests and print all errors, one a line: FILE:LINE: FIELD: the error and its fix. A file may hold several
pipelines, separated by ---. The errors go to standard output. Exit code: 0 all valid, 2 at least one invalid.
"""


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "validate", help="check manifests and print all errors at once", description=DESCRIPTION
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="manifest to check")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check every file; return 0 if all are valid, else INVALID."""
    results = {file: read_all(file) for file in arguments.files}
    if arguments.json:
        print(json.dumps({"files": [_as_json(file, result) for file, result in results.items()]}, indent=2))
    else:
        for file, result in results.items():
            _print(file, result)
    return INVALID if any(result.diagnostics for result in results.values()) else 0


def _print(file: Path, result: ReadResult) -> None:
    for warning in result.warnings:
        print(f"{warning} (note)")
    for diagnostic in result.diagnostics:
        print(diagnostic)
    if not result.diagnostics:
        count = f", {len(result.manifests)} pipelines" if len(result.manifests) > 1 else ""
        print(f"{file}: valid{count}")


def _as_json(file: Path, result: ReadResult) -> dict[str, Any]:
    return {
        "file": str(file),
        "valid": not result.diagnostics,
        "pipelines": [manifest.name for manifest in result.manifests],
        "problems": [_diagnostic_as_json(diagnostic) for diagnostic in result.diagnostics],
        "notes": [_diagnostic_as_json(warning) for warning in result.warnings],
    }


def _diagnostic_as_json(diagnostic: Diagnostic) -> dict[str, Any]:
    return {"line": diagnostic.line, "path": diagnostic.path, "message": diagnostic.message}
