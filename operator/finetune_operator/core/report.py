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
from finetune_operator.api.group import CANCEL_ANNOTATION, RETRY_ANNOTATION
from finetune_operator.api.model_status import ModelStatus, ServerStatus
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import (
    GateStatus,
    HandledAnnotations,
    PipelineStatus,
    Refusal,
    StageState,
    StageStatus,
    truncate_message,
)
from finetune_operator.core.adoption import UNREAD
from finetune_operator.core.assessment import PipelineAssessment
from finetune_operator.core.attempts.costs import amount_text, pipeline_costs
from finetune_operator.core.identity import release
from finetune_operator.core.metadata import SERVER
from finetune_operator.core.observation import Blocker
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.core.planning.actions import subject_of
from finetune_operator.core.planning.plan import Plan
from finetune_operator.core.published import adoption_error, may_adopt
from finetune_trainer.contract import DeployResult, Progress, PushResult

ConditionStatus = Literal["True", "False", "Unknown"]
Fact = tuple[str, ConditionStatus, Reason, str]
"""Type, status, reason and message of a condition."""


@dataclass(frozen=True)
class PipelineSummary:
    """Phase and conditions of the pipeline as a whole."""

    phase: str
    ready: ConditionStatus
    reason: Reason
    message: str
    reconciling: bool = False
    stalled: bool = False
    finished: bool = False


def report(
    pipeline: Pipeline,
    assessment: PipelineAssessment,
    plan: Plan,
    now: datetime,
    url: str,
) -> PipelineStatus:
    """Return the complete new status; messages of conditions link to the page of `url`.

    The last status gives only the times of earlier changes, and the fields of another version of the operator.
    """
    before = pipeline.status
    stages = plan.stages
    costs = pipeline_costs(stages, plan.currency)
    summary = summarize(pipeline, assessment, plan)
    summary = _add_workspace_warning(summary, _workspace_warning(assessment))
    name = current_stage(stages)
    current = stages[name]
    model = _model(stages)
    facts = [*_summary_facts(summary, url), *_stage_facts(stages)]
    conditions = _conditions(facts, pipeline.generation, now)
    # A newer version of the operator may know more stages.
    unknown_stages = {
        key: stage for key, stage in before.stages.items() if key not in stages
    }
    started = [stage.started_at for stage in stages.values() if stage.started_at]
    return PipelineStatus(
        observed_generation=pipeline.generation,
        observed_version=release(),
        phase=summary.phase,
        stage=name,
        progress=percent(current),
        attempt=current.last_attempt.number if current.last_attempt else 0,
        conditions=merge_conditions(before.conditions, conditions),
        stages=stages | unknown_stages,
        gates=tuple(_with_unknown_fields(assessment.gates, before.gates)),
        gates_passed=all(gate.passed for gate in assessment.gates)
        if assessment.gates
        else None,
        model=model and model.with_unknown_fields_of(before.model),
        server=_server(assessment),
        interruptions=sum(stage.interruptions for stage in stages.values()),
        lost_steps=sum(stage.lost_steps for stage in stages.values()),
        lost_seconds=round(sum(stage.lost_seconds for stage in stages.values()), 3),
        costs=costs,
        spent=amount_text(costs.spent, costs.currency) if costs else "",
        started_at=min(started, default=None),
        finished_at=(before.finished_at or now) if summary.finished else None,
        workspace_outdated=_workspace_outdated(assessment),
        cancelled=assessment.cancelled,
        observed_annotations=_handled_annotations(pipeline),
        refusals=_repeated_refusals(before, plan),
    ).with_unknown_fields_of(before)


def unreadable_status(
    message: str, generation: int, now: datetime, url: str, *, stalled: bool
) -> dict[str, Any]:
    """Return the fields to change in the status of an object that the operator cannot read.

    With observedGeneration, so that kstatus reads Stalled; without finishedAt, which belongs to another spec. An object
    that is not stalled waits for a newer operator, as it does for a moment in each upgrade.
    """
    summary = PipelineSummary(
        "Failed" if stalled else "Pending",
        "False",
        Reason.SPEC_INVALID,
        truncate_message(message),
        stalled=stalled,
        reconciling=not stalled,
    )
    conditions = _conditions(_summary_facts(summary, url), generation, now)
    return {
        "conditions": [
            condition.model_dump(mode="json", by_alias=True) for condition in conditions
        ],
        "observedGeneration": generation,
        # Or the next operator would take the unread spec for the one that the stages describe.
        "observedVersion": UNREAD,
        "phase": summary.phase,
        "finishedAt": None,
    }


