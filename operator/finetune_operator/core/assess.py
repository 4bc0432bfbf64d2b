"""The state of every stage: pure, from the spec, the last status and the observation."""

from collections.abc import Iterator
from datetime import datetime, timedelta

from finetune_operator.api.conditions import Reason
from finetune_operator.api.costs import PipelineCosts
from finetune_operator.api.spec import STAGES
from finetune_operator.api.stages.base import ConfigContext, StageSpec
from finetune_operator.api.status import GateStatus, StageState, StageStatus
from finetune_operator.core.adoption import (
    adopt_stage,
    go_on_with,
    is_outdated,
)
from finetune_operator.core.assessment import (
    DONE,
    PipelineAssessment,
    StageAssessment,
    describe_stop,
    stages_to_verify,
    with_server_warning,
    with_state,
)
from finetune_operator.core.attempts.costs import pipeline_costs
from finetune_operator.core.attempts.endings import describe_end, is_final
from finetune_operator.core.attempts.history import (
    active_time,
    begin_anew,
    drop_lost_server,
    record_attempts,
    reset_budgets,
    reset_if_changed,
    server_job,
)
from finetune_operator.core.attempts.pending import refusal_of
from finetune_operator.core.attempts.suspect_nodes import avoidance_note
from finetune_operator.core.identity import hashes_of
from finetune_operator.core.observation import (
    Blocker,
    JobState,
    Observation,
)
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.core.published import (
    adopted_result,
    adoption_error,
    is_adopted,
    may_adopt,
)
from finetune_operator.core.workspace import (
    WORKSPACE,
    WRITING_STAGES,
    create_blocker,
    lost_results,
    start_blocker,
)
from finetune_trainer.contract import StageConfig

Finding = tuple[StageState, Reason, str]
"""State, reason and message of a stage."""
ADOPTED = "the pipeline has adopted a published model"
NOT_REQUESTED: Finding = (StageState.SKIPPED, Reason.NOT_REQUESTED, "not requested")


def assess(
    pipeline: Pipeline, observation: Observation, now: datetime
) -> PipelineAssessment:
    """Return the current state of every stage.

    Two passes are needed. The state of the first stage may depend on the running time of all stages, which is known
    only when every stage's history has been updated.
    """
    assessor = _Assessor(pipeline, observation, now)
    for kind in STAGES:
        assessor.update(kind)
    assessor.drop_lost_results()
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


