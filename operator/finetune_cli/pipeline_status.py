"""How a pipeline ended, as an exit code."""

from finetune_cli.exit_codes import BELOW_GATE, FAILED
from finetune_operator.api.conditions import READY
from finetune_operator.api.status import PipelineStatus
from finetune_operator.core.pipeline import Pipeline

DONE = ("Succeeded", "BelowThreshold")


def exit_code(status: PipelineStatus) -> int:
    """Say of a pipeline that has finished how that was: 0, FAILED, BELOW_GATE."""
    return below_gate(status) if status.phase in DONE else FAILED


def below_gate(status: PipelineStatus) -> int:
    """Give BELOW_GATE where the score is too low, also where nothing waited for the gate; else 0."""
    return BELOW_GATE if status.gate is not None and not status.gate.passed else 0


def is_up_to_date(pipeline: Pipeline) -> bool:
    """Whether the status speaks of what is asked now: of this spec, and of every retry and cancellation."""
    asked = pipeline.retry is not None or pipeline.cancel is not None
    return pipeline.status.observed_generation == pipeline.generation and not asked


def has_finished(pipeline: Pipeline) -> bool:
    """Whether it has come to an end that nothing asked since will change."""
    return pipeline.status.finished_at is not None and is_up_to_date(pipeline)


def ready_message(status: PipelineStatus) -> str:
    """Give the sentence that tells how the pipeline stands."""
    return next((condition.message for condition in status.conditions if condition.type == READY), "")
