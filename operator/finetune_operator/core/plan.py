"""The plan, which is the actions to take next: pure, from the assessment of every stage."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import get_args

from finetune_operator.api.conditions import Reason
from finetune_operator.api.placement import ON_DEMAND
from finetune_operator.api.spec import STAGES
from finetune_operator.api.stages.base import StageSpec
from finetune_operator.api.status import (
    AttemptStatus,
    Outcome,
    PlacementStatus,
    StageState,
    StageStatus,
)
from finetune_operator.core.assess import PipelineAssessment, StageAssessment, active_time
from finetune_operator.core.capacity import CapacityChoice
from finetune_operator.core.history import (
    fruitless_interruptions,
    mark_stopping,
    next_attempt_number,
    releases_in_a_row,
    server_job,
    start_attempt,
)
from finetune_operator.core.job_template import JobTemplate, job_template
from finetune_operator.core.metadata import job_name
from finetune_operator.core.observation import ClaimChange
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.core.settings import Settings
from finetune_operator.core.workspace import WORKSPACE, create_blocker


@dataclass(frozen=True)
class StopJob:
    """Stop the Job as an eviction would. Does nothing if the Job is stopping or gone already."""

    name: str
    reason: Reason


@dataclass(frozen=True)
class DeleteJob:
    """Delete a Job that has ended, with its pod."""

    name: str


@dataclass(frozen=True)
class DeleteService:
    """Delete the Service: no server is left that could get its requests."""


@dataclass(frozen=True)
class ChangeWorkspace:
    """Change the claim to what the spec asks for."""

    change: ClaimChange


@dataclass(frozen=True)
class ProbeServer:
    """Send a prompt to the server of this attempt, which is ready."""

    job: str


@dataclass(frozen=True)
class SwitchTraffic:
    """Send the traffic of the stage to the server of this attempt, and to no other."""

    stage: str
    job: str


@dataclass(frozen=True)
class CreateWorkspace:
    """Create the claim."""

    storage_class: str | None = None
    """Storage class of a claim whose pipeline names none. None: the cluster's default."""


@dataclass(frozen=True)
class CreateJob:
    """Create the Job. Does nothing if a Job of this name exists already, because names are deterministic."""

    job: JobTemplate


@dataclass(frozen=True)
class DeletePipeline:
    """Delete the pipeline, because its ttlSecondsAfterFinished has passed and whenExpired is Delete."""


Action = (
    StopJob
    | DeleteService
    | ChangeWorkspace
    | ProbeServer
    | SwitchTraffic
    | CreateWorkspace
    | CreateJob
    | DeleteJob
    | DeletePipeline
)
EXPIRY_INTERVAL = timedelta(seconds=1)
"""Until a pipeline whose time has passed is looked at again, because something else had to be done first."""
SWITCH_INTERVAL = timedelta(seconds=1)
"""Until the switch of traffic is observed: the watch event of the operator's own write triggers no reconcile."""
WAITS_FOR_CLAIM = frozenset({Reason.WORKSPACE_IN_USE, Reason.VOLUME_NOT_READY})
ORDER = get_args(Action)
"""The order of execution: what stops, then what starts (the claim before the Job that mounts it), then what tidies."""


def subject_of(action: Action) -> str:
    """Return what a refusal of the action is about: an attempt's Job, or a field of the spec."""
    match action:
        case StopJob(name, _) | DeleteJob(name) | ProbeServer(name) | SwitchTraffic(_, name):
            return name
        case CreateJob(job):
            return job.name
        case ChangeWorkspace(change):
            return change.field
        case CreateWorkspace():
            return WORKSPACE
        case DeleteService():
            return "service"
        case DeletePipeline():
            return "ttlSecondsAfterFinished"


@dataclass(frozen=True)
class Plan:
    """The actions to take, and the statuses to write before they are taken."""

    stages: dict[str, StageStatus]
    """Status of every stage, including attempts that are about to start or stop."""
    actions: tuple[Action, ...]
    requeue_after: timedelta | None
    """Reconcile again after this time at the latest. None: only when something changes."""
    currency: str = ""
    """Currency of the prices."""


