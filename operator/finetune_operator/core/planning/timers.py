"""The times of a pipeline: how long until something is due, and when to reconcile again. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from finetune_operator.api.conditions import Reason
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import (
    Outcome,
    StageState,
    StageStatus,
    truncate_message,
)
from finetune_operator.core.assessment import PipelineAssessment, StageAssessment
from finetune_operator.core.attempts.history import (
    active_time,
    fruitless_interruptions,
    releases_in_a_row,
)
from finetune_operator.core.attempts.pending import obstacle, refusal_of
from finetune_operator.core.capacity.choice import CapacityChoice
from finetune_operator.core.observation import Blocker, ObservedJob
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.core.planning.actions import Action, ReplaceLost, SwitchTraffic
from finetune_operator.core.planning.lost_nodes import is_kept_out
from finetune_operator.core.settings import Settings
from finetune_operator.core.workspace import users_before

# The watch event of the operator's own write triggers no reconcile, so the switch of traffic has to be looked at.
SWITCH_INTERVAL = timedelta(seconds=1)
"""Time until the operator observes a switch of traffic."""
MISSING_JOB_INTERVAL = timedelta(seconds=1)
"""Time until the operator ends an attempt that it stops and whose Job it does not see."""
# Sidecars that end by themselves after the process need some seconds.
SIDECAR_GRACE = timedelta(seconds=30)
"""Time after the end of a process until the other containers of its pod are stopped."""
# The end of the pipeline before it wakes the next pipeline in line. The others only report for whom they wait.
LONGEST_WAIT_IN_LINE = 10
"""Polling intervals until a pipeline far down the line looks again."""
NOTHING = timedelta()


@dataclass(frozen=True)
class Timers:
    """The times of one pipeline at one moment."""

    pipeline: Pipeline
    assessment: PipelineAssessment
    settings: Settings
    now: datetime

    def time_left(self, stage: StageAssessment) -> Iterator[timedelta]:
        """Yield the time until each maxRuntimeSeconds that applies to the stage is reached."""
        if stage.spec and stage.spec.max_runtime_seconds:
            limit = timedelta(seconds=stage.spec.max_runtime_seconds)
            yield limit - active_time(stage.status, self.now)
        if self.pipeline.spec.max_runtime_seconds:
            limit = timedelta(seconds=self.pipeline.spec.max_runtime_seconds)
            yield limit - self.assessment.active_time

    def is_overdue(self, stage: StageAssessment) -> bool:
        """Return whether the stage has run for as long as it may."""
        return any(remaining <= NOTHING for remaining in self.time_left(stage))

    def until_sidecars_stop(self, job: ObservedJob | None) -> timedelta | None:
        """Return the time until the containers that outlive the process are stopped; None if there are none."""
        if job is None or job.outlived_since is None:
            return None
        return job.outlived_since + SIDECAR_GRACE - self.now

    def until_replacement(self, stage: StageAssessment) -> timedelta | None:
        """Return the time until the attempt on a lost node is replaced; None if no node is lost, or it never is."""
        attempt = stage.status.running_attempt
        after = self.settings.replace_lost_after
        if attempt is None or after is None:
            return None
        observation = self.assessment.observation
        job = observation.jobs.get(attempt.job)
        if job is None or job.lost_since is None:
            return None
        if not is_kept_out(self.pipeline, stage, observation.workspace):
            return None
        return job.lost_since + after - self.now

    def replacement(self, stage: StageAssessment) -> Iterator[ReplaceLost]:
        """Yield the replacement of the attempt on a lost node, if it is due."""
        attempt = stage.status.running_attempt
        left = self.until_replacement(stage)
        if attempt and left is not None and left <= NOTHING:
            yield ReplaceLost(attempt.job)

    def _replacement_times(self, stage: StageAssessment) -> Iterator[timedelta]:
        left = self.until_replacement(stage)
        # A replacement that is due is an action of this plan.
        if left is not None and left > NOTHING:
            yield left

    def with_replacement(self, stage: StageAssessment) -> StageStatus:
        """Return the status of a running stage; on a lost node it says that the operator replaces the attempt."""
        status = stage.status
        after = self.settings.replace_lost_after
        is_replaced = self.until_replacement(stage) is not None
        if after is None or not is_replaced or status.reason is not Reason.NODE_LOST:
            return status
        # Not the time that is left, which would change the status all the time.
        plan = f"the operator replaces the attempt {after.total_seconds():.0f} s after the loss of the node"
        message = truncate_message(f"{status.message}; else {plan}")
        return status.model_copy(update={"message": message})

    def pending_left(self, stage: StageAssessment) -> timedelta | None:
        """Return the time until the running attempt has waited too long for a person; None if it does not wait."""
        attempt = stage.status.running_attempt
        if attempt is None or stage.spec is None or not stage.spec.max_pending_seconds:
            return None
        # An obstacle that has gone for a moment ends nothing.
        if attempt.blocked_at is None or self._obstacle(stage) is None:
            return None
        limit = timedelta(seconds=stage.spec.max_pending_seconds)
        return attempt.blocked_at + limit - self.now

    def _obstacle(self, stage: StageAssessment) -> Blocker | None:
        """Return what the running attempt waits for until a person mends it."""
        attempt = stage.status.running_attempt
        if attempt is None or stage.spec is None:
            return None
        job = self.assessment.observation.jobs.get(attempt.job)
        refusal = refusal_of(
            self.assessment.refusals, attempt, runs_server=stage.spec.runs_server
        )
        return obstacle(attempt, job, refusal)

    def overdue_wait(self, stage: StageAssessment) -> Blocker | None:
        """Return what the running attempt has waited for too long; None if it may go on."""
        left = self.pending_left(stage)
        blocker = self._obstacle(stage)
        if left is None or left > NOTHING or blocker is None or stage.spec is None:
            return None
        limit = f"{stage.spec.name}.maxPendingSeconds, {stage.spec.max_pending_seconds}"
        fix = "then retry, or raise the limit"
        message = f"{blocker.message}; the attempt has waited for {limit} s: {fix}"
        return Blocker(blocker.reason, message)

    def backoff_remaining(self, stage: StageAssessment) -> timedelta:
        """Return the time until the next attempt of the stage may start."""
        last = stage.status.last_attempt
        if last is None or not stage.status.counts(last):
            return NOTHING
        backoff = self.backoff(stage)
        if not backoff:
            return NOTHING
        ended = last.finished_at or self.now
        return ended + backoff - self.now

    def backoff(self, stage: StageAssessment) -> timedelta:
        """Return how long the stage waits after the end of its last attempt."""
        status = stage.status
        if status.last_attempt and status.last_attempt.outcome is Outcome.FAILED:
            return self.settings.backoff(status.failures_counted)
        if stage.spec and stage.spec.pods > 1:
            releases = releases_in_a_row(status)
            if releases:
                # Another attempt may wait for just the nodes that this attempt had.
                return self.settings.backoff(releases)
        return self.settings.interruption_backoff(fruitless_interruptions(status))

    def within_until(self, stage: StageAssessment) -> bool:
        """Return whether `finetune run --until` includes the stage."""
        until = self.settings.until
        if stage.spec is None or until is None:
            return True
        order = [kind.name for kind in STAGES]
        return order.index(stage.spec.name) <= order.index(until)

    def until_expiry(self) -> timedelta | None:
        """Return the time until a finished pipeline expires. None: it is not finished, or has no TTL."""
        ttl = self.pipeline.spec.ttl_seconds_after_finished
        status = self.pipeline.status
        # The written status must describe the current spec: an edit or a retry may have started the pipeline again.
        current = status.observed_generation == self.pipeline.generation
        if (
            ttl is None
            or status.finished_at is None
            or not current
            or self.pipeline.retry
        ):
            return None
        return status.finished_at + timedelta(seconds=ttl) - self.now

    def has_expired(self) -> bool:
        """Return whether the TTL of a finished pipeline has passed."""
        remaining = self.until_expiry()
        return remaining is not None and remaining <= NOTHING

    def requeue_times(
        self,
        stage: StageAssessment,
        planned: StageStatus,
        choice: CapacityChoice | None,
        server_actions: Sequence[Action],
    ) -> Iterator[timedelta]:
        """Yield the times after which the stage needs another reconcile, even if no event arrives."""
        attempt = planned.running_attempt
        if attempt:
            # Progress triggers no event.
            yield self.settings.poll_interval
            yield from self._replacement_times(stage)
            # A stop is final: no deadline and no other node class can change it.
            if attempt.stopping:
                # A Job whose creation was refused sends no event of its end.
                if attempt.job not in self.assessment.observation.jobs:
                    yield MISSING_JOB_INTERVAL
                return
            job = self.assessment.observation.jobs.get(attempt.job)
            sidecars = self.until_sidecars_stop(job)
            if sidecars is not None:
                # The process has ended: no deadline and no other node class concern it.
                yield sidecars
                return
            yield from self.time_left(stage)
            pending = self.pending_left(stage)
            if pending is not None:
                yield pending
            if choice:
                yield from choice.review_times(attempt, job)
        elif server_actions:
            switches = any(
                isinstance(action, SwitchTraffic) for action in server_actions
            )
            yield SWITCH_INTERVAL if switches else self.settings.poll_interval
        elif planned.reason is Reason.RETRYING and self.within_until(stage):
            yield self.backoff_remaining(stage)
        elif planned.state is StageState.PENDING:
            yield from self._claim_times(planned.reason)

    def _claim_times(self, reason: Reason) -> Iterator[timedelta]:
        if reason is Reason.VOLUME_NOT_READY:
            # No watch shows a claim that a user creates.
            yield self.settings.poll_interval
        elif reason is Reason.WORKSPACE_IN_USE:
            places = users_before(self.assessment.observation.workspace)
            yield self.settings.poll_interval * min(
                max(places, 1), LONGEST_WAIT_IN_LINE
            )
