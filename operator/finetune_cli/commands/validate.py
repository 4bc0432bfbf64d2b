"""`finetune validate`: report all errors of a manifest at once."""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from finetune_cli.arguments import add_local_arguments, claims, workdir_for
from finetune_cli.commands import Commands
from finetune_cli.diagnostics import Diagnostic, sort_diagnostics
from finetune_cli.exit_codes import INVALID
from finetune_cli.local.run import LocalRun
from finetune_cli.manifest.manifest import ReadResult, read_all
from finetune_cli.source_check import check_manifest

DESCRIPTION = """\
Check manifests and print all errors, one a line: FILE:LINE: FIELD: the error and its fix. A file may hold several
pipelines, separated by ---. What is valid and may be a mistake, such as a token in clear text, is a note. With
--check, the sources and targets that they name are looked at, too, also those in stores: whether they exist and can be
read, and whether a task measures the metric of its gate. A store that does not answer is an error. What was not looked
at is named. The errors go to standard output. Exit code: 0 all valid, 2 at least one invalid.
"""


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "validate", help="check manifests and print all errors at once", description=DESCRIPTION
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="manifest to check")
    parser.add_argument(
        "--check", action="store_true", help="also look at sources and targets that manifests name"
    )
    add_local_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check every file; return 0 if all are valid, else INVALID."""
    given = claims(arguments.claim)
    results = {file: read_all(file) for file in arguments.files}
    not_looked_at = {
        file: _check_sources(result, arguments.workdir, given) if arguments.check else []
        for file, result in results.items()
    }
    if arguments.json:
        more = {
            file: {"notLookedAt": texts} if arguments.check else {}
            for file, texts in not_looked_at.items()
        }
        files = [_as_json(file, result) | more[file] for file, result in results.items()]
        print(json.dumps({"files": files}, indent=2))
    else:
        for file, result in results.items():
            _print(file, result, not_looked_at[file])
    return INVALID if any(result.diagnostics for result in results.values()) else 0


def _check_sources(result: ReadResult, workdir: Path | None, given: dict[str, Path]) -> list[str]:
    """Add the errors of a look at the sources to the result, and return what was not looked at."""
    found: list[str] = []
    for manifest in result.manifests:
        with tempfile.TemporaryDirectory() as links:
            local_run = LocalRun.read_only(manifest, workdir_for(manifest, workdir), Path(links))
            local_run.link_claims(given)
            errors, not_looked_at = check_manifest(manifest, local_run.environment, validating=True)
        known = {diagnostic.path for diagnostic in result.diagnostics}
        more = [error for error in errors if error.path not in known]
        result.diagnostics = sort_diagnostics([*result.diagnostics, *more])
        found += not_looked_at
    return found


def _print(file: Path, result: ReadResult, not_looked_at: list[str]) -> None:
    for text in not_looked_at:
        print(f"{file}: {text} (note)")
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