def _with_unknown_fields(
    gates: Iterable[GateStatus], before: Iterable[GateStatus]
) -> Iterator[GateStatus]:
    """Yield the gates with the fields that another version of the operator has written about them."""

    def key(gate: GateStatus) -> tuple[str, str, str, str]:
        return gate.task, gate.metric, gate.operator, gate.against

    known = {key(gate): gate for gate in before}
    for gate in gates:
        yield gate.with_unknown_fields_of(known.get(key(gate)))


def _repeated_refusals(before: PipelineStatus, plan: Plan) -> tuple[Refusal, ...]:
    """Return the refusals of requests that are sent again now; the others are out of date."""
    subjects = {subject_of(action) for action in plan.actions}
    return tuple(refusal for refusal in before.refusals if refusal.subject in subjects)


def with_refusals(
    status: PipelineStatus, refused: Mapping[str, Blocker]
) -> PipelineStatus:
    """Return the status with the refusals of this reconcile in place of earlier refusals."""
    known = {(refusal.subject, refusal.reason): refusal for refusal in status.refusals}
    refusals = []
    for subject, blocker in sorted(refused.items()):
        # Some policies word each refusal anew, which would change the status for ever: the first message stays.
        refusal = known.get((subject, blocker.reason))
        if refusal is None:
            message = truncate_message(blocker.message)
            refusal = Refusal(subject=subject, reason=blocker.reason, message=message)
        refusals.append(refusal)
    return status.model_copy(update={"refusals": tuple(refusals)})


def _workspace_outdated(assessment: PipelineAssessment) -> bool | None:
    """Return whether the claim has to be deleted for an edit; None if not, so that most statuses lack the field."""
    return assessment.observation.workspace.outdated or None


def _workspace_warning(assessment: PipelineAssessment) -> Blocker | None:
    workspace = assessment.observation.workspace
    messages = []
    # Two changes of a field have one refusal.
    for field in dict.fromkeys(change.field for change in workspace.changes):
        refusal = assessment.refusals.get(field)
        if refusal:
            messages.append(f"{field}: {refusal.message}")
    if workspace.warning:
        messages.append(workspace.warning.message)
    if not messages:
        return None
    return Blocker(Reason.VOLUME_NOT_READY, "; ".join(messages))


def _handled_annotations(pipeline: Pipeline) -> HandledAnnotations:
    before = pipeline.status.observed_annotations
    # None is no request, so the token of the last request stays.
    retry = _handled(pipeline, RETRY_ANNOTATION, pipeline.retry)
    cancel = _handled(pipeline, CANCEL_ANNOTATION, pipeline.cancel)
    return HandledAnnotations(
        retry=before.retry if retry is None else retry,
        cancel=before.cancel if cancel is None else cancel,
        adopt=_handled_adoption(pipeline),
    ).with_unknown_fields_of(before)


def _handled_adoption(pipeline: Pipeline) -> str | None:
    """Return the adoption to remember as handled. An annotation with a mistake stays a request."""
    text = pipeline.adopt
    waits = text is not None and may_adopt(pipeline.status.stages)
    if text is None or (waits and adoption_error(pipeline.spec, text)):
        return pipeline.status.observed_annotations.adopt
    return text


def _handled(pipeline: Pipeline, annotation: str, token: str | None) -> str | None:
    """Return the token to remember as handled: of a request, or of a copied annotation, which requests nothing."""
    if pipeline.is_copied(annotation):
        return pipeline.annotations.get(annotation)
    return token


