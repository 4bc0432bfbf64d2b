"""The status of a pipeline: pure, from the assessment of every stage and the plan."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from finetune_operator.api.conditions import (
    FINISHED,
    READY,
    RECONCILING,
    STALLED,
    Condition,
    Reason,
    link,
    merge_conditions,
)
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import (
    GateStatus,
    HandledAnnotations,
    ModelStatus,
    PipelineStatus,
    Refusal,
    StageState,
    StageStatus,
    truncate_message,
)
from finetune_operator.core.actions import subject_of
from finetune_operator.core.assess import PipelineAssessment
from finetune_operator.core.costs import amount_text, pipeline_costs
from finetune_operator.core.observation import Blocker
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.core.plan import Plan
from finetune_trainer.contract import DeployResult, Progress, PushResult

ConditionStatus = Literal["True", "False", "Unknown"]
Fact = tuple[str, ConditionStatus, Reason, str]
"""Type, status, reason and message of a condition."""


@dataclass(frozen=True)
class Summary:
    """Phase and conditions of the pipeline as a whole."""

    phase: str
    ready: ConditionStatus
    reason: Reason
    message: str
    reconciling: bool = False
    stalled: bool = False
    finished: bool = False


def report(
    pipeline: Pipeline, assessment: PipelineAssessment, plan: Plan, now: datetime, url: str
) -> PipelineStatus:
    """Return the complete new status; messages of conditions link to the page of `url`.

    From the last one, only times of earlier changes are taken, and what another version of the operator has written.
    """
    before, stages = pipeline.status, plan.stages
    costs = pipeline_costs(stages, plan.currency)
    summary = _add_workspace_warning(
        summarize(pipeline, assessment, plan), _workspace_warning(assessment)
    )
    name = current_stage(stages)
    current, model = stages[name], _model(stages)
    facts = [*_summary_facts(summary, url), *_stage_facts(stages)]
    return PipelineStatus(
        observed_generation=pipeline.generation,
        phase=summary.phase,
        stage=name,
        progress=percent(current),
        attempt=current.last_attempt.number if current.last_attempt else 0,
        conditions=merge_conditions(
            before.conditions, _conditions(facts, pipeline.generation, now)
        ),
        stages=stages
        | {name: stage for name, stage in before.stages.items() if name not in stages},
        gates=tuple(_with_unknown_fields(assessment.gates, before.gates)),
        gates_passed=all(gate.passed for gate in assessment.gates) if assessment.gates else None,
        model=model and model.with_unknown_fields_of(before.model),
        interruptions=sum(stage.interruptions for stage in stages.values()),
        lost_steps=sum(stage.lost_steps for stage in stages.values()),
        lost_seconds=round(sum(stage.lost_seconds for stage in stages.values()), 3),
        costs=costs,
        spent=amount_text(costs.spent, costs.currency) if costs else "",
        started_at=min((s.started_at for s in stages.values() if s.started_at), default=None),
        finished_at=(before.finished_at or now) if summary.finished else None,
        cancelled=assessment.cancelled,
        observed_annotations=_handled_annotations(pipeline),
        refusals=_repeated_refusals(before, plan),
    ).with_unknown_fields_of(before)


def unreadable_status(
    message: str, generation: int, now: datetime, url: str, *, stalled: bool
) -> dict[str, Any]:
    """Return the fields to change in the status of an object that the operator cannot read.

    With observedGeneration, so that kstatus reads Stalled; without finishedAt, which is that of another spec. An object
    that is not stalled waits for a newer operator, as it does for a moment in each upgrade.
    """
    phase, text = "Failed" if stalled else "Pending", truncate_message(message)
    summary = Summary(
        phase, "False", Reason.SPEC_INVALID, text, stalled=stalled, reconciling=not stalled
    )
    conditions = _conditions(_summary_facts(summary, url), generation, now)
    told = [one.model_dump(mode="json", by_alias=True) for one in conditions]
    return {
        "conditions": told,
        "observedGeneration": generation,
        "phase": summary.phase,
        "finishedAt": None,
    }


def _with_unknown_fields(
    gates: Iterable[GateStatus], before: Iterable[GateStatus]
) -> Iterator[GateStatus]:
    """Yield the gates with what another version of the operator has written about the same ones."""

    def key(gate: GateStatus) -> tuple[str, str, str, str]:
        return gate.task, gate.metric, gate.operator, gate.against

    known = {key(gate): gate for gate in before}
    for gate in gates:
        yield gate.with_unknown_fields_of(known.get(key(gate)))


def _repeated_refusals(before: PipelineStatus, plan: Plan) -> tuple[Refusal, ...]:
    """Return the refusals of requests that are sent again now; the others are out of date."""
    subjects = {subject_of(action) for action in plan.actions}
    return tuple(one for one in before.refusals if one.subject in subjects)


def with_refusals(status: PipelineStatus, refused: Mapping[str, Blocker]) -> PipelineStatus:
    """Return the status with the refusals of this reconcile in place of those of earlier ones.

    The first message of a reason is kept: some policies word each refusal anew, which would change the status forever.
    """
    known = {(one.subject, one.reason): one for one in status.refusals}
    refusals = (
        known.get((subject, one.reason))
        or Refusal(subject=subject, reason=one.reason, message=truncate_message(one.message))
        for subject, one in sorted(refused.items())
    )
    return status.model_copy(update={"refusals": tuple(refusals)})


def _workspace_warning(assessment: PipelineAssessment) -> Blocker | None:
    workspace = assessment.observation.workspace
    refused = {
        change.field: refusal
        for change in workspace.changes
        if (refusal := assessment.refusals.get(change.field))
    }
    found = [
        *(f"{field}: {refusal.message}" for field, refusal in refused.items()),
        *([workspace.warning.message] if workspace.warning else []),
    ]
    return Blocker(Reason.VOLUME_NOT_READY, "; ".join(found)) if found else None


def _handled_annotations(pipeline: Pipeline) -> HandledAnnotations:
    before, retry, cancel = pipeline.status.observed_annotations, pipeline.retry, pipeline.cancel
    return HandledAnnotations(
        retry=before.retry if retry is None else retry,
        cancel=before.cancel if cancel is None else cancel,
    ).with_unknown_fields_of(before)


def summarize(pipeline: Pipeline, assessment: PipelineAssessment, plan: Plan) -> Summary:
    """Return phase, reason and message of the pipeline.

    The order matters. A pipeline with a live Job is not Finished, even if that Job is being stopped. Failed and done
    come before suspended, because a finished pipeline cannot be suspended. A cancelled one does not continue when
    resumed.
    """
    running = any(status.running_attempt for status in plan.stages.values())
    failed = assessment.failed_stage
    if failed and not running:
        status = assessment.stages[failed].status
        phase = "Cancelled" if status.reason is Reason.CANCELLED else "Failed"
        message = f"{failed}: {status.message}"
        return Summary(phase, "False", status.reason, message, stalled=True, finished=True)
    if assessment.done and not running:
        return _finish(assessment)
    if pipeline.spec.suspend and not assessment.cancelled:
        return Summary(
            "Suspended",
            "False",
            Reason.SUSPENDED,
            "suspended; it continues where it stopped when resumed",
            reconciling=running,
        )
    name = current_stage(plan.stages)
    status = plan.stages[name]
    message = f"{name}: {status.message}" if status.message else f"{name} is {status.state.lower()}"
    active = running or status.state is StageState.RUNNING
    return Summary(
        "Running" if active else "Pending", "False", status.reason, message, reconciling=True
    )


def _add_workspace_warning(summary: Summary, blocker: Blocker | None) -> Summary:
    """Add the problem of the workspace to the message. It stops no stage, so phase and conditions stay."""
    if blocker is None:
        return summary
    reason = blocker.reason if summary.reason is Reason.PROGRESSING else summary.reason
    return replace(
        summary,
        reason=reason,
        message=truncate_message(f"{summary.message}; meanwhile {blocker.message}"),
    )


def _finish(assessment: PipelineAssessment) -> Summary:
    """Return how the pipeline ended. A server that is down comes first: only it has clients that wait."""
    statuses = [stage.status for stage in assessment.stages.values()]
    down = next(
        (status.message for status in statuses if status.reason is Reason.SERVER_NOT_READY), None
    )
    if down:
        return Summary("Degraded", "False", Reason.SERVER_NOT_READY, down, finished=True)
    # Whether or not a stage depends on the gates: to pass them was requested, too.
    closed = truncate_message(
        "; ".join(gate.message for gate in assessment.gates if not gate.passed)
    )
    if closed:
        return Summary(
            "BelowThreshold", "False", Reason.BELOW_THRESHOLD, closed, stalled=True, finished=True
        )
    return Summary(
        "Succeeded",
        "True",
        Reason.ALL_STAGES_SUCCEEDED,
        "all requested stages are done",
        finished=True,
    )


def current_stage(stages: Mapping[str, StageStatus]) -> str:
    """Return the stage to show: the first with a live Job, else failed, running or pending, else the last done."""
    for name, status in stages.items():
        # Not by its state: a stage that is no longer requested may still have a Job that is being stopped.
        if status.running_attempt:
            return name
    for state in (StageState.FAILED, StageState.RUNNING, StageState.PENDING):
        for name, status in stages.items():
            if status.state is state:
                return name
    done = [name for name, status in stages.items() if status.state is StageState.SUCCEEDED]
    return (done or list(stages))[-1]


def percent(stage: StageStatus) -> str:
    """Return the progress of a stage, for example 62%. It reaches 100% only when the stage has succeeded."""
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
    if pushed is None or not pushed.published:
        return None
    model = (
        pushed.first("Merged") or pushed.published[0]
    )  # the merged model is the one that can be served
    return ModelStatus(uri=model.uri, digest=model.digest, endpoint=endpoint)


def _conditions(facts: Iterable[Fact], generation: int, now: datetime) -> Iterator[Condition]:
    for kind, status, reason, message in facts:
        yield Condition(
            type=kind,
            status=status,
            reason=reason,
            message=message,
            observed_generation=generation,
            last_transition_time=now,
        )


def _summary_facts(summary: Summary, url: str) -> Iterator[Fact]:
    message = summary.message + link(summary.reason, url)
    yield READY, summary.ready, summary.reason, message
    if summary.reconciling:
        yield RECONCILING, "True", summary.reason, message
    if summary.stalled:
        yield STALLED, "True", summary.reason, message
    yield FINISHED, "True" if summary.finished else "False", summary.reason, message


def _stage_facts(stages: Mapping[str, StageStatus]) -> Iterator[Fact]:
    for kind in STAGES:
        status = stages[kind.name]
        yield kind.condition, _condition_status(status), status.reason, status.message


def _condition_status(status: StageStatus) -> ConditionStatus:
    match status.state:
        case StageState.SUCCEEDED:
            return "False" if status.reason is Reason.SERVER_NOT_READY else "True"
        case StageState.FAILED | StageState.SKIPPED:
            return "False"
        case StageState.PENDING | StageState.QUEUED | StageState.RUNNING:
            return "Unknown"
