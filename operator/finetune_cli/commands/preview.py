"""`finetune preview`: show records as the model will see them, with the learned part marked."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from finetune_cli.arguments import (
    add_local_arguments,
    add_set,
    claims,
    overrides,
    workdir_for,
)
from finetune_cli.commands import Commands
from finetune_cli.diagnostics import UsageError
from finetune_cli.exit_codes import INVALID
from finetune_cli.local.run import LocalRun
from finetune_cli.manifest.manifest import Manifest, read
from finetune_cli.output.preview_lines import (
    learned_tokens,
    print_examples,
    usable_records,
)
from finetune_cli.output.working import working
from finetune_trainer.contract.preview import PreviewReport

DESCRIPTION = """\
Read the data as the stage prepare does, and print the first records as the model will see them: the chat template is
applied, special tokens are shown, and the learned part is green, or {+marked+} without a terminal. Then the counts of
usable, invalid and truncated records, and what prepare would log. Of data in a store, only the first 1,000 records of
the first file are read. Nothing is written. Exit code: 0, or 2 if prepare would fail.
"""


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "preview",
        help="show records as the model will see them",
        description=DESCRIPTION,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="manifest")
    parser.add_argument(
        "-n",
        "--examples",
        type=int,
        default=3,
        metavar="N",
        help="number of records to show (default: 3)",
    )
    add_set(parser)
    add_local_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the preview; return INVALID if prepare would fail."""
    if arguments.examples < 0:
        raise UsageError(f"--examples {arguments.examples}: must be 0 or more")
    manifest = read(arguments.file, overrides(arguments))
    workdir = workdir_for(manifest, arguments.workdir)
    folders = claims(arguments.claim)
    with working("loading the tokenizer and the first records …"):
        report = preview(manifest, workdir, folders, arguments.examples)
    if arguments.json:
        print(report.model_dump_json(by_alias=True, indent=1))
    else:
        _print(report, manifest)
    return INVALID if report.problems else 0


def preview(
    manifest: Manifest, workdir: Path, folders: Mapping[str, Path], examples: int
) -> PreviewReport:
    """Return the first records as the model will see them; raises UsageError if they cannot be shown.

    `folders` replace claims, by their names.
    """
    with LocalRun.read_only(manifest, workdir, folders) as local_run:
        report = local_run.preview(examples=examples)
    if report is None:
        raise UsageError(
            "the data cannot be previewed: prepare runs a program of your own, or the trainer is not installed here; "
            "pip install 'finetune-operator[trainer]'"
        )
    return report


def _print(report: PreviewReport, manifest: Manifest) -> None:
    console = Console(highlight=False, soft_wrap=True)
    print_examples(report, console)
    lines = [*usable_records(report), learned_tokens(report), *report.notes]
    lines += [f"not looked at: {text}" for text in report.not_looked_at]
    for line in lines:
        if line:
            console.print(line, markup=False)
    for problem in report.problems:
        location = manifest.location_of(problem.field)
        console.print(
            str(manifest.diagnostic(location, problem.message)),
            markup=False,
            style="red",
        )
