"""The time that a training takes, by the speed of an earlier attempt: a line for `finetune plan`."""

from finetune_cli.manifest.fields import has_own_program, workload
from finetune_operator.api.spec import PipelineSpec
from finetune_operator.api.status import AttemptStatus
from finetune_operator.core.durations import format_duration
from finetune_operator.core.pipeline import Pipeline
from finetune_trainer.contract import TrainRecipe

# A first step also waits for the compiler, and for memory.
STEPS_TO_MEASURE = 3
"""Steps after which the speed of an attempt is known."""
SPEED = frozenset(TrainRecipe.model_fields) - {
    *("epochs", "max_steps", "optimizer", "eval_steps", "early_stopping"),
    *("dpo", "start_from"),
}
"""Fields of train that change how long a step takes."""


def time_line(
    spec: PipelineSpec, before: Pipeline | None, rows: int | None
) -> str | None:
    """Return how long training takes; None if a program of the user trains.

    `before` is the pipeline with the attempts so far, and `rows` are the rows for training, if they are known.
    """
    if has_own_program(spec.train):
        return None
    work = workload(spec)
    steps = work.max_steps
    if work.epochs is not None:
        steps = work.steps(rows) if rows is not None else None
    attempt = _measured(before)
    if before is None or attempt is None or attempt.step_seconds is None:
        return "train: time not known: no attempt of this pipeline has measured a step"
    if _speed(before.spec) != _speed(spec):
        return "train: time not known: the attempts of this pipeline had another model or other settings"
    step = f"{attempt.step_seconds:.3g} s a step, as in attempt {attempt.number}"
    if steps is None:
        return f"train: {step}"
    duration = format_duration(steps * attempt.step_seconds)
    return f"train: about {duration} for {steps:,} steps, {step}"


def _measured(pipeline: Pipeline | None) -> AttemptStatus | None:
    """Return the newest attempt of the pipeline as it is, if its speed is known."""
    stage = pipeline.status.stages.get("train") if pipeline else None
    if stage is None:
        return None
    for attempt in reversed(stage.attempts):
        if attempt.identity != stage.identity:
            continue
        trained = (attempt.last_step or 0) - (attempt.start_step or 0)
        if attempt.step_seconds and trained >= STEPS_TO_MEASURE:
            return attempt
    return None


def _speed(spec: PipelineSpec) -> tuple[object, ...]:
    """Return what determines how long a step takes."""
    prepare = spec.prepare
    train = spec.stages()["train"]
    recipe = train.model_dump(mode="json", include=set(SPEED))
    resources = train.pod.resources
    return (spec.model, prepare.context_length, prepare.packing, recipe, resources)
