"""The plan, which is the actions to take next: pure, from the assessment of every stage."""

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
    """Create the Job. Does nothing if a Job of this name exists already, because names are deterministic."""

    job: JobTemplate


@dataclass(frozen=True)
class StopJob:
    """Stop the Job as an eviction would. Does nothing if the Job is stopping or gone already."""

    name: str
    reason: Reason


@dataclass(frozen=True)
class DeletePipeline:
    """Delete the pipeline, because its ttlSecondsAfterFinished has passed."""


@dataclass(frozen=True)
class SwitchTraffic:
    """Send the traffic of the stage to the server of this attempt, and to no other."""

    stage: str
    job: str


Action = CreateJob | StopJob | SwitchTraffic | DeletePipeline


@dataclass(frozen=True)
class Plan:
    """The actions to take, and the statuses to write before they are taken."""

    stages: dict[str, StageStatus]
    """Status of every stage, including attempts that are about to start or stop."""
    actions: tuple[Action, ...]
    requeue_after: timedelta | None
    """Reconcile again after this time at the latest. None: only when something changes."""


def plan_next(pipeline: Pipeline, assessment: PipelineAssessment, settings: Settings, now: datetime) -> Plan:
    """Return the plan for all stages.

    No order between stages is needed here: `assess` leaves a stage startable only when its dependencies are done.
    """
    planner = _Planner(pipeline, assessment, settings, now)
    planned = {name: planner.next_for(stage) for name, stage in assessment.stages.items()}
    actions = tuple(action for _, stage_actions in planned.values() for action in stage_actions)
    stages = {name: status for name, (status, _) in planned.items()}
    times = sorted(
        time for name, stage in assessment.stages.items() for time in planner.requeue_times(stage, stages[name])
    )
    # A pipeline is deleted only when nothing else is left to do.
    if not actions and (remaining := planner.ttl_remaining()) is not None:
        times, actions = ([remaining], ()) if remaining > timedelta() else ([], (DeletePipeline(),))
    return Plan(
        stages=stages,
        actions=actions,
        requeue_after=max(times[0], timedelta()) if times else None,
    )


def _last_answering_server(stage: StageAssessment) -> str | None:
    """Return the newest successful attempt whose server still exists, or None."""
    jobs = (attempt.job for attempt in reversed(stage.status.attempts) if attempt.outcome is Outcome.SUCCEEDED)
    return next((job for job in jobs if job in stage.servers), None)


@dataclass(frozen=True)
class _Planner:
    pipeline: Pipeline
    assessment: PipelineAssessment
    settings: Settings
    now: datetime

    def next_for(self, stage: StageAssessment) -> tuple[StageStatus, tuple[Action, ...]]:
        """Return the stage's status to write, and the actions to take after it is written."""
        attempt = stage.status.last_attempt
        server_actions = tuple(self._server_actions(stage))
        # At most one attempt at a time: while one is not known to have ended, no other may start.
        if attempt and attempt.outcome is Outcome.RUNNING:
            status, actions = self._running_actions(stage, attempt)
            return status, (*actions, *server_actions)
        if stage.spec and stage.config and self._may_start(stage):
            job = job_template(
                self.pipeline, stage.spec, stage.config, next_attempt_number(stage.status), self.settings
            )
            return start_attempt(stage.status, job.name), (CreateJob(job), *server_actions)
        return stage.status, server_actions

    def _server_actions(self, stage: StageAssessment) -> Iterator[Action]:
        """Yield the switch of traffic to the new server, or the deletion of old servers.

        Never both at once: the old server is deleted only after the switch has been observed, so that clients always
        reach a server. While no new server has answered (it starts, failed, or is skipped), the old one stays.
        """
        last, target = stage.status.last_attempt, server_job(stage.status)
        # No current server: none has answered yet, or the Service was deleted and needs the last one that answered.
        if not any(server.current for server in stage.servers.values()):
            target = target or _last_answering_server(stage)
        answered = stage.servers.get(target) if target else None
        if stage.spec and target and answered and not answered.current:
            yield SwitchTraffic(stage.spec.name, target)
            return
        # The server of the running attempt has not answered yet: it is neither current nor to be deleted.
        running = last.job if last and last.outcome is Outcome.RUNNING else None
        for job, server in stage.servers.items():
            if job != running and not (stage.spec and server.current):
                yield StopJob(job, Reason.SPEC_CHANGED)

    def _running_actions(
        self, stage: StageAssessment, attempt: AttemptStatus
    ) -> tuple[StageStatus, tuple[Action, ...]]:
        """Stop the running attempt, create its Job, or leave it alone.

        Both actions are repeated until their effect is observed, because the operator may have been killed in between.
        """
        # A recorded stop is never taken back: the process may have received SIGTERM already.
        if reason := attempt.stopping or self._reason_to_stop(stage, attempt):
            return mark_stopping(stage.status, reason), (StopJob(attempt.job, reason),)
        # Recorded, but its Job was never observed: create it with the recorded number.
        if attempt.created_at is None and stage.spec and stage.config:
            job = job_template(self.pipeline, stage.spec, stage.config, attempt.number, self.settings)
            return stage.status, (CreateJob(job),)
        return stage.status, ()

    def _reason_to_stop(self, stage: StageAssessment, attempt: AttemptStatus) -> Reason | None:
        # The first reason is the one shown to the user. A changed spec replaces the attempt, whatever else is true.
        requested = (stage.status.identity, stage.status.execution)
        if stage.spec is None or (attempt.identity, attempt.execution) != requested:
            return Reason.SPEC_CHANGED
        if self.assessment.cancelled:
            return Reason.CANCELLED
        if self.pipeline.spec.suspend:
            return Reason.SUSPENDED
        if any(remaining <= timedelta() for remaining in self._time_left(stage)):
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
        """Return how long a finished pipeline is kept. None: it is not finished, or has no TTL."""
        ttl, ended = self.pipeline.spec.ttl_seconds_after_finished, self.pipeline.status.finished_at
        # The written status must describe the current spec: an edit or a retry may have started the pipeline again.
        current = self.pipeline.status.observed_generation == self.pipeline.generation and not self.pipeline.retry
        return ended + timedelta(seconds=ttl) - self.now if ttl is not None and ended and current else None

    def requeue_times(self, stage: StageAssessment, planned: StageStatus) -> Iterator[timedelta]:
        """Yield the times after which the stage needs another reconcile, even if no event arrives."""
        last = planned.last_attempt
        if last and last.outcome is Outcome.RUNNING:
            yield self.settings.poll_interval  # for progress, which triggers no event
            if not last.stopping:
                yield from self._time_left(stage)
        elif any(self._server_actions(stage)):
            yield self.settings.poll_interval
        elif planned.reason is Reason.RETRYING and self._within_until(stage):
            yield self._backoff_remaining(stage)
