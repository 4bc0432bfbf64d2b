"""Compare runs: the fields that differ, losses, scores with their differences, time and cost. Pure, from statuses."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import zip_longest
from typing import Any

from finetune_cli.comparison.attempts import making_attempts, making_seconds
from finetune_operator.api.gates import difference
from finetune_operator.api.status import PipelineStatus, StageState
from finetune_trainer.contract import (
    EvaluateResult,
    LossCurve,
    PrepareResult,
    Score,
    TrainResult,
)
from finetune_trainer.contract.question_scores import QuestionScores, significant

DIGEST_CHARACTERS = 19
"""sha256: and twelve digits."""
OTHER_QUESTIONS = "the questions are not the same"
TRAINING_LOSS = "training loss"
NO_MEAN = "the score is no mean over questions whose values are stored"


@dataclass(frozen=True)
class Run:
    """A run, a pipeline, or an earlier generation of either."""

    name: str
    """As the user names it: docstrings@2."""
    spec: Mapping[str, Any]
    """The spec as JSON, with its defaults."""
    status: PipelineStatus
    questions: Mapping[str, Mapping[str, QuestionScores]] = field(default_factory=dict)
    """Values of single questions by task and score."""
    without_questions: str = "the values of single questions are gone"
    """The reason if there are none."""


@dataclass(frozen=True)
class DifferingField:
    """A field of the manifest that is not the same in all runs."""

    path: str
    """Below spec, for example train.lora.rank."""
    values: tuple[Any, ...]
    """For each run; None if the field is absent."""


@dataclass(frozen=True)
class ScoreDifference:
    """A score of a run minus the score of another."""

    value: float
    stderr: float | None
    """Standard error; None if it is not known."""
    unpaired: str = ""
    """Why the questions are not paired; empty if they are. The error of an unpaired difference is larger."""


@dataclass(frozen=True)
class Measurements:
    """What was measured of one run; None for what is not known."""

    training_loss: float | None
    """Mean of the last logging window, as in the model card."""
    validation_loss: float | None
    """Loss of the weights that are the result: the lowest of all validations."""
    scores: Mapping[str, Mapping[str, Score]]
    """By task and metric."""
    seconds: float
    """Running time of all stages in which the results were made."""
    training_seconds: float
    cost: Decimal | None
    """Price of these attempts; None if no price is known."""
    currency: str
    curve: LossCurve | None


def differing_fields(runs: Sequence[Run]) -> list[DifferingField]:
    """Return the fields of the spec that differ, in the order of the manifest, and then the contents of sources."""
    fields = list(_fields("", [run.spec for run in runs]))
    # The first key of each path: datasets of datasets[0].uri.
    sources = {re.split(r"[.\[]", field.path)[0] for field in fields}
    for name in ("datasets", "model"):
        digests = tuple(_digest(run.status, name) for run in runs)
        known = {digest for digest in digests if digest}
        # Another source has another content, which says nothing more.
        if name not in sources and len(known) > 1:
            fields.append(DifferingField(f"content of {name}", digests))
    return fields


def _fields(path: str, values: Sequence[Any]) -> Iterator[DifferingField]:
    # An empty block or list says no more than an absent one.
    values = [None if value in ({}, []) else value for value in values]
    # Not a set: mappings and lists have no hash.
    if all(value == values[0] for value in values):
        return
    present = [value for value in values if value is not None]
    if all(isinstance(value, Mapping) for value in present):
        yield from _fields_of_blocks(path, [value or {} for value in values])
    elif all(_is_list_of_mappings(value) for value in present):
        yield from _fields_of_lists(path, [value or [] for value in values])
    else:
        yield DifferingField(path, tuple(values))


def _fields_of_blocks(
    path: str, blocks: Sequence[Mapping[str, Any]]
) -> Iterator[DifferingField]:
    # Not a set: the order of the manifest stays.
    names = dict.fromkeys(name for block in blocks for name in block)
    for name in names:
        inner = f"{path}.{name}" if path else name
        yield from _fields(inner, [block.get(name) for block in blocks])


def _fields_of_lists(
    path: str, lists: Sequence[Sequence[Any]]
) -> Iterator[DifferingField]:
    for number, items in enumerate(zip_longest(*lists)):
        yield from _fields(f"{path}[{number}]", items)


def _is_list_of_mappings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)


def _digest(status: PipelineStatus, source: str) -> str | None:
    """Return the short digest of the data or of the model that prepare has read; None before that."""
    result = status.result(PrepareResult)
    if result is None:
        return None
    digest: str | None = result.data_digest
    if source == "model":
        digest = result.model_digest
    if not digest:
        return None
    return f"{digest[:DIGEST_CHARACTERS]}…"


def measurements(run: Run) -> Measurements:
    """Return what was measured of a run."""
    status = run.status
    train = status.stages.get("train")
    training_loss, validation_loss = _losses(status)
    evaluated = status.result(EvaluateResult)
    scores = evaluated.scores if evaluated else {}
    stages = [
        stage
        for stage in status.stages.values()
        # A stage that the manifest asks for no longer.
        if stage.state is not StageState.SKIPPED
    ]
    attempts = [attempt for stage in stages for attempt in making_attempts(stage)]
    costs = [attempt.cost for attempt in attempts if attempt.cost is not None]
    return Measurements(
        training_loss=training_loss,
        validation_loss=validation_loss,
        scores=scores,
        seconds=sum(making_seconds(stage) for stage in stages),
        training_seconds=making_seconds(train) if train else 0.0,
        cost=sum(costs, Decimal()) if costs else None,
        currency=status.costs.currency if status.costs else "",
        curve=train.loss_curve if train else None,
    )


def _losses(status: PipelineStatus) -> tuple[float | None, float | None]:
    """Return training and validation loss of the result, or of the curve so far."""
    train = status.stages.get("train")
    if train is None:
        return None, None
    if isinstance(train.result, TrainResult):
        return train.result.loss, train.result.validation_loss
    curve = train.loss_curve
    if curve is None:
        return None, None
    validation_loss = curve.best.loss if curve.best else None
    return curve.losses[-1], validation_loss


def score_difference(
    run: Run, other: Run, task: str, metric: str
) -> ScoreDifference | None:
    """Return a score of a run minus the score of another run; None if it is not known of both.

    On equal questions the difference is paired, by the code with which evaluate compares with the base model for a
    gate. Otherwise its error is the one of independent scores.
    """
    score = _score(run, task, metric)
    other_score = _score(other, task, metric)
    if score is None or other_score is None:
        return None
    value = difference(score.value, other_score.value)
    independent = _independent(score, other_score)
    values = _values(run, task, metric, score)
    other_values = _values(other, task, metric, other_score)
    if isinstance(values, str):
        return ScoreDifference(value, independent, values)
    if isinstance(other_values, str):
        return ScoreDifference(value, independent, other_values)
    paired = values.minus(other_values)
    if paired is None:
        return ScoreDifference(value, independent, OTHER_QUESTIONS)
    # Of a single question there is a difference, and no error.
    stderr = None if paired.stderr is None else significant(paired.stderr)
    return ScoreDifference(value, stderr)


def _score(run: Run, task: str, metric: str) -> Score | None:
    result = run.status.result(EvaluateResult)
    if result is None:
        return None
    score = result.scores.get(task, {}).get(metric)
    if score is None or not math.isfinite(score.value):
        return None
    return score


def _values(run: Run, task: str, metric: str, score: Score) -> QuestionScores | str:
    """Return the values whose mean is the score, or the reason why there are none."""
    if not run.questions:
        return f"{run.name}: {run.without_questions}"
    values = run.questions.get(task, {}).get(metric)
    # Of a median, for example, the difference is no mean of differences.
    if values is None or values.mean != score.value:
        return NO_MEAN
    return values


def _independent(score: Score, other: Score) -> float | None:
    """Return the standard error of the difference of two independent scores."""
    if score.stderr is None or other.stderr is None:
        return None
    error = math.hypot(score.stderr, other.stderr)
    return significant(error) if math.isfinite(error) else None


def metric_names(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return task and metric of every score, in the order in which the runs have them."""
    # Not a set: the order stays.
    names: dict[tuple[str, str], None] = {}
    for run in runs:
        for task, metrics in measurements(run).scores.items():
            for metric in metrics:
                names[task, metric] = None
    return list(names)