def summarize(
    pipeline: Pipeline, assessment: PipelineAssessment, plan: Plan
) -> PipelineSummary:
    """Return phase, reason and message of the pipeline.

    The order matters. A pipeline with a live Job is not Finished, even if that Job is being stopped. Failed and done
    come before suspended, because a finished pipeline cannot be suspended. A cancelled pipeline does not continue
    when resumed.
    """
    running = any(status.running_attempt for status in plan.stages.values())
    failed = assessment.failed_stage
    if failed and not running:
        status = assessment.stages[failed].status
        phase = "Cancelled" if status.reason is Reason.CANCELLED else "Failed"
        message = f"{failed}: {status.message}"
        return PipelineSummary(
            phase, "False", status.reason, message, stalled=True, finished=True
        )
    if assessment.done and not running:
        return _finish(assessment)
    name = current_stage(plan.stages)
    status = plan.stages[name]
    # A Job that cannot be stopped comes first.
    stopped = status.reason is not Reason.NODE_LOST
    if pipeline.spec.suspend and not assessment.cancelled and stopped:
        return PipelineSummary(
            "Suspended",
            "False",
            Reason.SUSPENDED,
            "suspended; it continues where it stopped when resumed",
            reconciling=running,
        )
    message = f"{name} is {status.state.lower()}"
    if status.message:
        message = f"{name}: {status.message}"
    # A Job alone is no running process: it may wait for an image, a node or a queue.
    phase = "Running" if status.state is StageState.RUNNING else "Pending"
    return PipelineSummary(phase, "False", status.reason, message, reconciling=True)


def _add_workspace_warning(
    summary: PipelineSummary, blocker: Blocker | None
) -> PipelineSummary:
    """Add the problem of the workspace to the message. It stops no stage, so phase and conditions stay."""
    if blocker is None:
        return summary
    message = truncate_message(f"{summary.message}; meanwhile {blocker.message}")
    reason = blocker.reason if summary.reason is Reason.PROGRESSING else summary.reason
    return replace(summary, reason=reason, message=message)


def _finish(assessment: PipelineAssessment) -> PipelineSummary:
    """Return how the pipeline ended. A server that is down comes first: only it has clients that wait."""
    for stage in assessment.stages.values():
        status = stage.status
        if status.reason is Reason.SERVER_NOT_READY and status.message:
            return PipelineSummary(
                "Degraded", "False", status.reason, status.message, finished=True
            )
    # Whether or not a stage depends on the gates: the user asked for them, too.
    failed = [gate.message for gate in assessment.gates if not gate.passed]
    closed = truncate_message("; ".join(failed))
    if closed:
        return PipelineSummary(
            "BelowThreshold",
            "False",
            Reason.BELOW_THRESHOLD,
            closed,
            stalled=True,
            finished=True,
        )
    return PipelineSummary(
        "Succeeded",
        "True",
        Reason.ALL_STAGES_SUCCEEDED,
        "all requested stages are done",
        finished=True,
    )


def current_stage(stages: Mapping[str, StageStatus]) -> str:
    """Return the stage to show: the first with a live Job, else failed, running or pending, else the last done."""
    # A stage that is no longer requested may still have a Job that is being stopped, so its state does not count.
    for name, status in stages.items():
        if status.running_attempt:
            return name
    for state in (StageState.FAILED, StageState.RUNNING, StageState.PENDING):
        for name, status in stages.items():
            if status.state is state:
                return name
    done = [
        name for name, status in stages.items() if status.state is StageState.SUCCEEDED
    ]
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
    pushed = None
    endpoint = None
    for stage in stages.values():
        match stage.result:
            case PushResult():
                pushed = stage.result
            case DeployResult(long_running=True):
                endpoint = stage.result.url
            case _:
                pass
    if pushed is None or not pushed.published:
        return None
    # Only a merged model can be served without its base model.
    model = pushed.first("Merged") or pushed.published[0]
    return ModelStatus(uri=model.uri, digest=model.digest, endpoint=endpoint)


def _server(assessment: PipelineAssessment) -> ServerStatus | None:
    for stage in assessment.stages.values():
        for job, server in stage.servers.items():
            if server.current and server.replicas is not None:
                return ServerStatus(replicas=server.pods, selector=f"{SERVER}={job}")
    return None


def _conditions(
    facts: Iterable[Fact], generation: int, now: datetime
) -> Iterator[Condition]:
    for kind, status, reason, message in facts:
        yield Condition(
            type=kind,
            status=status,
            reason=reason,
            message=message,
            observed_generation=generation,
            last_transition_time=now,
        )


def _summary_facts(summary: PipelineSummary, url: str) -> Iterator[Fact]:
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
