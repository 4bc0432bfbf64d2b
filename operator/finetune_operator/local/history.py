"""Earlier generations of a run: what was measured, kept when an edit begins another result.

`history/N.json` holds the pipeline as it was, and the values of single questions: the next stage that starts may delete
the files of an earlier result.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from finetune_operator.api.status import PipelineStatus
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.errors import ClusterError
from finetune_operator.local.pipeline_file import (
    UNREADABLE,
    pipeline_of,
    to_object,
)
from finetune_trainer.contract import EvaluateResult, PrepareResult, TrainResult
from finetune_trainer.contract.question_scores import (
    Scores,
    from_json,
    read_question_scores,
    to_json,
)
from finetune_trainer.files import write_durably

FOLDER = "history"
QUESTIONS = "questions"
"""Key of the values of single questions."""


@dataclass(frozen=True)
class Generation:
    """A pipeline with what was measured, and the values of single questions as far as they are known."""

    number: int
    """From 1, in the order of the edits."""
    pipeline: Pipeline
    questions: Scores


def has_measured(status: PipelineStatus) -> bool:
    """Return whether a training has begun, or a model was evaluated: otherwise nothing is worth keeping."""
    return any(
        stage.loss_curve or isinstance(stage.result, TrainResult | EvaluateResult)
        for stage in status.stages.values()
    )


def loses_results(before: Pipeline, after: PipelineStatus) -> bool:
    """Return whether a stage begins another result although the spec is the same: its data has changed."""
    status = before.status
    # An edit has kept this generation already, when the manifest was applied.
    if status.observed_generation != before.generation:
        return False
    for name, stage in status.stages.items():
        now = after.stages.get(name)
        if now and stage.identity and now.identity != stage.identity:
            return has_measured(status)
    return False


def keep(workdir: Path, pipeline: Pipeline, workspace: Path) -> None:
    """Keep a generation as the newest of the history. Raise ClusterError if the file cannot be written."""
    number = newest_number(workdir)
    last = _read(workdir, number - 1)
    # A command that was killed before it applied the edit keeps the same generation again.
    if last and last.pipeline.resource_version == pipeline.resource_version:
        return
    questions = question_scores(pipeline, workspace)
    content = {**to_object(pipeline), QUESTIONS: to_json(questions)}
    path = workdir / FOLDER / f"{number}.json"
    try:
        write_durably(path, json.dumps(content).encode())
    except OSError as error:
        raise ClusterError(f"cannot write {path}: {error}") from error


def earlier_generations(workdir: Path) -> list[Generation]:
    """Return the generations before the present one, the oldest first; those that cannot be read are left out."""
    generations = [_read(workdir, number) for number in sorted(_numbers(workdir))]
    return [generation for generation in generations if generation]


def question_scores(pipeline: Pipeline, workspace: Path) -> Scores:
    """Return the values of single questions of a pipeline, from its workspace; none before the evaluation is done."""
    rows = ""
    output: Path | None = None
    for name, stage in pipeline.status.stages.items():
        if isinstance(stage.result, PrepareResult):
            rows = stage.result.digest
        if isinstance(stage.result, EvaluateResult):
            output = workspace / name / stage.identity / "output"
    return read_question_scores(output, rows) if output else {}


def newest_number(workdir: Path) -> int:
    """Return the number of the present generation."""
    return max(_numbers(workdir), default=0) + 1


def _read(workdir: Path, number: int) -> Generation | None:
    """Return a generation; None if there is none, or if another version has written it."""
    try:
        content = json.loads((workdir / FOLDER / f"{number}.json").read_bytes())
        pipeline = pipeline_of(content)
        return Generation(number, pipeline, from_json(content[QUESTIONS]))
    except (OSError, AttributeError, *UNREADABLE):
        return None


def _numbers(workdir: Path) -> list[int]:
    names = [path.name for path in (workdir / FOLDER).glob("*.json")]
    matches = [re.fullmatch(r"([1-9][0-9]{0,8})\.json", name) for name in names]
    return [int(match[1]) for match in matches if match]
