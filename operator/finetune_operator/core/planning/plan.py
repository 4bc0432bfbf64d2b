"""The plan, which is the actions to take next: pure, from the assessment of every stage."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cached_property

from finetune_operator.api.conditions import Reason
from finetune_operator.api.placement import ON_DEMAND
from finetune_operator.api.stages.base import StageSpec
from finetune_operator.api.status import (
    AttemptStatus,
    Begun,
    PlacementStatus,
    StageState,
    StageStatus,
    truncate_message,
)
from finetune_operator.core.assessment import PipelineAssessment, StageAssessment
from finetune_operator.core.attempts.history import (
    mark_stopping,
    next_attempt_number,
    start_attempt,
)
from finetune_operator.core.attempts.suspect_nodes import avoided_nodes
from finetune_operator.core.capacity.choice import CapacityChoice
from finetune_operator.core.identity import program_of
from finetune_operator.core.job_template import JobTemplate, job_template
from finetune_operator.core.metadata import job_name
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.core.planning.actions import (
    Action,
    ChangeWorkspace,
    CreateJob,
    CreateWorkspace,
    DeletePipeline,
    DeleteService,
    ProbeServer,
    StopJob,
    SwitchTraffic,
    in_order,
    writes_to_claim,
)
from finetune_operator.core.planning.cleanup import ended_job_actions, stray_actions
from finetune_operator.core.planning.server_traffic import (
    last_answering_server,
    scaling,
    traffic_target,
)
from finetune_operator.core.planning.timers import Timers
from finetune_operator.core.settings import Settings
from finetune_operator.core.workspace import create_blocker, has_lost_claim, pruning_of
from finetune_trainer.contract import RESULTS_VERSION, StageConfig
from finetune_trainer.contract.environment import CONFIG

# Something else had to be done first, and it may cause no event of its own.
EXPIRY_INTERVAL = timedelta(seconds=1)
"""Time until the operator looks again at an expired pipeline that it could not delete yet."""
STARTABLE = frozenset({Reason.PROGRESSING, Reason.RETRYING})
"""Reasons of a pending stage that waits for nothing but time."""


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
    pipeline: Pipeline,
    assessment: PipelineAssessment,
    settings: Settings,
    now: datetime,
) -> Plan:
    """Return the plan for all stages.

    No order between stages is needed here: `assess` leaves a stage startable only when its dependencies are done.
    """
    return _Planner(pipeline, assessment, settings, now).plan()


@dataclass(frozen=True)
class _Planner:
    pipeline: Pipeline
    assessment: PipelineAssessment
    settings: Settings
    now: datetime

    def plan(self) -> Plan:
        """Return the plan for all stages."""
        stages: dict[str, StageStatus] = {}
        actions: list[Action] = [
            *map(ChangeWorkspace, self.assessment.observation.workspace.changes),
            *stray_actions(self.assessment),
        ]
        times: list[timedelta] = []
        for name, stage in self.assessment.stages.items():
            # The claim has one writer at a time, so a second Job waits until this one is observed.
            may_start = not writes_to_claim(actions)
            server_actions = tuple(self._server_actions(stage))
            stages[name], stage_actions = self._next_for(stage, may_start=may_start)
            actions += (*stage_actions, *server_actions)
            times += self.timers.requeue_times(
                stage, stages[name], self.capacity.get(name), server_actions
            )
        actions += ended_job_actions(self.assessment, stages, self._jobs_kept())
        expiry = self.timers.until_expiry()
        if expiry is not None and expiry > timedelta():
            times.append(expiry)
        # Everything else comes before the deletion of the pipeline: with its object, its status is gone.
        if self.timers.has_expired() and self.pipeline.spec.when_expired == "Delete":
            if actions:
                times = [EXPIRY_INTERVAL]
            else:
                actions = [DeletePipeline()]
        defaults = self.settings.placement_defaults
        return Plan(
            stages=stages,
            actions=in_order(actions),
            # A time that has passed already means: at once.
            requeue_after=max(min(times), timedelta()) if times else None,
            currency=defaults.currency if defaults else "",
        )

    @cached_property
    def timers(self) -> Timers:
        """The times of the pipeline."""
        return Timers(self.pipeline, self.assessment, self.settings, self.now)

    @cached_property
    def capacity(self) -> Mapping[str, CapacityChoice]:
        """Stage -> the choice of its nodes. Empty on one machine."""
        defaults = self.settings.placement_defaults
        if defaults is None:
            return {}
        stages = self.assessment.stages
        statuses = self.assessment.statuses
        pods = self.settings.defaults.pod_defaults
        return {
            name: CapacityChoice(
                self.pipeline.spec, stage.spec.over(pods), statuses, defaults, self.now
            )
            for name, stage in stages.items()
            if stage.spec
        }

    def _jobs_kept(self) -> int:
        """Return how many ended Jobs of each stage are kept."""
        # Ended pods hold a claim, too: it exists until they are deleted.
        if self.assessment.observation.workspace.deleting:
            return 0
        # The Jobs of a pipeline that is deleted itself go with it.
        if self.timers.has_expired() and self.pipeline.spec.when_expired != "Delete":
            return 0
        history = self.settings.job_history
        finished = self.assessment.done or self.assessment.failed_stage
        return min(1, history) if finished else history

    def _next_for(
        self, stage: StageAssessment, *, may_start: bool
    ) -> tuple[StageStatus, tuple[Action, ...]]:
        """Return the stage's status to write, and the actions to take after it is written."""
        # At most one attempt at a time: while one is not known to have ended, no other may start.
        attempt = stage.status.running_attempt
        if attempt:
            return self._running_actions(stage, attempt)
        if stage.spec and stage.config and may_start and self._is_startable(stage):
            attempt, placement = self._next_attempt(stage.spec, stage.status)
            job = self._job(stage.spec, stage.config, stage.status, attempt)
            begun = Begun(
                config=job.env[CONFIG],
                image=self._own_image(stage.spec),
                program=program_of(stage.spec),
            )
            started = start_attempt(stage.status, attempt, placement, begun)
            return started, tuple(self._creation(stage.spec, job))
        return self._with_preview(stage), ()

    def _is_startable(self, stage: StageAssessment) -> bool:
        if (
            stage.status.state is not StageState.PENDING
            or stage.status.reason not in STARTABLE
        ):
            return False
        waited = self.timers.backoff_remaining(stage) <= timedelta()
        return waited and self.timers.within_until(stage)

    def _with_preview(self, stage: StageAssessment) -> StageStatus:
        """Return the status of a waiting stage with the nodes that it would get now, so that users can see it before.

        It is not computed anew while the stage waits: its numbers would change all the time.
        """
        status = self._with_next_start(stage)
        spec = stage.spec
        waits = status.state is StageState.PENDING and status.placement is None
        if spec is None or not waits or spec.placement.capacity == ON_DEMAND:
            return status
        choice = self.capacity.get(spec.name)
        if choice is None:
            return status
        return status.model_copy(update={"placement": choice.placement})

    def _with_next_start(self, stage: StageAssessment) -> StageStatus:
        """Return the status of a stage, with the time for which it waits before its next attempt."""
        status = stage.status
        wait = self.timers.backoff(stage)
        waits = status.state is StageState.PENDING and status.reason is Reason.RETRYING
        if not waits or not status.message or not wait:
            return status
        # Not the time that is left, which would change the status all the time.
        pause = f"the next attempt starts {wait.total_seconds():.0f} s later"
        message = truncate_message(f"{status.message}; {pause}")
        return status.model_copy(update={"message": message})

    def _next_attempt(
        self, spec: StageSpec, status: StageStatus
    ) -> tuple[AttemptStatus, PlacementStatus | None]:
        number = next_attempt_number(status)
        attempt = AttemptStatus(
            number=number,
            job=job_name(
                self.pipeline.key.name, self.pipeline.uid, spec.name, number, spec.pods
            ),
            identity=status.identity,
            execution=status.execution,
        )
        choice = self.capacity.get(spec.name)
        if choice is None:
            return attempt, None
        return choice.place(attempt), choice.placement

    def _job(
        self,
        spec: StageSpec,
        config: StageConfig,
        status: StageStatus,
        attempt: AttemptStatus,
    ) -> JobTemplate:
        job = job_template(self.pipeline, spec, config, attempt, self.settings)
        job = replace(
            job,
            avoided_nodes=avoided_nodes(status, attempt.number),
            pruning=pruning_of(
                self.pipeline,
                spec.name,
                self.assessment.statuses,
                self.assessment.observation.workspace,
            ),
        )
        is_older = status.results_version not in {0, RESULTS_VERSION}
        if status.begun is None or not is_older or spec.runs_server:
            return job
        # This version's trainer would make another result in the middle of a training. The earlier trainer gets the
        # config that it got before, because it refuses fields that it does not know.
        image = job.image if spec.pod.image else status.begun.image
        return replace(job, image=image, env={**job.env, CONFIG: status.begun.config})

    def _own_image(self, spec: StageSpec) -> str:
        """Return the operator's image for the stage, which it runs if the stage names none."""
        pod = spec.over(self.settings.defaults.pod_defaults).pod
        return self.settings.image_of(None, pod)

    def _creation(self, spec: StageSpec, job: JobTemplate) -> Iterator[Action]:
        # A server reads the published model, not the workspace.
        if not spec.runs_server and self.assessment.observation.workspace.missing:
            yield CreateWorkspace(self.settings.defaults.workspace.storage_class_name)
        yield CreateJob(job)

    def _running_actions(
        self, stage: StageAssessment, attempt: AttemptStatus
    ) -> tuple[StageStatus, tuple[Action, ...]]:
        """Stop the running attempt, create its Job, or leave it alone.

        Both actions are repeated until their effect is observed, because the operator may have been killed in between.
        """
        # A recorded stop is never taken back: the process may have received SIGTERM already.
        reason = attempt.stopping or self._reason_to_stop(stage, attempt)
        if reason:
            stop = StopJob(attempt.job, reason)
            status = mark_stopping(stage.status, reason, self._failure(stage, reason))
            lost = self.timers.replacement(stage)
            return status, (*self._reroute(stage, attempt.job), stop, *lost)
        job = self.assessment.observation.jobs.get(attempt.job)
        if job and job.awaits_probe:
            return stage.status, (ProbeServer(attempt.job),)
        lost = self.timers.replacement(stage)
        status = self.timers.with_replacement(stage)
        return status, (*lost, *self._recreation(stage, attempt))

    def _failure(self, stage: StageAssessment, reason: Reason) -> str:
        """Return the message of an attempt that fails because it is stopped; empty if its stop is no failure."""
        attempt = stage.status.running_attempt
        overdue = self.timers.overdue_wait(stage)
        if attempt is None or attempt.stopping or overdue is None:
            return ""
        return overdue.message if overdue.reason is reason else ""

    def _recreation(
        self, stage: StageAssessment, attempt: AttemptStatus
    ) -> Iterator[Action]:
        """Yield the creation of an attempt's Job that is recorded, but was never observed."""
        if attempt.created_at is not None or stage.spec is None or stage.config is None:
            return
        observation = self.assessment.observation
        needs_claim = not stage.spec.runs_server
        if observation.defaults_blocker or (
            needs_claim and create_blocker(observation.workspace)
        ):
            return
        job = self._job(stage.spec, stage.config, stage.status, attempt)
        yield from self._creation(stage.spec, job)

    def _reason_to_stop(
        self, stage: StageAssessment, attempt: AttemptStatus
    ) -> Reason | None:
        requested = self._requested_stop(stage, attempt)
        if requested or stage.spec is None:
            return requested
        job = self.assessment.observation.jobs.get(attempt.job)
        workspace = self.assessment.observation.workspace
        if not stage.spec.runs_server and has_lost_claim(workspace, job):
            return Reason.VOLUME_NOT_READY
        return self._reason_to_end(stage, stage.spec, attempt)

    def _reason_to_end(
        self, stage: StageAssessment, spec: StageSpec, attempt: AttemptStatus
    ) -> Reason | None:
        """Return why the attempt ends without a request of the user."""
        job = self.assessment.observation.jobs.get(attempt.job)
        sidecars = self.timers.until_sidecars_stop(job)
        if sidecars is not None:
            return Reason.SIDECAR_RUNNING if sidecars <= timedelta() else None
        if self.timers.is_overdue(stage):
            return Reason.DEADLINE_EXCEEDED
        overdue = self.timers.overdue_wait(stage)
        if overdue:
            return overdue.reason
        # A queue may suspend the Job of an attempt again and again.
        interruptions = stage.status.interruptions_counted
        if attempt.suspensions and interruptions > spec.max_interruptions:
            return Reason.RETRIES_EXHAUSTED
        choice = self.capacity.get(spec.name)
        if choice is None:
            return None
        return choice.reason_to_move(attempt, job)

    def _requested_stop(
        self, stage: StageAssessment, attempt: AttemptStatus
    ) -> Reason | None:
        """Return the request of the user that stops the attempt; the first reason is the reason shown to the user."""
        # A changed spec replaces the attempt, whatever else is true.
        wanted = (stage.status.identity, stage.status.execution)
        if stage.spec is None or (attempt.identity, attempt.execution) != wanted:
            return Reason.SPEC_CHANGED
        if self.assessment.cancelled:
            return Reason.CANCELLED
        return Reason.SUSPENDED if self.pipeline.spec.suspend else None

    def _server_actions(self, stage: StageAssessment) -> Iterator[Action]:
        """Yield the scaling of servers, and the switch of traffic to the new server or the deletion of old servers.

        Never a switch and a deletion at once: the old server is deleted only after the switch has been observed, so
        that clients always reach a server. While no new server has answered (it starts, failed, or is skipped), the old
        server stays.
        """
        attempt = stage.status.running_attempt
        yield from scaling(stage)
        target = traffic_target(stage)
        if stage.spec and target:
            yield SwitchTraffic(stage.spec.name, target)
            return
        # The server of the running attempt has not answered yet: it is neither current nor to be deleted.
        running = attempt.job if attempt else None
        unproven = stage.servers.get(running) if running else None
        if stage.spec and unproven and unproven.current:
            # A client of the cluster has changed the Service. An earlier server may get its requests back.
            return
        for job, server in stage.servers.items():
            serves = stage.spec is not None and server.current
            if job != running and not serves:
                yield StopJob(job, Reason.SPEC_CHANGED)

    def _reroute(self, stage: StageAssessment, stopped: str) -> Iterator[Action]:
        """Yield the action after which the Service sends no requests to a server that is about to stop."""
        server = stage.servers.get(stopped)
        if stage.spec is None or server is None or not server.current:
            return
        earlier = last_answering_server(stage)
        if earlier:
            yield SwitchTraffic(stage.spec.name, earlier)
        else:
            yield DeleteService()
