"""The summary of a run on this machine: costs, gates, the model, and the commands to run next."""

import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from finetune_cli.exit_codes import DONE, SUCCEEDED
from finetune_cli.local.published import (
    has_turns,
    place_of,
    published,
    published_model,
    run_environment,
)
from finetune_cli.manifest.fields import gate_lines
from finetune_cli.outcome import ready_message
from finetune_cli.output.costs import cost_lines
from finetune_cli.output.model_text import (
    LATEST,
    model_text,
    short_digest,
    target_of,
)
from finetune_cli.output.status.text import interruptions_line
from finetune_cli.runs import RUNS, manifest_of, named_elsewhere
from finetune_operator.api.conditions import link
from finetune_operator.api.model_status import ModelStatus
from finetune_operator.api.status import PipelineStatus, StageState
from finetune_operator.core.pipeline import Pipeline
from finetune_trainer.contract.usage import PROMPT, load_command


def summary_lines(status: PipelineStatus, run: Path) -> Iterator[str]:
    """Yield the costs, the gates, the model and the outcome.

    `run` is the work folder: its links lead to the folders of claims on this machine.
    """
    if status.interruptions:
        yield interruptions_line(status)
    yield from cost_lines(status)
    yield from gate_lines(status)
    if status.model:
        yield f"model: {_location(status.model, run)}"
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


def next_commands(pipeline: Pipeline, run: Path) -> Iterator[str]:
    """Yield the commands that ask, serve and load the model of a run that has succeeded; none for other runs."""
    if pipeline.status.phase not in DONE:
        return
    name = run_argument(run)
    if published_model(pipeline):
        yield f"ask:   finetune ask {name} {shlex.quote(_prompt(pipeline))}"
        # A model below its gate is not served.
        if pipeline.status.phase == SUCCEEDED:
            yield f"serve: finetune run {name} --keep-serving"
    code = _load_code(pipeline, run)
    if code:
        yield f"load:  {_python()} -c {shlex.quote(code)}"


def _prompt(pipeline: Pipeline) -> str:
    deploy = pipeline.spec.deploy
    prompt = PROMPT if deploy is None else deploy.smoke_test.prompt
    # One line, and no option of the command.
    is_argument = prompt.isprintable() and not prompt.startswith("-")
    return prompt if is_argument else PROMPT


def _load_code(pipeline: Pipeline, run: Path) -> str | None:
    target = published(pipeline)
    if target is None:
        return None
    environment = run_environment(run, pipeline)
    place = place_of(environment, target.uri)
    base = place_of(environment, pipeline.spec.model.uri)
    # transformers downloads neither of them from another store.
    if place is None or base is None:
        return None
    return load_command(
        _shown(place),
        _shown(base) if target.format == "Adapter" else None,
        conversations=has_turns(pipeline),
    )


def _shown(place: Path | str) -> str:
    return relative_path(place) if isinstance(place, Path) else place


def _python() -> str:
    """Return the word by which a shell starts the interpreter of this process."""
    usual = shutil.which("python")
    if usual and Path(usual).parent == Path(sys.executable).parent:
        return "python"
    return shlex.quote(relative_path(Path(sys.executable)))
