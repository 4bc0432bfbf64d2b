"""Notes about stages that succeeded and may have ended badly: cut records, losses that rose, no gain over the base."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import ValidationError

from finetune_cli.comparison.best import HIGHER_IS_BETTER, LOWER_IS_BETTER
from finetune_cli.output.results import (
    CHANGED,
    COMMON_SHARE,
    changed_records,
    share_text,
)
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import PipelineStatus, StageState, StageStatus
from finetune_trainer.contract import (
    EvaluateResult,
    LossCurve,
    PrepareResult,
    Progress,
    TrainResult,
)

LN_2 = math.log(2)
"""DPO's loss of a model that equals its reference."""
# The losses of single points are noisy, also in a training that goes well.
RISE = 1.05
"""A training loss that ends this many times as high as it began has risen."""
MEASURE = 4
"""The first and the last loss are means of so large a part of the curve: a quarter."""


class NoteReason(StrEnum):
    """Reasons of notes, for lists and programs; docs/guides/troubleshooting.md explains each."""

    RECORDS_TRUNCATED = "RecordsTruncated"
    RECORDS_DROPPED = "RecordsDropped"
    RECORDS_INVALID = "RecordsInvalid"
    RECORDS_UNRENDERED = "RecordsUnrendered"
    ONE_STEP = "OneStep"
    VALIDATION_LOSS_ROSE = "ValidationLossRose"
    TRAINING_LOSS_ROSE = "TrainingLossRose"
    ABOVE_REFERENCE = "AboveReference"
    NO_GAIN = "NoGain"


Finding = tuple[NoteReason, str]
"""Reason and message of a note."""
RECORD_FIXES = {
    "truncated": (NoteReason.RECORDS_TRUNCATED, "raise prepare.contextLength"),
    "dropped": (
        NoteReason.RECORDS_DROPPED,
        "raise prepare.contextLength, or set prepare.tooLong to Truncate",
    ),
    "invalid": (
        NoteReason.RECORDS_INVALID,
        "see the log of prepare for their lines",
    ),
    "unrendered": (
        NoteReason.RECORDS_UNRENDERED,
        "see the log of prepare for the texts that the chat template leaves out",
    ),
}
"""What happened to records -> the note's reason, and the fix."""


@dataclass(frozen=True)
class Note:
    """What may be bad about a stage that succeeded."""

    stage: str
    reason: NoteReason
    message: str
    """What was observed, and how to mend it."""


def notes_of(status: PipelineStatus) -> list[Note]:
    """Return the notes about all stages, in the order of the stages."""
    notes = []
    for kind in STAGES:
        stage = status.stages.get(kind.name)
        if stage is not None:
            notes += stage_notes(kind.name, stage)
    return notes


def stage_notes(name: str, stage: StageStatus) -> list[Note]:
    """Return the notes about a stage; none before it has succeeded."""
    if stage.state is not StageState.SUCCEEDED:
        return []
    match stage.result:
        case PrepareResult():
            pairs = _prepare_notes(stage.result)
        case TrainResult():
            pairs = _train_notes(stage.result, stage.loss_curve, stage.progress)
        case EvaluateResult():
            pairs = _evaluate_notes(stage.result)
        case _:
            return []
    return [Note(name, reason, message) for reason, message in pairs]


def with_notes(pipeline: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object as an API server returns it, with the notes as status.notes."""
    status = pipeline.get("status")
    if not status:
        return dict(pipeline)
    listed = [vars(note) for note in notes_of_object(pipeline)]
    return {**pipeline, "status": {**status, "notes": listed}}


def notes_of_object(pipeline: Mapping[str, Any]) -> list[Note]:
    """Return the notes about a plain object; none if another version has written a status that cannot be read."""
    try:
        return notes_of(PipelineStatus.model_validate(pipeline.get("status") or {}))
    except ValidationError:
        return []


def _prepare_notes(result: PrepareResult) -> Iterator[Finding]:
    for name, count in changed_records(result).items():
        # A few among thousands are usual, and the stage's line has their number.
        if count >= COMMON_SHARE * result.records:
            reason, fix = RECORD_FIXES[name]
            share = share_text(count, result.records)
            words = CHANGED[name]
            text = f"{count:,} of {result.records:,} records are {words}"
            yield reason, f"{text} ({share}): {fix}"


def _train_notes(
    result: TrainResult, curve: LossCurve | None, progress: Progress | None
) -> Iterator[Finding]:
    if result.steps == 1:
        fix = "lower train.microBatchSize or train.gradientAccumulationSteps, or set prepare.packing to false"
        yield (
            NoteReason.ONE_STEP,
            f"the training had 1 step in all, which teaches little: {fix}",
        )
    if curve:
        yield from _rise(curve)
    if progress is None or progress.reward_accuracy is None:
        return
    # Only DPO has rewards.
    loss = result.validation_loss
    if loss is not None and loss > LN_2:
        text = f"validation loss {loss:.4g} is above ln 2 (0.6931), DPO's loss before training"
        fix = "lower train.optimizer.learningRate, or raise train.dpo.beta"
        yield NoteReason.ABOVE_REFERENCE, f"{text}: {fix}"


def _rise(curve: LossCurve) -> Iterator[Finding]:
    """Yield a note if the validation loss ended above its first value, or else the training loss."""
    if len(curve.validations) > 1:
        first = curve.validations[0]
        last = curve.validations[-1]
        if last.loss > first.loss:
            text = f"validation loss rose from {first.loss:.4g} at step {first.step}"
            text += f" to {last.loss:.4g} at step {last.step}"
            yield (
                NoteReason.VALIDATION_LOSS_ROSE,
                f"{text}: lower train.optimizer.learningRate or train.epochs",
            )
            return
    size = max(1, len(curve.losses) // MEASURE)
    start = _mean(curve.losses[:size])
    end = _mean(curve.losses[-size:])
    if len(curve.losses) > 1 and end > start * RISE > 0:
        text = f"training loss rose from {start:.4g} to {end:.4g}"
        yield (
            NoteReason.TRAINING_LOSS_ROSE,
            f"{text}: lower train.optimizer.learningRate",
        )


def _mean(losses: Sequence[float]) -> float:
    return sum(losses) / len(losses)


def _evaluate_notes(result: EvaluateResult) -> Iterator[Finding]:
    for task, metrics in result.scores.items():
        for metric, score in metrics.items():
            if score.base is None:
                continue
            name = metric.partition(",")[0]
            side = ""
            # Not the opposite: a score that is no number is no gain.
            if name in HIGHER_IS_BETTER and not score.value > score.base:
                side = "above"
            elif name in LOWER_IS_BETTER and not score.value < score.base:
                side = "below"
            if side:
                base = f"the base model's {score.base:.4g}"
                text = f"{task} {metric} {score.value:.4g} is not {side} {base}"
                yield (
                    NoteReason.NO_GAIN,
                    f"{text}: training has not helped with this task",
                )
