"""Exit codes of `finetune`, and how they follow from a pipeline's status. Success is 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Importing the models takes half a second, which completion in a shell does not have.
    from finetune_operator.api.status import PipelineStatus
    from finetune_operator.core.pipeline import Pipeline

FAILED = 1
INVALID = 2
"""Wrong arguments or an invalid manifest."""
BELOW_GATE = 3
"""The pipeline has finished, and its score is below the gate's threshold."""
INTERRUPTED = 130
"""128 + SIGINT, as in a shell."""
PIPE_CLOSED = 141
"""128 + SIGPIPE, as in a shell: the process that read stdout has closed it."""

DONE = ("Succeeded", "BelowThreshold")
"""Phases of a pipeline that has finished without a failure."""


def exit_code(status: PipelineStatus) -> int:
    """Return the exit code for a finished pipeline: 0, FAILED or BELOW_GATE."""
    if status.phase not in DONE:
        return FAILED
    return below_gate(status)


def below_gate(status: PipelineStatus) -> int:
    """Return BELOW_GATE if the score is below the gate, else 0."""
    # None: there is no gate, or its score is not known yet.
    if status.gates_passed is False:
        return BELOW_GATE
    return 0


def is_up_to_date(pipeline: Pipeline) -> bool:
    """Return whether the status covers the current spec and every requested retry and cancellation."""
    # Requests are annotations: they change no generation, so the generation alone does not cover them.
    has_request = pipeline.retry is not None or pipeline.cancel is not None
    return (
        pipeline.status.observed_generation == pipeline.generation and not has_request
    )


def has_finished(pipeline: Pipeline) -> bool:
    """Return whether the pipeline has finished and no later edit or request is pending."""
    return pipeline.status.finished_at is not None and is_up_to_date(pipeline)


def ready_message(status: PipelineStatus) -> str:
    """Return the message of the condition Ready, which summarizes the pipeline; empty if it is absent."""
    from finetune_operator.api.conditions import READY  # noqa: PLC0415  as above

    for condition in status.conditions:
        if condition.type == READY:
            return condition.message
    return ""
