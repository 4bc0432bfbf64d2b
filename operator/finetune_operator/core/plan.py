"""What to do next: pure, from what every stage is."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from finetune_operator.api.conditions import Reason
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import AttemptStatus, Outcome, StageState, StageStatus
from finetune_operator.core.assess import PipelineAssessment, StageAssessment, active_time
from finetune_operator.core.history import mark_stopping, next_attempt_number, server_job, start_attempt
from finetune_operator.core.job_template import JobTemplate, job_template
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.core.settings import Settings


@dataclass(frozen=True)
class CreateJob:
    """Make the Job; where one of this name is there already, that is the one."""

    job: JobTemplate


@dataclass(frozen=True)
class StopJob:
    """Stop the Job as an eviction would; where it is stopping or gone already, nothing is left to do."""

    name: str
    reason: Reason


@dataclass(frozen=True)
class DeletePipeline:
    """Delete the pipeline: it has been finished for as long as it asked to be kept."""


@dataclass(frozen=True)
class SwitchTraffic:
    """Send the stage's requests to the server that this attempt started, and to no other."""

    stage: str
    job: str


Action = CreateJob | StopJob | SwitchTraffic | DeletePipeline


@dataclass(frozen=True)
class Plan:
    """What is to be done, and what is to be written down before it is."""

    stages: dict[str, StageStatus]
    """Every stage, with the attempts that are about to begin or to be stopped."""
    actions: tuple[Action, ...]
    requeue_after: timedelta | None
    """Look again after this time at the latest; None: only when something changes."""


def plan_next(pipeline: Pipeline, assessment: PipelineAssessment, settings: Settings, now: datetime) -> Plan:
    """Decide for every stage at once; stages that need each other are ordered by what `assess` found."""
    planner = _Planner(pipeline, assessment, settings, now)
    decided = {name: planner.next_for(stage) for name, stage in assessment.stages.items()}
    actions = tuple(action for _, doing in decided.values() for action in doing)
    stages = {name: status for name, (status, _) in decided.items()}
    looks = sorted(
        look for name, stage in assessment.stages.items() for look in planner.requeue_times(stage, stages[name])
    )
    if not actions and (left := planner.ttl_remaining()) is not None:
        looks, actions = ([left], ()) if left > timedelta() else ([], (DeletePipeline(),))
    return Plan(
        stages=stages,
        actions=actions,
        requeue_after=max(looks[0], timedelta()) if looks else None,
    )


def _last_answering_server(stage: StageAssessment) -> str | None:
    done = (one.job for one in reversed(stage.status.attempts) if one.outcome is Outcome.SUCCEEDED)
    return next((job for job in done if job in stage.servers), None)


