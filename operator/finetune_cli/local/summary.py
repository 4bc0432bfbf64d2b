"""The summary of a run on this machine: costs, gates, the model, and the command to run next."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from finetune_cli.manifest.fields import gate_lines
from finetune_cli.outcome import ready_message
from finetune_cli.output.costs import cost_lines
from finetune_cli.output.model_text import (
    LATEST,
    model_text,
    short_digest,
    target_of,
)
from finetune_cli.output.status_text import interruptions_line
from finetune_cli.runs import RUNS, manifest_of, named_elsewhere
from finetune_operator.api.conditions import link
from finetune_operator.api.model_status import ModelStatus
from finetune_operator.api.status import PipelineStatus, StageState
from finetune_trainer.contract import DeployResult


def summary_lines(status: PipelineStatus, run: Path) -> Iterator[str]:
    """Yield the costs, the gates, the model, how to serve it, and the outcome.

    `run` is the work folder: its links lead to the folders of claims on this machine.
    """
    if status.interruptions:
        yield interruptions_line(status)
    yield from cost_lines(status)
    yield from gate_lines(status)
    if status.model:
        yield f"model: {_location(status.model, run)}"
        yield from _serving_line(status, run)
    yield outcome_line(status)


def outcome_line(status: PipelineStatus) -> str:
    """Return how the pipeline ended, or what it does now; the error of a failed stage is shown with the stage."""
    if status.finished_at is None:
        return ready_message(status)
    for name, stage in status.stages.items():
        if stage.state is StageState.FAILED:
            return f"{status.phase} at {name}{link(stage.reason, '')}"
    return f"{status.phase}: {ready_message(status)}"


def run_argument(run: Path) -> str:
    """Return the arguments of a command that mean this run: its name, or its manifest with --workdir."""
    if run.absolute().parent == RUNS.absolute():
        return shlex.quote(run.name)
    # From another folder, the name is enough if only this run has it.
    if run in named_elsewhere(run.name):
        return shlex.quote(run.name)
    # A placeholder for a run of an earlier version, which recorded no manifest.
    file = "FILE"
    manifest = manifest_of(run)
    if manifest:
        file = relative_path(manifest)
    return shlex.join([file, "--workdir", str(run)])


def relative_path(path: Path) -> str:
    """Return a path relative to the current folder, if it is below it."""
    here = Path.cwd()
    if path.is_relative_to(here):
        return str(path.relative_to(here))
    return str(path)


def _location(model: ModelStatus, run: Path) -> str:
    """Return the place of a model, with its folder on this machine if the URI names a claim."""
    scheme, _, rest = model.uri.partition("://")
    claim, _, path = rest.partition("/")
    link = run / "claims" / claim
    if scheme != "pvc" or not link.is_dir():
        return model_text(model)
    folder = link.resolve() / path
    # Another pipeline may have published to the same target since then.
    latest = folder.parent / LATEST
    if target_of(model):
        if latest.resolve() != folder.resolve():
            # The folder's name is the digest.
            return relative_path(folder)
        folder = latest
    return f"{relative_path(folder)} ({short_digest(model.digest)})"


def _serving_line(status: PipelineStatus, run: Path) -> Iterator[str]:
    deploy = status.stages.get("deploy")
    if deploy and isinstance(deploy.result, DeployResult):
        serve = f"finetune run {run_argument(run)} --keep-serving"
        yield f"its server answered the prompt and was stopped; to serve the model here: {serve}"
