"""Exit codes of `finetune`, and how they follow from a pipeline's status. Success is 0."""

from finetune_operator.api.conditions import FINISHED, READY, STALLED
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import PipelineStatus, StageState
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


def exit_code_of_wait(pipeline: Pipeline, condition: str) -> int | None:
    """Return the exit code, or None while the pipeline may still reach the condition."""
    if has_finished(pipeline):
        return exit_code(pipeline.status)
    conditions = pipeline.status.conditions
    true_conditions = {item.type for item in conditions if item.status == "True"}
    if condition == READY and READY in true_conditions and is_up_to_date(pipeline):
        return 0
    # A finished pipeline with a pending retry may be stalled as well, but it will go on.
    if _is_stalled(pipeline) and FINISHED not in true_conditions:
        return FAILED
    return None


def _is_stalled(pipeline: Pipeline) -> bool:
    """Return whether the pipeline does not go on by itself, or the operator cannot read its spec."""
    for condition in pipeline.status.conditions:
        # A condition of an older generation says nothing about the spec of now.
        if (
            condition.type == STALLED
            and condition.observed_generation == pipeline.generation
        ):
            return True
    return False


def is_until_reached(status: PipelineStatus, until: str | None) -> bool:
    """Return whether all stages up to this one have succeeded or were skipped; False without a stage."""
    if until is None:
        return False
    done = {StageState.SUCCEEDED, StageState.SKIPPED}
    for kind in STAGES:
        stage = status.stages.get(kind.name)
        if stage is None or stage.state not in done:
            return False
        if kind.name == until:
            return True
    return False


def ready_message(status: PipelineStatus) -> str:
    """Return the message of the condition Ready, which summarizes the pipeline; empty if it is absent."""
    for condition in status.conditions:
        if condition.type == READY:
            return condition.message
    return ""
