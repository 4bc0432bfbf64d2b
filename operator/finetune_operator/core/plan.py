"""What to do next: pure, from what every stage is."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from finetune_operator.api.conditions import Reason
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import AttemptStatus, Outcome, StageState, StageStatus
from finetune_operator.core.assess import PipelineView, StageView, active_time
from finetune_operator.core.history import begun, left_running, next_number, stopped
from finetune_operator.core.job_template import JobTemplate, job_for
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
class Expire:
    """Delete the pipeline: it has been finished for as long as it asked to be kept."""


@dataclass(frozen=True)
class Route:
    """Send the stage's requests to the server that this attempt started, and to no other."""

    stage: str
    job: str


Action = CreateJob | StopJob | Route | Expire


@dataclass(frozen=True)
class Plan:
    """What is to be done, and what is to be written down before it is."""

    stages: dict[str, StageStatus]
    """Every stage, with the attempts that are about to begin or to be stopped."""
    actions: tuple[Action, ...]
    next_look: timedelta | None
    """Look again after this time at the latest; None: only when something changes."""


def plan_next(pipeline: Pipeline, view: PipelineView, settings: Settings, now: datetime) -> Plan:
    """Decide for every stage at once; stages that need each other are ordered by what `assess` found."""
    planner = _Planner(pipeline, view, settings, now)
    decided = {name: planner.next_for(stage) for name, stage in view.stages.items()}
    actions = tuple(action for _, doing in decided.values() for action in doing)
    stages = {name: status for name, (status, _) in decided.items()}
    looks = sorted(look for name, stage in view.stages.items() for look in planner.looks(stage, stages[name]))
    if not actions and (left := planner.left_to_live()) is not None:
        looks, actions = ([left], ()) if left > timedelta() else ([], (Expire(),))
    return Plan(
        stages=stages,
        actions=actions,
        next_look=max(looks[0], timedelta()) if looks else None,
    )


def _answered_last(stage: StageView) -> str | None:
    done = (one.job for one in reversed(stage.status.attempts) if one.outcome is Outcome.SUCCEEDED)
    return next((job for job in done if job in stage.servers), None)


@dataclass(frozen=True)
class _Planner:
    pipeline: Pipeline
    view: PipelineView
    settings: Settings
    now: datetime

    def next_for(self, stage: StageView) -> tuple[StageStatus, tuple[Action, ...]]:
        """Give what is to be written down of a stage, and what is to be done then."""
        attempt = stage.status.last_attempt
        settling = tuple(self._settling(stage))
        if attempt and attempt.outcome is Outcome.RUNNING:
            status, doing = self._with_running(stage, attempt)
            return status, (*doing, *settling)
        if stage.spec and stage.config and self._may_start(stage):
            job = job_for(self.pipeline, stage.spec, stage.config, next_number(stage.status), self.settings)
            return begun(stage.status, job.name), (CreateJob(job), *settling)
        return stage.status, settling

    def _settling(self, stage: StageView) -> Iterator[Action]:
        """Send requests to the server that answered last; only when that is seen do the others go.

        While no new one has answered, because it starts, failed or is not to be deployed, the old one stays.
        """
        last, wanted = stage.status.last_attempt, left_running(stage.status)
        if not any(server.current for server in stage.servers.values()):
            wanted = wanted or _answered_last(stage)  # somebody has taken the Service away
        answered = stage.servers.get(wanted) if wanted else None
        if stage.spec and wanted and answered and not answered.current:
            yield Route(stage.spec.name, wanted)
            return
        running = last.job if last and last.outcome is Outcome.RUNNING else None
        for job, server in stage.servers.items():
            if job != running and not (stage.spec and server.current):
                yield StopJob(job, Reason.SPEC_CHANGED)

    def _with_running(self, stage: StageView, attempt: AttemptStatus) -> tuple[StageStatus, tuple[Action, ...]]:
        """Leave it alone, or stop it. Both actions are repeated until they are seen to have worked."""
        if why := attempt.stopping or self._reason_to_stop(stage, attempt):
            return stopped(stage.status, why), (StopJob(attempt.job, why),)
        if attempt.created_at is None and stage.spec and stage.config:
            job = job_for(self.pipeline, stage.spec, stage.config, attempt.number, self.settings)
            return stage.status, (CreateJob(job),)
        return stage.status, ()

    def _reason_to_stop(self, stage: StageView, attempt: AttemptStatus) -> Reason | None:
        wanted = (stage.status.identity, stage.status.execution)
        if stage.spec is None or (attempt.identity, attempt.execution) != wanted:
            return Reason.SPEC_CHANGED
        if self.view.cancelled:
            return Reason.CANCELLED
        if self.pipeline.spec.suspend:
            return Reason.SUSPENDED
        if any(left <= timedelta() for left in self._time_left(stage)):
            return Reason.DEADLINE_EXCEEDED
        return None

    def _may_start(self, stage: StageView) -> bool:
        status = stage.status
        ready = status.state is StageState.PENDING and status.reason in {Reason.PROGRESSING, Reason.RETRYING}
        return ready and self._is_wanted(stage) and self._wait_left(stage) <= timedelta()

    def _is_wanted(self, stage: StageView) -> bool:
        order = [kind.name for kind in STAGES]
        until = self.settings.until
        return stage.spec is None or until is None or order.index(stage.spec.name) <= order.index(until)

    def _wait_left(self, stage: StageView) -> timedelta:
        last = stage.status.last_attempt
        if last is None or last.outcome is not Outcome.FAILED or last.number <= stage.status.forgiven:
            return timedelta()
        return (last.finished_at or self.now) + self.settings.backoff(stage.status.failures_counted) - self.now

    def _time_left(self, stage: StageView) -> Iterator[timedelta]:
        if stage.spec and stage.spec.timeout_seconds:
            yield timedelta(seconds=stage.spec.timeout_seconds) - active_time(stage.status, self.now)
        if limit := self.pipeline.spec.active_deadline_seconds:
            yield timedelta(seconds=limit) - self.view.active

    def left_to_live(self) -> timedelta | None:
        """Give how long a finished pipeline is kept; None: it is not finished, or kept for ever."""
        ttl, ended = self.pipeline.spec.ttl_seconds_after_finished, self.pipeline.status.finished_at
        current = self.pipeline.status.observed_generation == self.pipeline.generation and not self.pipeline.retry
        return ended + timedelta(seconds=ttl) - self.now if ttl is not None and ended and current else None

    def looks(self, stage: StageView, planned: StageStatus) -> Iterator[timedelta]:
        """Give the times after which something of a stage may be due."""
        last = planned.last_attempt
        if last and last.outcome is Outcome.RUNNING:
            yield self.settings.resync
            if not last.stopping:
                yield from self._time_left(stage)
        elif any(self._settling(stage)):
            yield self.settings.resync
        elif planned.reason is Reason.RETRYING and self._is_wanted(stage):
            yield self._wait_left(stage)
