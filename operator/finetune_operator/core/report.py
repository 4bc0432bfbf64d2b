"""What is said of a pipeline: pure, from what every stage is and what is about to be done."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from finetune_operator.api.conditions import FINISHED, READY, RECONCILING, STALLED, Condition, Reason, merge_conditions
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import (
    HandledAnnotations,
    ModelStatus,
    Outcome,
    PipelineStatus,
    StageState,
    StageStatus,
    truncate_message,
)
from finetune_operator.core.assess import PipelineAssessment
from finetune_operator.core.observation import Blocker
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.core.plan import Plan
from finetune_trainer.contract import DeployResult, Progress, PushResult

ConditionStatus = Literal["True", "False", "Unknown"]


@dataclass(frozen=True)
class Summary:
    """The pipeline as a whole."""

    phase: str
    ready: ConditionStatus
    reason: Reason
    message: str
    reconciling: bool = False
    stalled: bool = False
    finished: bool = False


def report(pipeline: Pipeline, assessment: PipelineAssessment, plan: Plan, now: datetime) -> PipelineStatus:
    """Write the whole status anew; only times of transition are taken over."""
    before, stages = pipeline.status, plan.stages
    summary = _add_workspace_warning(summarize(pipeline, assessment, plan), assessment.workspace_blocker)
    name = current_stage(stages)
    current = stages[name]
    return PipelineStatus(
        observed_generation=pipeline.generation,
        phase=summary.phase,
        stage=name,
        progress=percent(current),
        attempt=current.last_attempt.number if current.last_attempt else 0,
        conditions=merge_conditions(before.conditions, _conditions(pipeline.generation, summary, stages, now)),
        stages=stages,
        gate=assessment.gate,
        model=_model(stages),
        interruptions=sum(stage.interruptions for stage in stages.values()),
        lost_steps=sum(stage.lost_steps for stage in stages.values()),
        lost_seconds=round(sum(stage.lost_seconds for stage in stages.values()), 3),
        started_at=min((s.started_at for s in stages.values() if s.started_at), default=None),
        finished_at=(before.finished_at or now) if summary.finished else None,
        cancelled=assessment.cancelled,
        observed_annotations=_handled_annotations(pipeline),
    )


def _handled_annotations(pipeline: Pipeline) -> HandledAnnotations:
    before, retry, cancel = pipeline.status.observed_annotations, pipeline.retry, pipeline.cancel
    return HandledAnnotations(
        retry=before.retry if retry is None else retry,
        cancel=before.cancel if cancel is None else cancel,
    )


def summarize(pipeline: Pipeline, assessment: PipelineAssessment, plan: Plan) -> Summary:
    """Say in one word, one reason and one sentence how the pipeline stands."""
    running = any(_is_running(status) for status in plan.stages.values())
    failed = assessment.failed_stage
    if failed and not running:
        status = assessment.stages[failed].status
        phase = "Cancelled" if status.reason is Reason.CANCELLED else "Failed"
        message = f"{failed}: {status.message}"
        return Summary(phase, "False", status.reason, message, stalled=True, finished=True)
    if assessment.done and not running:
        return _finish(assessment)
    if pipeline.spec.suspend:
        return Summary(
            "Suspended", "False", Reason.SUSPENDED, "suspended, goes on where it stopped", reconciling=running
        )
    name = current_stage(plan.stages)
    status = plan.stages[name]
    message = f"{name}: {status.message}" if status.message else f"{name} is {status.state.lower()}"
    goes_on = running or status.state is StageState.RUNNING
    return Summary("Running" if goes_on else "Pending", "False", status.reason, message, reconciling=True)


def _add_workspace_warning(summary: Summary, trouble: Blocker | None) -> Summary:
    """Add what is wrong with the workspace to what is said anyway, for nothing stops because of it."""
    if trouble is None:
        return summary
    reason = trouble.reason if summary.reason is Reason.PROGRESSING else summary.reason
    return replace(summary, reason=reason, message=truncate_message(f"{summary.message}; meanwhile {trouble.message}"))


def _finish(view: PipelineAssessment) -> Summary:
    below = next((s.status.message for s in view.stages.values() if s.status.reason is Reason.BELOW_THRESHOLD), None)
    if below:
        return Summary("BelowThreshold", "False", Reason.BELOW_THRESHOLD, below, finished=True)
    down = next((s.status.message for s in view.stages.values() if s.status.reason is Reason.SERVER_NOT_READY), None)
    if down:
        return Summary("Degraded", "False", Reason.SERVER_NOT_READY, down, finished=True)
    return Summary("Succeeded", "True", Reason.ALL_STAGES_SUCCEEDED, "all that was asked for is done", finished=True)


def current_stage(stages: Mapping[str, StageStatus]) -> str:
    """Name the stage to look at: the one that runs or failed, else the first that is not over, else the last done."""
    for name, status in stages.items():
        if _is_running(status):
            return name
    for state in (StageState.FAILED, StageState.RUNNING, StageState.PENDING):
        for name, status in stages.items():
            if status.state is state:
                return name
    done = [name for name, status in stages.items() if status.state is StageState.SUCCEEDED]
    return (done or list(stages))[-1]


def _is_running(status: StageStatus) -> bool:
    # Not its state: a stage that is not asked for any more may still have a Job that is being stopped.
    return status.last_attempt is not None and status.last_attempt.outcome is Outcome.RUNNING


def percent(stage: StageStatus) -> str:
    """Say how far a stage is, as 62%."""
    if stage.state is StageState.SUCCEEDED:
        return "100%"
    progress: Progress | None = stage.progress
    if progress is None or not progress.total:
        return ""
    return f"{min(99, 100 * progress.step // progress.total)}%"


def _model(stages: Mapping[str, StageStatus]) -> ModelStatus | None:
    pushed = next((s.result for s in stages.values() if isinstance(s.result, PushResult)), None)
    served = next((s.result for s in stages.values() if isinstance(s.result, DeployResult)), None)
    endpoint = served.url if served and served.long_running else None
    return ModelStatus(uri=pushed.uri, digest=pushed.digest, endpoint=endpoint) if pushed else None


def _conditions(
    generation: int, summary: Summary, stages: Mapping[str, StageStatus], now: datetime
) -> Iterator[Condition]:
    def condition(kind: str, status: ConditionStatus, reason: Reason, message: str) -> Condition:
        return Condition(
            type=kind,
            status=status,
            reason=reason,
            message=message,
            observed_generation=generation,
            last_transition_time=now,
        )

    yield condition(READY, summary.ready, summary.reason, summary.message)
    if summary.reconciling:
        yield condition(RECONCILING, "True", summary.reason, summary.message)
    if summary.stalled:
        yield condition(STALLED, "True", summary.reason, summary.message)
    yield condition(FINISHED, "True" if summary.finished else "False", summary.reason, summary.message)
    for kind in STAGES:
        status = stages[kind.name]
        yield condition(kind.condition, _condition_status(status), status.reason, status.message)


def _condition_status(status: StageStatus) -> ConditionStatus:
    match status.state:
        case StageState.SUCCEEDED:
            return "False" if status.reason is Reason.SERVER_NOT_READY else "True"
        case StageState.FAILED | StageState.SKIPPED:
            return "False"
        case StageState.PENDING | StageState.QUEUED | StageState.RUNNING:
            return "Unknown"
