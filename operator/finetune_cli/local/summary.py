"""What a run on this machine has come to: gates, the model and what answers where, and the command to run next."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from finetune_cli.costs import cost_lines
from finetune_cli.exit_codes import ready_message
from finetune_cli.fields import gate_lines
from finetune_cli.runs import RUNS, manifest_of
from finetune_cli.status_text import interruptions_line
from finetune_operator.api.conditions import TROUBLESHOOTING_URL, link
from finetune_operator.api.status import ModelStatus, PipelineStatus, StageState
from finetune_trainer.contract import DeployResult

DIGEST_CHARACTERS = 19
"""sha256: and twelve digits."""


def summary_lines(status: PipelineStatus, run: Path) -> Iterator[str]:
    """Yield the cost of interruptions, the gates, the model, who answers where, and the outcome.

    `run` is the work folder, whose links show where a claim is on this machine.
    """
    if status.interruptions:
        yield interruptions_line(status)
    yield from cost_lines(status)
    yield from gate_lines(status)
    if status.model:
        yield f"model: {_where(status.model, run)} ({status.model.digest[:DIGEST_CHARACTERS]}…)"
        yield from _serving_line(status, run)
    yield outcome_line(status)


def outcome_line(status: PipelineStatus) -> str:
    """Return how the pipeline ended, or what it does now; the error of a failed stage is shown with the stage."""
    failed = next(
        (name for name, one in status.stages.items() if one.state is StageState.FAILED), None
    )
    if status.finished_at is None:
        return ready_message(status)
    if failed:
        return (
            f"{status.phase} at {failed}{link(status.stages[failed].reason, TROUBLESHOOTING_URL)}"
        )
    return f"{status.phase}: {ready_message(status)}"


def run_argument(run: Path) -> str:
    """Return the arguments of a command that mean this run: its name, or its manifest with --workdir."""
    if run.absolute().parent == RUNS.absolute():
        return shlex.quote(run.name)
    manifest = manifest_of(run)
    return shlex.join([_relative(manifest) if manifest else "FILE", "--workdir", str(run)])


def _relative(path: Path) -> str:
    """Return a path relative to the current folder, where it is below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _where(model: ModelStatus, run: Path) -> str:
    """Return the URI of a model, with its folder on this machine where the URI names a claim."""
    scheme, _, rest = model.uri.partition("://")
    claim, _, path = rest.partition("/")
    link = run / "claims" / claim
    return (
        f"{model.uri} = {link.resolve() / path}" if scheme == "pvc" and link.is_dir() else model.uri
    )


def _serving_line(status: PipelineStatus, run: Path) -> Iterator[str]:
    deploy = status.stages.get("deploy")
    if deploy and isinstance(deploy.result, DeployResult):
        serve = f"finetune run {run_argument(run)} --keep-serving"
        yield f"its server answered the prompt and was stopped; to serve the model here: {serve}"
