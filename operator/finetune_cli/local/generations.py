"""The runs of this machine and their earlier generations, as `finetune compare` names them."""

import re
from collections.abc import Sequence
from pathlib import Path

from finetune_cli.arguments import find_workdir, is_manifest, local_runs_hint
from finetune_cli.comparison.compare import Run
from finetune_cli.diagnostics import UsageError, closest_match
from finetune_cli.local.look import look_at
from finetune_cli.runs import find_runs, run_named
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.local.cluster import Folders
from finetune_operator.local.file_names import PIPELINE_FILE
from finetune_operator.local.history import (
    Generation,
    earlier_generations,
    newest_number,
    question_scores,
)
from finetune_operator.local.pipeline_file import to_object

NO_QUESTIONS = "the values of single questions are no longer in the workspace, or evaluate has not run"


def split_generation(reference: str) -> tuple[str, int | None]:
    """Return name and generation of NAME@N; None as the generation of NAME alone."""
    match = re.fullmatch(r"(.+)@([1-9][0-9]{0,8})", reference)
    if match is None:
        return reference, None
    return match[1], int(match[2])


def is_local(reference: str) -> bool:
    """Return whether a reference means a run on this machine: a name, a folder with a run, or a manifest."""
    name, _ = split_generation(reference)
    return is_manifest(name) or _is_run(Path(name)) or run_named(name) is not None


def local_run(reference: str) -> Run:
    """Return the run that a reference means; raise UsageError if there is none."""
    name, number = split_generation(reference)
    generations = generations_of(_folder(name))
    if number is None:
        return as_run(reference, generations[-1])
    for generation in generations:
        if generation.number == number:
            return as_run(reference, generation)
    raise UsageError(_unknown_generation(name, number, generations))


def _folder(name: str) -> Path:
    path = Path(name)
    if _is_run(path):
        return path.absolute()
    if not is_manifest(name) and run_named(name) is None:
        raise UsageError(_unknown_run(name))
    return find_workdir(name, None)


def _is_run(path: Path) -> bool:
    return (path / PIPELINE_FILE).is_file()


def _unknown_run(name: str) -> str:
    names = [run.name for run in find_runs()]
    match = closest_match(name, names)
    hint = f"did you mean {match}?" if match else local_runs_hint()
    return f"there is no run {name} on this machine; {hint}"


def _unknown_generation(
    name: str, number: int, generations: Sequence[Generation]
) -> str:
    numbers = ", ".join(str(generation.number) for generation in generations)
    return (
        f"{name} has no generation {number}; its generations are {numbers}: "
        f"see finetune list --history"
    )


def generations_of(folder: Path) -> list[Generation]:
    """Return all generations of a run, the oldest first. Raise ClusterError if the present one cannot be read."""
    # With the phase of `finetune list`: a run that has ended early is Stopped.
    pipeline = look_at(folder).pipeline
    workspace = Folders.under(folder, folder).workspace(pipeline)
    questions = question_scores(pipeline, workspace)
    newest = Generation(newest_number(folder), pipeline, questions)
    return [*earlier_generations(folder), newest]


def as_run(name: str, generation: Generation) -> Run:
    """Return a generation under the name by which it was asked for."""
    pipeline = generation.pipeline
    return Run(
        name, spec_of(pipeline), pipeline.status, generation.questions, NO_QUESTIONS
    )


def spec_of(pipeline: Pipeline) -> dict[str, object]:
    """Return the spec as JSON with its defaults, without `suspend`, which is no setting of the result."""
    spec: dict[str, object] = to_object(pipeline)["spec"]
    return {name: value for name, value in spec.items() if name != "suspend"}
