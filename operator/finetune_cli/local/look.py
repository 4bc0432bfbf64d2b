"""A look at a run on this machine: its pipeline, and whether a process works on it."""

from dataclasses import dataclass, replace
from pathlib import Path

from finetune_cli.exit_codes import (
    FAILED,
    below_gate,
    exit_code_of_wait,
    is_until_reached,
)
from finetune_cli.local.summary import run_argument
from finetune_cli.runs import until_of
from finetune_operator.api.status import PipelineStatus, StageState, StageStatus
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.errors import ClusterError
from finetune_operator.local.job_folder import is_locked
from finetune_operator.local.pipeline_file import PipelineFile

STOPPED = "Stopped"
"""Phase of a run that has not finished and that no process works on."""


@dataclass(frozen=True)
class RunLook:
    """What a command sees of a run at one moment."""

    folder: Path
    pipeline: Pipeline
    """Its status shows nothing as running that no process works on."""
    works: bool
    """Whether a process works on the run."""
    until: str | None
    """The last stage that the user asked for."""

    @property
    def key(self) -> str:
        """The namespace and the name of the pipeline."""
        return str(self.pipeline.key)

    @property
    def is_done_as_asked(self) -> bool:
        """Whether the run has ended with the last stage that the user asked for."""
        return not self.works and is_until_reached(self.pipeline.status, self.until)

    def exit_code(self, condition: str) -> int | None:
        """Return the exit code of `finetune wait`, or None while a process may bring the run to the condition."""
        code = exit_code_of_wait(self.pipeline, condition)
        if code is not None or self.works:
            return code
        if self.is_done_as_asked:
            return below_gate(self.pipeline.status)
        return FAILED

    def continuation(self) -> str:
        """Return how to go on with a run that no process works on; empty for a run that has finished or works."""
        status = self.pipeline.status
        if self.works or status.finished_at:
            return ""
        target = run_argument(self.folder)
        if self.is_done_as_asked:
            return f"stopped as --until {self.until} asks; to continue: finetune run {target}"
        if self.until:
            target += f" --until {self.until}"
        return f"no `finetune run` works on it; to continue: finetune run {target}"


def look_at(folder: Path) -> RunLook:
    """Look at the run in a folder; raises ClusterError if there is none."""
    # The lock first: a run that ends writes its status before it releases the lock.
    works = is_locked(folder)
    pipeline = PipelineFile(folder).read()
    if pipeline is None:
        raise ClusterError(f"{folder} holds no run any more: it was deleted")
    if not works:
        pipeline = replace(pipeline, status=as_stopped(pipeline))
    return RunLook(folder, pipeline, works, until_of(folder))


def as_stopped(pipeline: Pipeline) -> PipelineStatus:
    """Return the status of a run that no process works on: its last process may have been killed while it ran."""
    status = pipeline.status
    if status.finished_at:
        return status
    stages = {name: _as_stopped(stage) for name, stage in status.stages.items()}
    phase = "Suspended" if pipeline.spec.suspend else STOPPED
    return status.model_copy(update={"phase": phase, "stages": stages})


def _as_stopped(stage: StageStatus) -> StageStatus:
    if stage.state not in {StageState.RUNNING, StageState.QUEUED}:
        return stage
    message = "no process works on it"
    progress = stage.progress
    if progress is not None and progress.saved_step:
        message += f"; it resumes at step {progress.saved_step}"
    return stage.model_copy(update={"state": StageState.PENDING, "message": message})