def plan_next(
    pipeline: Pipeline, assessment: PipelineAssessment, settings: Settings, now: datetime
) -> Plan:
    """Return the plan for all stages.

    No order between stages is needed here: `assess` leaves a stage startable only when its dependencies are done.
    """
    planner = _Planner(pipeline, assessment, settings, now)
    planned: dict[str, tuple[StageStatus, tuple[Action, ...]]] = {}
    for name, stage in assessment.stages.items():
        planned[name] = planner.next_for(
            stage, may_start=not any(_writes(actions) for _, actions in planned.values())
        )
    by_stage = (action for _, stage_actions in planned.values() for action in stage_actions)
    stages = {name: status for name, (status, _) in planned.items()}
    unordered = (*planner.pipeline_actions(), *by_stage, *planner.cleanup_actions(stages))
    actions = tuple(sorted(unordered, key=lambda action: ORDER.index(type(action))))
    times = sorted(
        time
        for name, stage in assessment.stages.items()
        for time in planner.requeue_times(stage, stages[name])
    )
    if (remaining := planner.ttl_remaining()) is not None and remaining > timedelta():
        times = sorted((*times, remaining))
    elif remaining is not None and pipeline.spec.when_expired == "Delete":
        # What else is to be done comes first; it may need no event of its own.
        actions, times = (actions, [EXPIRY_INTERVAL]) if actions else ((DeletePipeline(),), times)
    return Plan(
        stages=stages,
        actions=actions,
        requeue_after=max(times[0], timedelta()) if times else None,
        currency=settings.placement_defaults.currency if settings.placement_defaults else "",
    )


def _writes(actions: Iterable[Action]) -> bool:
    """Return whether a Job is created that writes to the claim: it has one writer at a time."""
    return any(isinstance(action, CreateJob) and not action.job.serving for action in actions)


def _last_answering_server(stage: StageAssessment) -> str | None:
    """Return the newest successful attempt whose server still exists, or None."""
    jobs = (
        attempt.job
        for attempt in reversed(stage.status.attempts)
        if attempt.outcome is Outcome.SUCCEEDED
    )
    return next((job for job in jobs if job in stage.servers), None)


