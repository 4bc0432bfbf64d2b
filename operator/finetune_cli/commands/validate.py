"""`finetune validate`: everything that is wrong with a manifest, at once."""

import argparse
import json
from pathlib import Path
from typing import Any

from finetune_cli.commands import Commands
from finetune_cli.diagnostics import Diagnostic
from finetune_cli.manifest.manifest import ReadResult, read_all

DESCRIPTION = """\
Check manifests and report everything that is wrong with them, as FILE:LINE: FIELD: what and how to mend it.
A file may hold several pipelines, divided by ---. Findings go to standard output. Exit code: 0 valid, 2 not.
"""


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("validate", help="check manifests, all errors at once", description=DESCRIPTION)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check every file; give 0 if all are valid and 2 otherwise."""
    readings = {file: read_all(file) for file in arguments.files}
    if arguments.json:
        print(json.dumps({"files": [_as_json(file, reading) for file, reading in readings.items()]}, indent=2))
    else:
        for file, reading in readings.items():
            _print(file, reading)
    return 2 if any(reading.diagnostics for reading in readings.values()) else 0


def _print(file: Path, reading: ReadResult) -> None:
    for note in reading.warnings:
        print(f"{note} (note)")
    for problem in reading.diagnostics:
        print(problem)
    if not reading.diagnostics:
        several = f", {len(reading.manifests)} pipelines" if len(reading.manifests) > 1 else ""
        print(f"{file}: valid{several}")


def _as_json(file: Path, reading: ReadResult) -> dict[str, Any]:
    return {
        "file": str(file),
        "valid": not reading.diagnostics,
        "pipelines": [manifest.name for manifest in reading.manifests],
        "problems": [_problem(problem) for problem in reading.diagnostics],
        "notes": [_problem(note) for note in reading.warnings],
    }


def _problem(problem: Diagnostic) -> dict[str, Any]:
    return {"line": problem.line, "path": problem.path, "message": problem.message}
