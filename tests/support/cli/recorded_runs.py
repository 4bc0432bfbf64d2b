"""Runs on this machine that are written and not run."""

from pathlib import Path

from support.operator.scenario import Scenario

from finetune_operator.api.spec import PipelineSpec
from finetune_operator.api.status import PipelineStatus
from finetune_operator.core.pipeline import Key
from finetune_operator.local.cluster import Folders
from finetune_operator.local.history import keep
from finetune_operator.local.pipeline_file import PipelineFile


def write_run(
    name: str, status: PipelineStatus, spec: PipelineSpec | None = None
) -> Path:
    """Store a run with this status in .finetune of the current folder; an earlier one of this name becomes history."""
    folder = Path(".finetune", name).absolute()
    file = PipelineFile(folder)
    before = file.read()
    if before:
        keep(folder, before, Folders.under(folder, folder).workspace(before))
    pipeline = file.apply(Key("default", name), spec or Scenario().spec, {})
    file.write_status(pipeline, status)
    return folder
