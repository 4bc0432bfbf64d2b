"""The state of every stage: pure, from the spec, the last status and the observation."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from finetune_operator.api.conditions import Reason
from finetune_operator.api.spec import STAGES
from finetune_operator.api.stages.base import ConfigContext, StageSpec
from finetune_operator.api.status import (
    GateStatus,
    PipelineCosts,
    StageState,
    StageStatus,
    truncate_message,
)
from finetune_operator.core.costs import pipeline_costs
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
from finetune_operator.core.workspace import WORKSPACE, create_blocker, start_blocker
from finetune_trainer.contract import StageConfig

DONE = frozenset({StageState.SUCCEEDED, StageState.SKIPPED})
MISSING_INPUT = frozenset({Reason.SOURCE_NOT_FOUND, Reason.DATA_INVALID})


@dataclass(frozen=True)
class StageAssessment:
    """The current state of one stage."""

    spec: StageSpec | None
    """None: the user did not request the stage."""
    config: StageConfig | None
    """The config of the stage's process, with its identity. None: not requested."""
    status: StageStatus
    servers: Mapping[str, ObservedServer]
    """Job -> the server that it started for this stage."""


@dataclass(frozen=True)
class PipelineAssessment:
    """The current state of all stages, in execution order."""

    stages: Mapping[str, StageAssessment]
    gates: tuple[GateStatus, ...]
    """Comparisons of the scores with the gates. Empty: no scores yet, or no gates."""
    cancelled: bool
    """Whether the user cancelled the pipeline and did not retry it since."""
    active_time: timedelta
    """Running time of all attempts so far."""
    observation: Observation
    """What the assessment is based on."""
    refusals: Mapping[str, Blocker]
    """Subject -> why the API server refused a request that may be planned again."""

    @property
    def done(self) -> bool:
        """Whether every stage has succeeded or is skipped."""
        return all(stage.status.state in DONE for stage in self.stages.values())

    @property
    def failed_stage(self) -> str | None:
        """Return the name of the first failed stage, or None."""
        return next(
            (
                name
                for name, stage in self.stages.items()
                if stage.status.state is StageState.FAILED
            ),
            None,
        )


def assess(pipeline: Pipeline, observation: Observation, now: datetime) -> PipelineAssessment:
    """Return the current state of every stage.

    Two passes are needed. The state of the first stage may depend on the running time of all stages, which is known
    only when every stage's history has been updated.
    """
    assessor = _Assessor(pipeline, observation, now)
    for kind in STAGES:
        assessor.update(kind)
    assessor.active_time = sum(
        (active_time(status, now) for status in assessor.statuses.values()), timedelta()
    )
    for kind in STAGES:
        assessor.assess_stage(kind)
    return PipelineAssessment(
        assessor.assessments,
        assessor.gates,
        assessor.cancelled,
        assessor.active_time,
        observation,
        assessor.refusals,
    )


def active_time(status: StageStatus, now: datetime) -> timedelta:
    """Return the running time of a stage's attempts with its current identity, including the running attempt."""
    ended = timedelta(seconds=status.active_seconds)
    last = status.last_attempt
    # A superseded attempt that is slow to stop has another identity and must not use up the new one's time.
    if last and last.started_at and last.finished_at is None and last.identity == status.identity:
        return ended + (now - last.started_at)
    return ended


def stages_to_verify(stages: Mapping[str, StageStatus]) -> frozenset[str]:
    """Return the stages whose output a later stage found missing or damaged. A retry runs them again first.

    This is cheap if the output exists: each stage looks for its own result before it starts to work.
    """
    found: set[str] = set()
    # Backwards, so that the inputs of a stage to verify are verified too.
    for kind in reversed(STAGES):
        status = stages.get(kind.name, StageStatus())
        if kind.name in found or (
            status.state is StageState.FAILED and status.reason in MISSING_INPUT
        ):
            found.update(kind.needs)
    return frozenset(found)


