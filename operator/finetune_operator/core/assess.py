"""What every stage is: pure, from the spec, what was said before and what is seen now."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from finetune_operator.api.conditions import Reason
from finetune_operator.api.spec import STAGES
from finetune_operator.api.stages.base import ConfigContext, StageSpec
from finetune_operator.api.status import GateStatus, StageState, StageStatus, truncate_message
from finetune_operator.core.endings import NON_RETRYABLE
from finetune_operator.core.history import (
    drop_lost_server,
    record_attempts,
    reset_budgets,
    reset_if_changed,
    server_job,
)
from finetune_operator.core.identity import execution_of, identity_of
from finetune_operator.core.observation import Blocker, JobState, Observation, ObservedServer
from finetune_operator.core.pipeline import Pipeline
from finetune_trainer.contract import StageConfig

DONE = frozenset({StageState.SUCCEEDED, StageState.SKIPPED})
MISSING_INPUT = frozenset({Reason.SOURCE_NOT_FOUND, Reason.DATA_INVALID})


@dataclass(frozen=True)
class StageAssessment:
    """One stage as it is now."""

    spec: StageSpec | None
    """None: not asked for."""
    config: StageConfig | None
    status: StageStatus
    servers: Mapping[str, ObservedServer]
    """Job -> the server of this stage that it started."""


@dataclass(frozen=True)
class PipelineAssessment:
    """All stages as they are now, in their order."""

    stages: Mapping[str, StageAssessment]
    gate: GateStatus | None
    cancelled: bool
    active_time: timedelta
    """How long all attempts have run so far."""
    workspace_blocker: Blocker | None = None
    """Why the workspace is not what is asked for."""

    @property
    def done(self) -> bool:
        """Whether every stage has succeeded or was skipped."""
        return all(view.status.state in DONE for view in self.stages.values())

    @property
    def failed_stage(self) -> str | None:
        """The stage that failed, if one did."""
        return next((name for name, view in self.stages.items() if view.status.state is StageState.FAILED), None)


def assess(pipeline: Pipeline, observation: Observation, now: datetime) -> PipelineAssessment:
    """Say what every stage is."""
    assessor = _Assessor(pipeline, observation, now)
    for kind in STAGES:
        assessor.update(kind)
    assessor.active_time = sum((active_time(status, now) for status in assessor.statuses.values()), timedelta())
    for kind in STAGES:
        assessor.assess_stage(kind)
    return PipelineAssessment(
        assessor.views, assessor.gate, assessor.cancelled, assessor.active_time, observation.workspace_blocker
    )


def active_time(status: StageStatus, now: datetime) -> timedelta:
    """Give how long a stage's attempts have run, the one that is running included."""
    ended = timedelta(seconds=status.active_seconds)
    last = status.last_attempt
    if last and last.started_at and last.finished_at is None and last.identity == status.identity:
        return ended + (now - last.started_at)
    return ended


def stages_to_verify(stages: Mapping[str, StageStatus]) -> frozenset[str]:
    """Name the stages whose work a later one did not find or found damaged: a retry begins with them.

    Each looks for its own work first, so one whose work is still there is quick.
    """
    found: set[str] = set()
    for kind in reversed(STAGES):
        told = stages.get(kind.name, StageStatus())
        if kind.name in found or (told.state is StageState.FAILED and told.reason in MISSING_INPUT):
            found.update(kind.needs)
    return frozenset(found)


