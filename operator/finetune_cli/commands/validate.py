"""`finetune validate`: report all errors of a manifest at once."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune_cli.arguments import (
    add_local_arguments,
    add_set,
    claims,
    overrides,
    workdir_for,
)
from finetune_cli.checks.sources import check_manifest
from finetune_cli.commands import Commands
from finetune_cli.diagnostics import Diagnostic, sort_diagnostics
from finetune_cli.exit_codes import INVALID
from finetune_cli.forecast.few_steps import few_steps_line
from finetune_cli.forecast.learning_rate import learning_rate_line
from finetune_cli.local.run import LocalRun
from finetune_cli.manifest.manifest import ReadResult, read_all
from finetune_cli.output.preview_lines import usable_records
from finetune_cli.output.working import working

DESCRIPTION = """\
Check manifests and print all errors, one a line: FILE:LINE: FIELD: the error and its fix. A file may hold several
pipelines, separated by ---. A value that is valid and may be a mistake, such as a token in clear text, is a note. With
--check, the command also looks at the sources and targets of the manifest, including stores: whether they exist and can
be read, and whether a task measures the metric of its gate. It reads all records on this machine as the stage prepare
does, and the first 1,000 of a data set in a store. It loads task files as evaluate does, but runs no code of them. A
store that does not answer is an error. Sources that were not looked at are listed. The errors go to standard output.
Exit code: 0 all valid, 2 at least one invalid.
"""
NOT_READ = (
    "not read: prepare runs a program of your own, or the trainer is not installed here"
)


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "validate",
        help="check manifests and print all errors at once",
        description=DESCRIPTION,
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="manifest to check"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="also look at sources and targets that manifests name",
    )
    add_set(parser)
    add_local_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check every file; return 0 if all are valid, else INVALID."""
    folders = claims(arguments.claim)
    changes = overrides(arguments)
    results = {file: read_all(file, changes) for file in arguments.files}
    not_looked_at: dict[Path, list[str]] = {file: [] for file in results}
    if arguments.check:
        for file, result in results.items():
            with working(f"checking the data, the model and the tasks of {file} …"):
                not_looked_at[file] = check_sources(result, arguments.workdir, folders)
    if arguments.json:
        files = []
        for file, result in results.items():
            entry = _as_json(file, result)
            if arguments.check:
                entry["notLookedAt"] = not_looked_at[file]
            files.append(entry)
        print(json.dumps({"files": files}, indent=2))
    else:
        for file, result in results.items():
            _print(file, result, not_looked_at[file])
    if any(result.diagnostics for result in results.values()):
        return INVALID
    return 0


def check_sources(
    result: ReadResult, workdir: Path | None, folders: Mapping[str, Path]
) -> list[str]:
    """Add the errors in sources and targets to the result, and return a line for each that was not looked at.

    `folders` replace claims, by their names.
    """
    lines: list[str] = []
    for manifest in result.manifests:
        warning = learning_rate_line(manifest.spec)
        if warning:
            lines.append(warning)
        run_folder = workdir_for(manifest, workdir)
        with LocalRun.read_only(manifest, run_folder, folders) as local_run:
            errors, not_looked_at = check_manifest(
                manifest, local_run.environment, validating=True
            )
            # The preview would only repeat the error of a source.
            if not errors and not result.diagnostics:
                errors += _preview(local_run, not_looked_at)
        # A field with an error has one already, and the second may only follow from the first.
        known = {diagnostic.path for diagnostic in result.diagnostics}
        new = [error for error in errors if error.path not in known]
        result.diagnostics = sort_diagnostics([*result.diagnostics, *new])
        lines += not_looked_at
    return lines


def _preview(local_run: LocalRun, lines: list[str]) -> list[Diagnostic]:
    """Return the errors of the data, and add a line for each thing to know about it."""
    report = local_run.preview()
    if report is None:
        lines.append(f"the records were {NOT_READ}")
        return []
    lines += [f"not looked at: {text}" for text in report.not_looked_at]
    # The records of an error are named in its message.
    if not report.problems:
        lines += [f"data: {text}" for text in usable_records(report)]
        lines += [f"data: {text}" for text in report.notes]
    if report.counts and not report.is_sample:
        warning = few_steps_line(local_run.manifest.spec, report.counts.train_rows)
        if warning:
            lines.append(warning)
    manifest = local_run.manifest
    return [
        manifest.diagnostic(manifest.location_of(problem.field), problem.message)
        for problem in report.problems
    ]


def _print(file: Path, result: ReadResult, not_looked_at: list[str]) -> None:
    for text in not_looked_at:
        print(f"{file}: {text} (note)")
    for warning in result.warnings:
        print(f"{warning} (note)")
    for diagnostic in result.diagnostics:
        print(diagnostic)
    if result.diagnostics:
        return
    count = len(result.manifests)
    if count > 1:
        print(f"{file}: valid, {count} pipelines")
    else:
        print(f"{file}: valid")


def _as_json(file: Path, result: ReadResult) -> dict[str, Any]:
    return {
        "file": str(file),
        "valid": not result.diagnostics,
        "pipelines": [manifest.name for manifest in result.manifests],
        "problems": [
            _diagnostic_as_json(diagnostic) for diagnostic in result.diagnostics
        ],
        "notes": [_diagnostic_as_json(warning) for warning in result.warnings],
    }


def _diagnostic_as_json(diagnostic: Diagnostic) -> dict[str, Any]:
    return {
        "line": diagnostic.line,
        "path": diagnostic.path,
        "message": diagnostic.message,
    }