class _Assessor:
    """Assesses the stages in execution order, in two passes: `update` the history, then `assess_stage`."""

    def __init__(self, pipeline: Pipeline, observation: Observation, now: datetime) -> None:
        self.pipeline, self.observation, self.now = pipeline, observation, now
        self.cancelled = (
            pipeline.status.cancelled and pipeline.retry is None
        ) or pipeline.cancel is not None
        self.refusals = {
            one.subject: Blocker(one.reason, one.message) for one in pipeline.status.refusals
        }
        self.stages_to_verify = stages_to_verify(pipeline.status.stages)
        self.gates: tuple[GateStatus, ...] = ()
        self.active_time = timedelta()
        self.specs: dict[str, StageSpec] = {}
        self.configs: dict[str, StageConfig] = {}
        self.statuses: dict[str, StageStatus] = {}
        self.assessments: dict[str, StageAssessment] = {}

    def update(self, kind: type[StageSpec]) -> None:
        """Update the last status of a stage with the observation and the current spec.

        The order matters. An attempt that has just ended is recorded first, with the identity that it was started for.
        Then a retry request resets the budgets. Last, the identity is compared with the current spec. A result of an
        outdated identity is dropped here, so that it is never taken for the new one.
        """
        before = self.pipeline.status.stages.get(kind.name, StageStatus())
        status = record_attempts(before, self.observation.jobs, self.now)
        status = drop_lost_server(status, self.observation.servers)
        if self.pipeline.retry is not None:
            status = reset_budgets(status, repeat=kind.name in self.stages_to_verify)
        if spec := self.pipeline.spec.stage(kind.name):
            config = spec.config(self._config_context())
            identity = identity_of(spec, config, self.observation.source_digests)
            status = reset_if_changed(status, identity, execution_of(spec))
            self.specs[kind.name], self.configs[kind.name] = (
                spec,
                config.model_copy(update={"identity": identity}),
            )
            if status.result:
                self.gates = spec.compare_with_gates(status.result) or self.gates
        self.statuses[kind.name] = status

    def assess_stage(self, kind: type[StageSpec]) -> None:
        """Derive the state of a stage from the updated statuses of all stages."""
        spec, status = self.specs.get(kind.name), self.statuses[kind.name]
        assessed = self._assessed(spec, status) if spec else _with_state(status, *NOT_REQUESTED)
        servers = {
            job: server
            for job, server in self.observation.servers.items()
            if server.stage == kind.name
        }
        self.assessments[kind.name] = StageAssessment(
            spec, self.configs.get(kind.name), _with_server_warning(assessed, servers), servers
        )

    def _config_context(self) -> ConfigContext:
        spec = self.pipeline.spec
        return ConfigContext(
            pipeline=str(self.pipeline.key),
            seed=spec.seed,
            model=spec.model,
            datasets=spec.datasets,
            validation=spec.validation,
            specs=self.pipeline.spec.stages(),
            identities={name: config.identity for name, config in self.configs.items()},
            statuses=self.statuses,
            tracking=spec.tracking and spec.tracking.named(str(self.pipeline.key)),
            costs=self._costs,
        )

    def _costs(self) -> PipelineCosts | None:
        known = self.pipeline.status.costs
        return pipeline_costs(self.statuses, known.currency) if known else None

    def _assessed(self, spec: StageSpec, status: StageStatus) -> StageStatus:
        # The first check that matches decides. Facts about the past come before conditions of a start.
        checks = (
            self._succeeded,  # a stage with a result stays done, even if the pipeline is suspended or cancelled
            self._running,  # a stage with a live Job is running, even if its next attempt would not be allowed
            self._failed,  # before _skipped: a failure is not hidden by a gate that failed
            self._skipped,
            self._dependency_not_ready,  # before _blocked: only the stage whose turn it is reports cancel or deadline
            self._blocked,
        )
        for check in checks:
            if found := check(spec, status):
                return _with_state(status, *found)
        retrying = status.last_attempt is not None and status.counts(status.last_attempt)
        return _with_state(
            status, StageState.PENDING, Reason.RETRYING if retrying else Reason.PROGRESSING, ""
        )

    def _succeeded(self, spec: StageSpec, status: StageStatus) -> "Finding | None":
        if status.result is None:
            return None
        gates = spec.compare_with_gates(status.result)
        if unmeasured := [gate.message for gate in gates if not gate.measured]:
            return StageState.FAILED, Reason.SPEC_INVALID, truncate_message("; ".join(unmeasured))
        server = self.observation.servers.get(server_job(status) or "")
        if server and not server.current:
            # Not done yet: the server has answered, but clients reach it only when the traffic is switched.
            blocker = self.refusals.get(server_job(status) or "")
            message = (
                blocker.message
                if blocker
                else "the server has answered, and its traffic is being switched on"
            )
            return StageState.RUNNING, blocker.reason if blocker else Reason.PROGRESSING, message
        if server and server.problem:
            return StageState.SUCCEEDED, server.problem.reason, server.problem.message
        return (
            StageState.SUCCEEDED,
            Reason.STAGE_SUCCEEDED,
            truncate_message("; ".join(gate.message for gate in gates)),
        )

    def _running(self, spec: StageSpec, status: StageStatus) -> "Finding | None":
        attempt = status.last_attempt
        if attempt is None or attempt.finished_at:
            return None
        job = self.observation.jobs.get(attempt.job)
        refusal = self.refusals.get(attempt.job)
        if attempt.stopping:
            # The latest of two stops: a pipeline that is cancelled while it is being suspended does not continue.
            reason = Reason.CANCELLED if self.cancelled else attempt.stopping
            return (
                StageState.RUNNING,
                reason,
                f"stopping: {refusal.message}" if refusal else "stopping",
            )
        state = (
            StageState.RUNNING if job and job.state is not JobState.WAITING else StageState.QUEUED
        )
        blocker = job.blocker if job else refusal or self._create_blocker(spec)
        if blocker:
            return state, blocker.reason, blocker.message
        return state, Reason.PROGRESSING, status.placement.message if status.placement else ""

    def _failed(self, spec: StageSpec, status: StageStatus) -> "Finding | None":
        last = status.last_attempt
        if last and status.counts(last) and last.reason in NON_RETRYABLE:
            return StageState.FAILED, last.reason, last.message
        cause = f": {last.message}" if last and last.message else ""
        if (times := status.failures_counted) > spec.max_failures:
            return StageState.FAILED, Reason.RETRIES_EXHAUSTED, f"failed {times} times{cause}"
        if (times := status.interruptions_counted) > spec.max_interruptions:
            return StageState.FAILED, Reason.RETRIES_EXHAUSTED, f"interrupted {times} times{cause}"
        if spec.max_runtime_seconds and status.active_seconds >= spec.max_runtime_seconds:
            limit = f"{spec.name}.maxRuntimeSeconds is {spec.max_runtime_seconds}"
            fix = "raise it, or retry, which counts from zero"
            return (
                StageState.FAILED,
                Reason.DEADLINE_EXCEEDED,
                f"ran for {status.active_seconds:.0f} s; {limit}: {fix}",
            )
        return None

    def _skipped(self, spec: StageSpec, _status: StageStatus) -> "Finding | None":
        own = spec.skip_reason(self.gates)
        dependencies = (self.assessments[name].status for name in spec.needs)
        inherited = next(
            (s.message for s in dependencies if s.reason is Reason.BELOW_THRESHOLD), None
        )
        message = own or inherited
        return (StageState.SKIPPED, Reason.BELOW_THRESHOLD, message) if message else None

    def _dependency_not_ready(self, spec: StageSpec, _status: StageStatus) -> "Finding | None":
        missing = [name for name in spec.needs if self.assessments[name].status.state not in DONE]
        return (
            (StageState.PENDING, Reason.DEPENDENCY_NOT_READY, f"waits for {missing[0]}")
            if missing
            else None
        )

    def _create_blocker(self, spec: StageSpec) -> Blocker | None:
        if spec.runs_server or self.observation.defaults_blocker:
            return self.observation.defaults_blocker
        return create_blocker(self.observation.workspace) or self.refusals.get(WORKSPACE)

    def _blocked(self, spec: StageSpec, _status: StageStatus) -> "Finding | None":
        if self.cancelled:
            return StageState.FAILED, Reason.CANCELLED, "cancelled"
        limit = self.pipeline.spec.max_runtime_seconds
        if limit and self.active_time >= timedelta(seconds=limit):
            return (
                StageState.FAILED,
                Reason.DEADLINE_EXCEEDED,
                "all stages together ran longer than maxRuntimeSeconds",
            )
        if self.pipeline.spec.suspend:
            return StageState.PENDING, Reason.SUSPENDED, "suspended"
        blocker = self.observation.defaults_blocker
        blocker = blocker or (self._server_blocker() if spec.runs_server else self._job_blocker())
        return (StageState.PENDING, blocker.reason, blocker.message) if blocker else None

    def _server_blocker(self) -> Blocker | None:
        return self.observation.service_blocker

    def _job_blocker(self) -> Blocker | None:
        """Return why no Job may start: the claim is not usable, or a Job that should have ended still runs."""
        if blocker := start_blocker(self.observation.workspace):
            return blocker
        if name := next(self._own_writers(), None):
            return Blocker(
                Reason.WORKSPACE_IN_USE,
                f"waits until the Job {name} of this pipeline and its pod have ended",
            )
        return None

    def _own_writers(self) -> Iterator[str]:
        """Yield the pipeline's Jobs that may write to the claim: recorded as running, or observed."""
        found = ((kind, self.statuses[kind.name].running_attempt) for kind in STAGES)
        running = {attempt.job: kind for kind, attempt in found if attempt}
        yield from (job for job, kind in running.items() if not kind.runs_server)
        yield from (
            job
            for job, observed in self.observation.jobs.items()
            if observed.live and job not in running
        )


def _with_server_warning(status: StageStatus, servers: Mapping[str, ObservedServer]) -> StageStatus:
    """Add to the message of an unfinished stage that the server of its earlier result is down."""
    problems = (
        server.problem.message for server in servers.values() if server.current and server.problem
    )
    problem = next(problems, None) if status.state is not StageState.SUCCEEDED else None
    message = "; ".join(part for part in (status.message, f"meanwhile {problem}") if part)
    return status.model_copy(update={"message": truncate_message(message)}) if problem else status


Finding = tuple[StageState, Reason, str]
"""State, reason and message."""

NOT_REQUESTED: Finding = (StageState.SKIPPED, Reason.NOT_REQUESTED, "not requested")


def _with_state(
    status: StageStatus, state: StageState, reason: Reason, message: str
) -> StageStatus:
    return status.model_copy(
        update={"state": state, "reason": reason, "message": truncate_message(message)}
    )