@dataclass(frozen=True)
class _Planner:
    pipeline: Pipeline
    assessment: PipelineAssessment
    settings: Settings
    now: datetime

    def next_for(
        self, stage: StageAssessment, *, may_start: bool
    ) -> tuple[StageStatus, tuple[Action, ...]]:
        """Return the stage's status to write, and the actions to take after it is written."""
        server_actions = tuple(self._server_actions(stage))
        # At most one attempt at a time: while one is not known to have ended, no other may start.
        if attempt := stage.status.running_attempt:
            status, actions = self._running_actions(stage, attempt)
            return status, (*actions, *server_actions)
        if stage.spec and stage.config and may_start and self._may_start(stage):
            attempt, placement = self._next_attempt(stage.spec, stage.status)
            job = job_template(self.pipeline, stage.spec, stage.config, attempt, self.settings)
            started = start_attempt(stage.status, attempt, placement)
            return started, (*self._creation(stage.spec, job), *server_actions)
        return self._with_preview(stage), server_actions

    def _with_preview(self, stage: StageAssessment) -> StageStatus:
        """Return the status of a waiting stage with the nodes that it would get now, so that users can see it before.

        It is not computed anew while the stage waits: its numbers would change all the time.
        """
        status, spec = stage.status, stage.spec
        waits = status.state is StageState.PENDING and status.placement is None
        if (
            not waits
            or spec is None
            or spec.placement.capacity == ON_DEMAND
            or spec.name not in self.capacity
        ):
            return status
        return status.model_copy(update={"placement": self.capacity[spec.name].placement})

    def _next_attempt(
        self, spec: StageSpec, status: StageStatus
    ) -> tuple[AttemptStatus, PlacementStatus | None]:
        number = next_attempt_number(status)
        name = job_name(self.pipeline.key.name, self.pipeline.uid, spec.name, number, spec.pods)
        attempt = AttemptStatus(
            number=number, job=name, identity=status.identity, execution=status.execution
        )
        choice = self.capacity.get(spec.name)
        return (choice.place(attempt), choice.placement) if choice else (attempt, None)

    @cached_property
    def capacity(self) -> Mapping[str, CapacityChoice]:
        """Stage -> the choice of its nodes. Empty on one machine."""
        defaults, pods = self.settings.placement_defaults, self.settings.defaults.pod_defaults
        stages, spec = self.assessment.stages, self.pipeline.spec
        if defaults is None:
            return {}
        return {
            name: CapacityChoice(
                spec, stage.spec.over(pods), lambda one: stages[one].status, defaults, self.now
            )
            for name, stage in stages.items()
            if stage.spec
        }

    def _creation(self, spec: StageSpec, job: JobTemplate) -> Iterator[Action]:
        if not spec.runs_server and self.assessment.observation.workspace.missing:
            yield CreateWorkspace(self.settings.defaults.workspace.storage_class_name)
        yield CreateJob(job)

    def _server_actions(self, stage: StageAssessment) -> Iterator[Action]:
        """Yield the switch of traffic to the new server, or the deletion of old servers.

        Never both at once: the old server is deleted only after the switch has been observed, so that clients always
        reach a server. While no new server has answered (it starts, failed, or is skipped), the old one stays.
        """
        attempt, target = stage.status.running_attempt, server_job(stage.status)
        # No current server: none has answered yet, or the Service was deleted and needs the last one that answered.
        if not any(server.current for server in stage.servers.values()):
            target = target or _last_answering_server(stage)
        answered = stage.servers.get(target) if target else None
        if stage.spec and target and answered and not answered.current:
            yield SwitchTraffic(stage.spec.name, target)
            return
        # The server of the running attempt has not answered yet: it is neither current nor to be deleted.
        running = attempt.job if attempt else None
        if stage.spec and running and (unproven := stage.servers.get(running)) and unproven.current:
            return  # a client of the cluster has changed the Service; an earlier server may get its requests back
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
            return mark_stopping(stage.status, reason), (
                *self._reroute(stage, attempt.job),
                StopJob(attempt.job, reason),
            )
        observed = self.assessment.observation.jobs.get(attempt.job)
        if observed and observed.awaits_probe:
            return stage.status, (ProbeServer(attempt.job),)
        # Recorded, but its Job was never observed: create it with the recorded number.
        if attempt.created_at is None and stage.spec and stage.config:
            observation = self.assessment.observation
            waits = not stage.spec.runs_server and create_blocker(observation.workspace)
            if waits or observation.defaults_blocker:
                return stage.status, ()
            job = job_template(self.pipeline, stage.spec, stage.config, attempt, self.settings)
            return stage.status, tuple(self._creation(stage.spec, job))
        return stage.status, ()

    def _reroute(self, stage: StageAssessment, stopped: str) -> Iterator[Action]:
        """Yield the action after which the Service sends no requests to a server that is about to stop."""
        server = stage.servers.get(stopped)
        if server and server.current and stage.spec:
            earlier = _last_answering_server(stage)
            yield SwitchTraffic(stage.spec.name, earlier) if earlier else DeleteService()

    def pipeline_actions(self) -> Iterator[Action]:
        """Yield what no single stage needs: changes of the claim, and the removal of what no attempt has.

        A late request of an earlier leader may have created such a Job after its attempt had been recorded as ended.
        """
        yield from (
            ChangeWorkspace(change) for change in self.assessment.observation.workspace.changes
        )
        running = self._running_jobs()
        for name, job in self.assessment.observation.jobs.items():
            if job.live and name not in running:
                yield StopJob(name, Reason.SPEC_CHANGED)
        if self.assessment.observation.has_service and not any(
            stage.spec and stage.spec.runs_server for stage in self.assessment.stages.values()
        ):
            yield DeleteService()

    def cleanup_actions(self, planned: Mapping[str, StageStatus]) -> Iterator[Action]:
        """Yield the deletion of ended Jobs that are not kept. The planned status, written before, has their end."""
        newest = slice(-self._jobs_kept(), None) if self._jobs_kept() else slice(0)
        ended = (
            [one.job for one in status.attempts if one.finished_at] for status in planned.values()
        )
        kept = self._running_jobs().union(*(jobs[newest] for jobs in ended))
        for name, job in self.assessment.observation.jobs.items():
            if not job.live and name not in kept:
                yield DeleteJob(name)

    def _jobs_kept(self) -> int:
        """Return how many Jobs of each stage are kept; those of a pipeline that is deleted itself go with it."""
        retain = self.pipeline.spec.when_expired != "Delete"
        if retain and (remaining := self.ttl_remaining()) is not None and remaining <= timedelta():
            return 0
        finished = self.assessment.done or self.assessment.failed_stage
        return min(1, self.settings.job_history) if finished else self.settings.job_history

    def _running_jobs(self) -> set[str]:
        """Return the Jobs of running attempts."""
        found = (stage.status.running_attempt for stage in self.assessment.stages.values())
        return {attempt.job for attempt in found if attempt}

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
        job = self.assessment.observation.jobs.get(attempt.job)
        choice = self.capacity.get(stage.spec.name)
        return choice.reason_to_move(attempt, job) if choice else None

    def _may_start(self, stage: StageAssessment) -> bool:
        status = stage.status
        ready = status.state is StageState.PENDING and status.reason in {
            Reason.PROGRESSING,
            Reason.RETRYING,
        }
        return ready and self._within_until(stage) and self._backoff_remaining(stage) <= timedelta()

    def _within_until(self, stage: StageAssessment) -> bool:
        order = [kind.name for kind in STAGES]
        until = self.settings.until
        return (
            stage.spec is None
            or until is None
            or order.index(stage.spec.name) <= order.index(until)
        )

    def _backoff_remaining(self, stage: StageAssessment) -> timedelta:
        last = stage.status.last_attempt
        if last is None or not stage.status.counts(last):
            return timedelta()
        if last.outcome is Outcome.FAILED:
            backoff = self.settings.backoff(stage.status.failures_counted)
        elif stage.spec and stage.spec.pods > 1 and (count := releases_in_a_row(stage.status)):
            backoff = self.settings.backoff(
                count
            )  # another attempt may wait for just the nodes that this one had
        else:
            backoff = self.settings.interruption_backoff(fruitless_interruptions(stage.status))
        return (last.finished_at or self.now) + backoff - self.now if backoff else timedelta()

    def _time_left(self, stage: StageAssessment) -> Iterator[timedelta]:
        if stage.spec and stage.spec.max_runtime_seconds:
            yield timedelta(seconds=stage.spec.max_runtime_seconds) - active_time(
                stage.status, self.now
            )
        if limit := self.pipeline.spec.max_runtime_seconds:
            yield timedelta(seconds=limit) - self.assessment.active_time

    def ttl_remaining(self) -> timedelta | None:
        """Return the time until a finished pipeline expires. None: it is not finished, or has no TTL."""
        ttl, ended = self.pipeline.spec.ttl_seconds_after_finished, self.pipeline.status.finished_at
        # The written status must describe the current spec: an edit or a retry may have started the pipeline again.
        current = (
            self.pipeline.status.observed_generation == self.pipeline.generation
            and not self.pipeline.retry
        )
        return (
            ended + timedelta(seconds=ttl) - self.now
            if ttl is not None and ended and current
            else None
        )

    def requeue_times(self, stage: StageAssessment, planned: StageStatus) -> Iterator[timedelta]:
        """Yield the times after which the stage needs another reconcile, even if no event arrives."""
        if attempt := planned.running_attempt:
            yield self.settings.poll_interval  # for progress, which triggers no event
            if not attempt.stopping:
                yield from self._time_left(stage)
                job = self.assessment.observation.jobs.get(attempt.job)
                if stage.spec and (choice := self.capacity.get(stage.spec.name)):
                    yield from choice.review_times(attempt, job)
        elif actions := tuple(self._server_actions(stage)):
            switched = any(isinstance(action, SwitchTraffic) for action in actions)
            yield SWITCH_INTERVAL if switched else self.settings.poll_interval
        elif planned.reason is Reason.RETRYING and self._within_until(stage):
            yield self._backoff_remaining(stage)
        elif planned.state is StageState.PENDING and planned.reason in WAITS_FOR_CLAIM:
            yield self.settings.poll_interval  # no watch shows a claim that a user creates