class _Assessor:
    """Goes through the stages in their order, twice: what each is to make and has made, then what that means."""

    def __init__(self, pipeline: Pipeline, observation: Observation, now: datetime) -> None:
        self.pipeline, self.observation, self.now = pipeline, observation, now
        self.cancelled = (pipeline.status.cancelled and pipeline.retry is None) or pipeline.cancel is not None
        self.stages_to_verify = stages_to_verify(pipeline.status.stages)
        self.gate: GateStatus | None = None
        self.active_time = timedelta()
        self.specs: dict[str, StageSpec] = {}
        self.configs: dict[str, StageConfig] = {}
        self.statuses: dict[str, StageStatus] = {}
        self.views: dict[str, StageAssessment] = {}

    def update(self, kind: type[StageSpec]) -> None:
        """Bring what was told of a stage up to date with what is seen and asked now."""
        before = self.pipeline.status.stages.get(kind.name, StageStatus())
        status = record_attempts(before, self.observation.jobs, self.now)
        status = drop_lost_server(status, self.observation.servers)
        if self.pipeline.retry is not None:
            status = reset_budgets(status, repeat=kind.name in self.stages_to_verify)
        if spec := self.pipeline.spec.stage(kind.name):
            config = spec.config(self._config_context())
            identity = identity_of(spec, config, self.observation.source_digests)
            status = reset_if_changed(status, identity, execution_of(spec))
            self.specs[kind.name], self.configs[kind.name] = spec, config.model_copy(update={"identity": identity})
            if status.result:
                self.gate = spec.evaluate_gate(status.result) or self.gate
        self.statuses[kind.name] = status

    def assess_stage(self, kind: type[StageSpec]) -> None:
        """Say what a stage is, now that all of them have been followed."""
        spec, status = self.specs.get(kind.name), self.statuses[kind.name]
        judged = self._assessed(spec, status) if spec else _with_state(status, *NOT_ASKED_FOR)
        servers = {job: server for job, server in self.observation.servers.items() if server.stage == kind.name}
        self.views[kind.name] = StageAssessment(
            spec, self.configs.get(kind.name), _with_server_warning(judged, servers), servers
        )

    def _config_context(self) -> ConfigContext:
        spec = self.pipeline.spec
        return ConfigContext(
            pipeline=str(self.pipeline.key),
            seed=spec.seed,
            model=spec.model,
            dataset=spec.dataset,
            specs=self.pipeline.spec.stages(),
            identities={name: config.identity for name, config in self.configs.items()},
            statuses=self.statuses,
        )

    def _assessed(self, spec: StageSpec, status: StageStatus) -> StageStatus:
        checks = (
            self._succeeded,  # what is done stays done, whatever else is true
            self._running,
            self._failed,
            self._skipped,
            self._waits_for_others,
            self._blocked,
        )
        for check in checks:
            if found := check(spec, status):
                return _with_state(status, *found)
        again = status.last_attempt is not None and status.last_attempt.number > status.budget_base_attempt
        return _with_state(status, StageState.PENDING, Reason.RETRYING if again else Reason.PROGRESSING, "")

    def _succeeded(self, spec: StageSpec, status: StageStatus) -> "Finding | None":
        if status.result is None:
            return None
        verdict = spec.evaluate_gate(status.result)
        if verdict and not verdict.measured:
            return StageState.FAILED, Reason.SPEC_INVALID, verdict.message
        server = self.observation.servers.get(server_job(status) or "")
        if server and not server.current:
            held = self.observation.blocked.get(server_job(status) or "")
            words = held.message if held else "it has answered, and requests are about to be sent to it"
            return StageState.RUNNING, held.reason if held else Reason.PROGRESSING, words
        if server and server.problem:
            return StageState.SUCCEEDED, server.problem.reason, server.problem.message
        return StageState.SUCCEEDED, Reason.STAGE_SUCCEEDED, verdict.message if verdict else ""

    def _running(self, _spec: StageSpec, status: StageStatus) -> "Finding | None":
        attempt = status.last_attempt
        if attempt is None or attempt.finished_at:
            return None
        job = self.observation.jobs.get(attempt.job)
        if attempt.stopping:
            return StageState.RUNNING, attempt.stopping, "stopping"
        state = StageState.RUNNING if job and job.state is not JobState.WAITING else StageState.QUEUED
        waiting = job.blocker if job else self.observation.blocked.get(attempt.job)
        return (state, waiting.reason, waiting.message) if waiting else (state, Reason.PROGRESSING, "")

    def _failed(self, spec: StageSpec, status: StageStatus) -> "Finding | None":
        last = status.last_attempt
        if last and last.number > status.budget_base_attempt and last.reason in NON_RETRYABLE:
            return StageState.FAILED, last.reason, last.message
        said = f": {last.message}" if last and last.message else ""
        if (times := status.failures_counted) > spec.retries.failures:
            return StageState.FAILED, Reason.RETRIES_EXHAUSTED, f"failed {times} times{said}"
        if (times := status.interruptions_counted) > spec.retries.interruptions:
            return StageState.FAILED, Reason.RETRIES_EXHAUSTED, f"interrupted {times} times{said}"
        if spec.timeout_seconds and status.active_seconds >= spec.timeout_seconds:
            return StageState.FAILED, Reason.DEADLINE_EXCEEDED, f"ran longer than {spec.name}.timeoutSeconds"
        return None

    def _skipped(self, spec: StageSpec, _status: StageStatus) -> "Finding | None":
        closed = spec.skip_reason(self.gate)
        before = (self.views[name].status for name in spec.needs)
        behind = next((s.message for s in before if s.reason is Reason.BELOW_THRESHOLD), None)
        why = closed or behind
        return (StageState.SKIPPED, Reason.BELOW_THRESHOLD, why) if why else None

    def _waits_for_others(self, spec: StageSpec, _status: StageStatus) -> "Finding | None":
        waiting = [name for name in spec.needs if self.views[name].status.state not in DONE]
        return (StageState.PENDING, Reason.DEPENDENCY_NOT_READY, f"waits for {waiting[0]}") if waiting else None

    def _blocked(self, _spec: StageSpec, _status: StageStatus) -> "Finding | None":
        if self.cancelled:
            return StageState.FAILED, Reason.CANCELLED, "cancelled"
        limit = self.pipeline.spec.active_deadline_seconds
        if limit and self.active_time >= timedelta(seconds=limit):
            return (
                StageState.FAILED,
                Reason.DEADLINE_EXCEEDED,
                "all stages together ran longer than activeDeadlineSeconds",
            )
        if self.pipeline.spec.suspend:
            return StageState.PENDING, Reason.SUSPENDED, "suspended"
        return None


def _with_server_warning(judged: StageStatus, servers: Mapping[str, ObservedServer]) -> StageStatus:
    """Say of a stage that is not done that the server of its earlier result is down."""
    troubles = (server.problem.message for server in servers.values() if server.current and server.problem)
    trouble = next(troubles, None) if judged.state is not StageState.SUCCEEDED else None
    said = "; ".join(words for words in (judged.message, f"meanwhile {trouble}") if words)
    return judged.model_copy(update={"message": truncate_message(said)}) if trouble else judged


Finding = tuple[StageState, Reason, str]

NOT_ASKED_FOR: Finding = (StageState.SKIPPED, Reason.NOT_REQUESTED, "not asked for")


def _with_state(status: StageStatus, state: StageState, reason: Reason, words: str) -> StageStatus:
    return status.model_copy(update={"state": state, "reason": reason, "message": truncate_message(words)})