class _Assessor:
    """Assesses the stages in execution order, in two passes: `update` the history, then `assess_stage`."""

    def __init__(
        self, pipeline: Pipeline, observation: Observation, now: datetime
    ) -> None:
        self.pipeline = pipeline
        self.observation = observation
        self.now = now
        # A retry takes back an earlier request to cancel, but not one that comes with it.
        still_cancelled = pipeline.status.cancelled and pipeline.retry is None
        self.cancelled = still_cancelled or pipeline.cancel is not None
        self.refusals = {
            refusal.subject: Blocker(refusal.reason, refusal.message)
            for refusal in pipeline.status.refusals
        }
        stages = pipeline.status.stages
        # No stage of this pipeline has made an adopted model.
        self.stages_to_verify = (
            frozenset() if is_adopted(stages) else stages_to_verify(stages)
        )
        self.adopts = pipeline.adopt is not None and may_adopt(stages)
        self.adoption_error = (
            adoption_error(pipeline.spec, pipeline.adopt or "") if self.adopts else None
        )
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
        refusal = refusal_of(
            self.refusals, before.running_attempt, runs_server=kind.runs_server
        )
        status = record_attempts(before, self.observation.jobs, self.now, refusal)
        status = drop_lost_server(status, self.observation.servers)
        if self.pipeline.retry is not None:
            status = reset_budgets(status, repeat=kind.name in self.stages_to_verify)
        spec = self.pipeline.spec.stage(kind.name)
        if spec:
            status = self._compare(spec, status)
            self.specs[kind.name] = spec
            if spec.publishes and self.adopts and not self.adoption_error:
                text = self.pipeline.adopt or ""
                result = adopted_result(spec, text, status.identity)
                status = status.model_copy(update={"result": result})
            if status.result:
                self.gates = spec.compare_with_gates(status.result) or self.gates
        self.statuses[kind.name] = status

    def _compare(self, spec: StageSpec, status: StageStatus) -> StageStatus:
        """Compare a stage with the present spec. Return its status, anew if it has another result to make."""
        config = spec.config(self._config_context())
        digests = self.observation.source_digests
        inputs, execution = hashes_of(spec, config, digests)
        if status.identity:
            status = adopt_stage(self.pipeline, status, spec, config, digests)
        status = reset_if_changed(status, inputs, execution)
        goes_on = self.pipeline.retry is None and self.observation.keeps_images
        if is_outdated(status, goes_on=goes_on):
            status = begin_anew(status, inputs, execution)
        if status.begun:
            config = go_on_with(status.begun, config)
        identity = {"identity": status.identity}
        self.configs[spec.name] = config.model_copy(update=identity)
        return status

    def drop_lost_results(self) -> None:
        """Drop the results on a claim that is gone, so that their stages run again."""
        workspace = self.observation.workspace
        if not (workspace.gone or workspace.deleting) or self.cancelled:
            return
        # An adopted model needs no file of the claim.
        if is_adopted(self.statuses):
            return
        failed = {
            name
            for name, spec in self.specs.items()
            if self._failed(spec, self.statuses[name])
        }
        lost = lost_results(self.pipeline, workspace, self.statuses, self.gates, failed)
        for name in lost:
            self.statuses[name] = reset_budgets(self.statuses[name], repeat=True)
        if lost:
            self.gates = ()

    def assess_stage(self, kind: type[StageSpec]) -> None:
        """Derive the state of a stage from the updated statuses of all stages."""
        spec = self.specs.get(kind.name)
        status = self.statuses[kind.name]
        finding = self._finding(spec, status) if spec else NOT_REQUESTED
        servers = {
            job: server
            for job, server in self.observation.servers.items()
            if server.stage == kind.name
        }
        assessed = with_server_warning(with_state(status, *finding), servers)
        config = self.configs.get(kind.name)
        self.assessments[kind.name] = StageAssessment(spec, config, assessed, servers)

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

    def _finding(self, spec: StageSpec, status: StageStatus) -> Finding:
        # The first check that matches decides. Facts about the past come before conditions of a start.
        checks = (
            # A stage with a result stays done, even if the pipeline is suspended or cancelled.
            self._succeeded,
            # A stage with a live Job is running, even if its next attempt would not be allowed.
            self._running,
            # Before _skipped: a failure is not hidden by a gate that failed.
            self._failed,
            self._skipped,
            # Before _blocked: only the stage whose turn it is reports cancel or deadline.
            self._dependency_not_ready,
            self._blocked,
        )
        for check in checks:
            finding = check(spec, status)
            if finding:
                return finding
        last = status.last_attempt
        if last is None or not status.counts(last):
            return StageState.PENDING, Reason.PROGRESSING, ""
        return StageState.PENDING, Reason.RETRYING, describe_end(last)

    def _succeeded(self, spec: StageSpec, status: StageStatus) -> Finding | None:
        if status.result is None:
            return None
        gates = spec.compare_with_gates(status.result)
        unmeasured = [gate.message for gate in gates if not gate.measured]
        if unmeasured:
            return StageState.FAILED, Reason.SPEC_INVALID, "; ".join(unmeasured)
        job = server_job(status) or ""
        server = self.observation.servers.get(job)
        if server and not server.current:
            # Not done yet: the server has answered, but clients reach it only when the traffic is switched.
            blocker = self.refusals.get(job)
            if blocker:
                return StageState.RUNNING, blocker.reason, blocker.message
            message = "the server has answered, and its traffic is being switched on"
            return StageState.RUNNING, Reason.PROGRESSING, message
        problem = (server and server.problem) or self.refusals.get(job)
        if problem:
            return StageState.SUCCEEDED, problem.reason, problem.message
        message = "; ".join(gate.message for gate in gates)
        return StageState.SUCCEEDED, Reason.STAGE_SUCCEEDED, message

    def _running(self, spec: StageSpec, status: StageStatus) -> Finding | None:
        attempt = status.last_attempt
        if attempt is None or attempt.finished_at:
            return None
        job = self.observation.jobs.get(attempt.job)
        refusal = self.refusals.get(attempt.job)
        queued = job is None or job.state is JobState.WAITING
        state = StageState.QUEUED if queued else StageState.RUNNING
        if attempt.stopping:
            # The latest of two stops: a pipeline that is cancelled while it is being suspended does not continue.
            reason = Reason.CANCELLED if self.cancelled else attempt.stopping
            stop = describe_stop(reason, job, refusal)
            return state, stop.reason, stop.message
        blocker = job.blocker if job else refusal or self._create_blocker(spec)
        if blocker:
            message = blocker.message
            if blocker.reason is Reason.WAITING_FOR_CAPACITY:
                parts = (message, avoidance_note(status))
                message = "; ".join(part for part in parts if part)
            return state, blocker.reason, message
        return (
            state,
            Reason.PROGRESSING,
            status.placement.message if status.placement else "",
        )

    def _failed(self, spec: StageSpec, status: StageStatus) -> Finding | None:
        last = status.last_attempt
        by_machine = last and last.job in self.observation.machine_failures
        if last and status.counts(last) and (by_machine or is_final(last)):
            return StageState.FAILED, last.reason, last.message
        cause = f": {last.message}" if last and last.message else ""
        failures = status.failures_counted
        if failures > spec.max_failures:
            message = f"failed {failures} times{cause}"
            return StageState.FAILED, Reason.RETRIES_EXHAUSTED, message
        interruptions = status.interruptions_counted
        if interruptions > spec.max_interruptions:
            message = f"interrupted {interruptions} times{cause}"
            return StageState.FAILED, Reason.RETRIES_EXHAUSTED, message
        if (
            spec.max_runtime_seconds
            and status.active_seconds >= spec.max_runtime_seconds
        ):
            limit = f"{spec.name}.maxRuntimeSeconds is {spec.max_runtime_seconds}"
            fix = "raise it, or retry, which counts from zero"
            message = f"ran for {status.active_seconds:.0f} s; {limit}: {fix}"
            return StageState.FAILED, Reason.DEADLINE_EXCEEDED, message
        return None

    def _skipped(self, spec: StageSpec, _status: StageStatus) -> Finding | None:
        if spec.name in WRITING_STAGES and is_adopted(self.statuses):
            return StageState.SKIPPED, Reason.NOT_REQUESTED, ADOPTED
        dependencies = [self.assessments[name].status for name in spec.needs]
        messages = [
            spec.skip_reason(self.gates),
            *(
                need.message
                for need in dependencies
                if need.reason is Reason.BELOW_THRESHOLD
            ),
        ]
        for message in messages:
            if message:
                return StageState.SKIPPED, Reason.BELOW_THRESHOLD, message
        return None

    def _dependency_not_ready(
        self, spec: StageSpec, _status: StageStatus
    ) -> Finding | None:
        for name in spec.needs:
            if self.assessments[name].status.state not in DONE:
                return (
                    StageState.PENDING,
                    Reason.DEPENDENCY_NOT_READY,
                    f"waits for {name}",
                )
        return None

    def _create_blocker(self, spec: StageSpec) -> Blocker | None:
        if spec.runs_server or self.observation.defaults_blocker:
            return self.observation.defaults_blocker
        return create_blocker(self.observation.workspace) or self.refusals.get(
            WORKSPACE
        )

    def _blocked(self, spec: StageSpec, _status: StageStatus) -> Finding | None:
        if self.cancelled:
            return StageState.FAILED, Reason.CANCELLED, "cancelled"
        if self.adoption_error:
            return StageState.PENDING, Reason.SPEC_INVALID, self.adoption_error
        limit = self.pipeline.spec.max_runtime_seconds
        if limit and self.active_time >= timedelta(seconds=limit):
            message = "all stages together ran longer than maxRuntimeSeconds"
            return StageState.FAILED, Reason.DEADLINE_EXCEEDED, message
        if self.pipeline.spec.suspend:
            return StageState.PENDING, Reason.SUSPENDED, "suspended"
        blocker = self._start_blocker(spec)
        return (
            (StageState.PENDING, blocker.reason, blocker.message) if blocker else None
        )

    def _start_blocker(self, spec: StageSpec) -> Blocker | None:
        """Return why no attempt may start: the defaults or the claim cannot be used, or an earlier Job still runs."""
        # An attempt without the namespace's defaults might run on nodes where it must not.
        if self.observation.defaults_blocker:
            return self.observation.defaults_blocker
        if spec.runs_server:
            return self.observation.service_blocker
        blocker = start_blocker(self.observation.workspace)
        if blocker:
            return blocker
        for name in self._own_writers():
            message = (
                f"waits until the Job {name} of this pipeline and its pod have ended"
            )
            return Blocker(Reason.WORKSPACE_IN_USE, message)
        return None

    def _own_writers(self) -> Iterator[str]:
        """Yield the pipeline's Jobs that may write to the claim: recorded as running, or observed."""
        running = set()
        for kind in STAGES:
            attempt = self.statuses[kind.name].running_attempt
            if attempt is None:
                continue
            running.add(attempt.job)
            # A server reads the published model, not the claim.
            if not kind.runs_server:
                yield attempt.job
        for name, job in self.observation.jobs.items():
            if job.live and name not in running:
                yield name
