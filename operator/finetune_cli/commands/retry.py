"""`finetune retry`: run again from the failed stage, with fresh budgets."""

import argparse

from finetune_cli.arguments import (
    NAME_OR_FILE,
    add_cluster_arguments,
    manifest_path,
    run_on_cluster,
    targets_cluster,
    workdir_for,
)
from finetune_cli.commands import Commands
from finetune_cli.commands import run as local
from finetune_cli.exit_codes import DONE
from finetune_cli.local.summary import run_argument
from finetune_cli.manifest.manifest import read
from finetune_operator.local.pipeline_file import PipelineFile

DESCRIPTION = """\
Start the failed stage again, with fresh budgets for failures and interruptions. Stages that succeeded are kept.
FILE, or the NAME of a run on this machine: otherwise the same as `finetune run`. NAME of a pipeline on a cluster: the
command returns at once.
"""


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "retry", help="run again from the failed stage", description=DESCRIPTION
    )
    local.add_arguments(parser, target=NAME_OR_FILE)
    add_cluster_arguments(parser)
    parser.set_defaults(run=run, retry=True)


def run(arguments: argparse.Namespace) -> int:
    """Request the retry from the operator, or run the pipeline on this machine."""
    if targets_cluster(arguments.file, arguments):
        arguments.name = arguments.file
        return run_on_cluster("annotate", arguments)
    workdir = workdir_for(read(manifest_path(arguments.file)), arguments.workdir)
    pipeline = PipelineFile(workdir).read()
    # A retry would erase the record of a run without a failure.
    if pipeline and pipeline.status.finished_at and pipeline.status.phase in DONE:
        print(
            f"{pipeline.key}: has finished ({pipeline.status.phase}) without a failure: there is nothing to start "
            f"again; after an edit: finetune run {run_argument(workdir)}"
        )
        return 0
    return local.run(arguments)
