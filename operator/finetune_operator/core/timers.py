"""The times of a pipeline: how long until something is due, and when to reconcile again. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from finetune_operator.api.conditions import Reason
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import Outcome, StageState, StageStatus
from finetune_operator.core.actions import Action, SwitchTraffic
from finetune_operator.core.assessment import PipelineAssessment, StageAssessment
from finetune_operator.core.capacity.choice import CapacityChoice
from finetune_operator.core.history import (
    active_time,
    fruitless_interruptions,
    releases_in_a_row,
)
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.core.settings import Settings

# The watch event of the operator's own write triggers no reconcile, so the switch of traffic has to be looked at.
SWITCH_INTERVAL = timedelta(seconds=1)
"""Time until the operator observes a switch of traffic."""
MISSING_JOB_INTERVAL = timedelta(seconds=1)
"""Time until the operator ends an attempt that it stops and whose Job it does not see."""
WAITS_FOR_CLAIM = frozenset({Reason.WORKSPACE_IN_USE, Reason.VOLUME_NOT_READY})
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

    def backoff_remaining(self, stage: StageAssessment) -> timedelta:
        """Return the time until the next attempt of the stage may start."""
        last = stage.status.last_attempt
        if last is None or not stage.status.counts(last):
            return NOTHING
        backoff = self._backoff(stage)
        if not backoff:
            return NOTHING
        ended = last.finished_at or self.now
        return ended + backoff - self.now

    def _backoff(self, stage: StageAssessment) -> timedelta:
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
            # A stop is final: no deadline and no other node class can change it.
            if attempt.stopping:
                # A Job whose creation was refused sends no event of its end.
                if attempt.job not in self.assessment.observation.jobs:
                    yield MISSING_JOB_INTERVAL
                return
            yield from self.time_left(stage)
            if choice:
                job = self.assessment.observation.jobs.get(attempt.job)
                yield from choice.review_times(attempt, job)
        elif server_actions:
            switches = any(
                isinstance(action, SwitchTraffic) for action in server_actions
            )
            yield SWITCH_INTERVAL if switches else self.settings.poll_interval
        elif planned.reason is Reason.RETRYING and self.within_until(stage):
            yield self.backoff_remaining(stage)
        elif planned.state is StageState.PENDING and planned.reason in WAITS_FOR_CLAIM:
            # No watch shows a claim that a user creates.
            yield self.settings.poll_interval