@dataclass(frozen=True)
class _Planner:
    pipeline: Pipeline
    assessment: PipelineAssessment
    settings: Settings
    now: datetime

    def next_for(self, stage: StageAssessment) -> tuple[StageStatus, tuple[Action, ...]]:
        """Give what is to be written down of a stage, and what is to be done then."""
        attempt = stage.status.last_attempt
        settling = tuple(self._server_actions(stage))
        if attempt and attempt.outcome is Outcome.RUNNING:
            status, doing = self._running_actions(stage, attempt)
            return status, (*doing, *settling)
        if stage.spec and stage.config and self._may_start(stage):
            job = job_template(
                self.pipeline, stage.spec, stage.config, next_attempt_number(stage.status), self.settings
            )
            return start_attempt(stage.status, job.name), (CreateJob(job), *settling)
        return stage.status, settling

    def _server_actions(self, stage: StageAssessment) -> Iterator[Action]:
        """Send requests to the server that answered last; only when that is seen do the others go.

        While no new one has answered, because it starts, failed or is not to be deployed, the old one stays.
        """
        last, wanted = stage.status.last_attempt, server_job(stage.status)
        if not any(server.current for server in stage.servers.values()):
            wanted = wanted or _last_answering_server(stage)  # somebody has taken the Service away
        answered = stage.servers.get(wanted) if wanted else None
        if stage.spec and wanted and answered and not answered.current:
            yield SwitchTraffic(stage.spec.name, wanted)
            return
        running = last.job if last and last.outcome is Outcome.RUNNING else None
        for job, server in stage.servers.items():
            if job != running and not (stage.spec and server.current):
                yield StopJob(job, Reason.SPEC_CHANGED)

    def _running_actions(
        self, stage: StageAssessment, attempt: AttemptStatus
    ) -> tuple[StageStatus, tuple[Action, ...]]:
        """Leave it alone, or stop it. Both actions are repeated until they are seen to have worked."""
        if why := attempt.stopping or self._reason_to_stop(stage, attempt):
            return mark_stopping(stage.status, why), (StopJob(attempt.job, why),)
        if attempt.created_at is None and stage.spec and stage.config:
            job = job_template(self.pipeline, stage.spec, stage.config, attempt.number, self.settings)
            return stage.status, (CreateJob(job),)
        return stage.status, ()

    def _reason_to_stop(self, stage: StageAssessment, attempt: AttemptStatus) -> Reason | None:
        wanted = (stage.status.identity, stage.status.execution)
        if stage.spec is None or (attempt.identity, attempt.execution) != wanted:
            return Reason.SPEC_CHANGED
        if self.assessment.cancelled:
            return Reason.CANCELLED
        if self.pipeline.spec.suspend:
            return Reason.SUSPENDED
        if any(left <= timedelta() for left in self._time_left(stage)):
            return Reason.DEADLINE_EXCEEDED
        return None

    def _may_start(self, stage: StageAssessment) -> bool:
        status = stage.status
        ready = status.state is StageState.PENDING and status.reason in {Reason.PROGRESSING, Reason.RETRYING}
        return ready and self._within_until(stage) and self._backoff_remaining(stage) <= timedelta()

    def _within_until(self, stage: StageAssessment) -> bool:
        order = [kind.name for kind in STAGES]
        until = self.settings.until
        return stage.spec is None or until is None or order.index(stage.spec.name) <= order.index(until)

    def _backoff_remaining(self, stage: StageAssessment) -> timedelta:
        last = stage.status.last_attempt
        if last is None or last.outcome is not Outcome.FAILED or last.number <= stage.status.budget_base_attempt:
            return timedelta()
        return (last.finished_at or self.now) + self.settings.backoff(stage.status.failures_counted) - self.now

    def _time_left(self, stage: StageAssessment) -> Iterator[timedelta]:
        if stage.spec and stage.spec.timeout_seconds:
            yield timedelta(seconds=stage.spec.timeout_seconds) - active_time(stage.status, self.now)
        if limit := self.pipeline.spec.active_deadline_seconds:
            yield timedelta(seconds=limit) - self.assessment.active_time

    def ttl_remaining(self) -> timedelta | None:
        """Give how long a finished pipeline is kept; None: it is not finished, or kept for ever."""
        ttl, ended = self.pipeline.spec.ttl_seconds_after_finished, self.pipeline.status.finished_at
        current = self.pipeline.status.observed_generation == self.pipeline.generation and not self.pipeline.retry
        return ended + timedelta(seconds=ttl) - self.now if ttl is not None and ended and current else None

    def requeue_times(self, stage: StageAssessment, planned: StageStatus) -> Iterator[timedelta]:
        """Give the times after which something of a stage may be due."""
        last = planned.last_attempt
        if last and last.outcome is Outcome.RUNNING:
            yield self.settings.poll_interval
            if not last.stopping:
                yield from self._time_left(stage)
        elif any(self._server_actions(stage)):
            yield self.settings.poll_interval
        elif planned.reason is Reason.RETRYING and self._within_until(stage):
            yield self._backoff_remaining(stage)
