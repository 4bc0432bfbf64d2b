"""The choice of nodes for the next attempt of a stage, and when a running attempt moves to other nodes. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cached_property

from finetune_operator.api.conditions import Reason
from finetune_operator.api.placement import AUTO, ON_DEMAND, SPOT, PlacementDefaults
from finetune_operator.api.spec import PipelineSpec
from finetune_operator.api.stages.base import StageSpec
from finetune_operator.api.status import (
    AttemptStatus,
    PlacementStatus,
    StageStatus,
    truncate_message,
)
from finetune_operator.core.attempts.costs import seconds_until
from finetune_operator.core.capacity.decision import (
    Cause,
    Decision,
    Experience,
    Limits,
)
from finetune_operator.core.capacity.experience import (
    experience_of,
    limits_of,
    nodes_of,
    saves,
    wait_of,
)
from finetune_operator.core.capacity.message import message_of
from finetune_operator.core.capacity.nodes import offers
from finetune_operator.core.capacity.policy import (
    LONGEST_INCOMPLETE,
    LONGEST_PENDING,
    are_full,
    decide,
    offers_in_turns,
    pays_to_return,
    pending_limit,
    return_time,
)
from finetune_operator.core.observation import ObservedJob


@dataclass(frozen=True)
class CapacityChoice:
    """Chooses the node class for a stage's next attempt, at one moment. Results are cached."""

    pipeline: PipelineSpec
    stage: StageSpec
    statuses: Mapping[str, StageStatus]
    """Name of a stage -> its status."""
    defaults: PlacementDefaults
    now: datetime

    @cached_property
    def decision(self) -> Decision:
        """The node class of the next attempt."""
        return self._decide(self._experience)

    @cached_property
    def placement(self) -> PlacementStatus:
        """The choice for the status, with its reason."""
        message = message_of(
            self.decision,
            self._experience,
            self._limits,
            self.defaults,
            self.now.date(),
        )
        return PlacementStatus(
            capacity=self.decision.capacity,
            node_class=self.decision.offer.node_class,
            cause=self.decision.cause,
            message=truncate_message(message),
        )

    def place(self, attempt: AttemptStatus) -> AttemptStatus:
        """Return the attempt with its node class and prices."""
        choice = {
            "capacity": self.decision.capacity,
            "node_class": self.decision.offer.node_class,
            "price": self.decision.offer.price,
        }
        if self.decision.on_demand:
            choice["on_demand_price"] = self.decision.on_demand.price
        return attempt.model_copy(update=choice)

    @property
    def duration(self) -> timedelta | None:
        """The running time that the stage still needs. None: not known."""
        return self._experience.remaining

    def reason_to_move(
        self, attempt: AttemptStatus, job: ObservedJob | None
    ) -> Reason | None:
        """Return why the running attempt is to be replaced by one on other nodes, or None."""
        if job is None or _is_ending(job):
            return None
        if _is_due(self._pending_times(attempt, job)):
            return Reason.WAITING_FOR_CAPACITY
        if _is_due(self._incomplete_times(attempt, job)):
            return job.blocker.reason if job.blocker else Reason.WAITING_FOR_CAPACITY
        if _is_due(self._return_times(attempt)) and self._pays_to_return():
            return Reason.PLACEMENT_CHANGED
        return None

    def review_times(
        self, attempt: AttemptStatus, job: ObservedJob | None
    ) -> Iterator[timedelta]:
        """Yield the times after which the running attempt may have to move."""
        yield from self._pending_times(attempt, job)
        yield from self._incomplete_times(attempt, job)
        # A return that is due and did not pay may pay later. Any reconcile of the pipeline asks again.
        for time in self._return_times(attempt):
            if time > timedelta():
                yield time

    def _pending_times(
        self, attempt: AttemptStatus, job: ObservedJob | None
    ) -> Iterator[timedelta]:
        """Yield the time after which an attempt that finds no node gives up its class, if there is another one."""
        if job is None or job.started_at or _is_ending(job):
            return
        if job.unschedulable_since is None or job.blocker is None:
            return
        # A pod may also wait for a volume or a quota, which no other node class would give it.
        if job.blocker.reason is not Reason.WAITING_FOR_CAPACITY:
            return
        waited = self.now - job.unschedulable_since
        experience = self._experience_without_node(attempt, waited)
        if self._has_alternative(attempt, experience):
            yield self._pending_limit(attempt, experience) - waited

    def _incomplete_times(
        self, attempt: AttemptStatus, job: ObservedJob | None
    ) -> Iterator[timedelta]:
        """Yield the time after which an attempt gives up the nodes of some of its pods, because others have none.

        It does so even if it can only start again on the same nodes: two such attempts would wait for each other.
        """
        if (
            job is None
            or job.incomplete_since is None
            or attempt.started_at
            or _is_ending(job)
        ):
            return
        waited = self.now - job.incomplete_since
        limit = self._pending_limit(
            attempt, self._experience_without_node(attempt, waited)
        )
        yield min(limit, LONGEST_INCOMPLETE) - waited

    def _experience_without_node(
        self, attempt: AttemptStatus, waited: timedelta
    ) -> Experience:
        """Return the experience at the time when an attempt began to wait for a node.

        While it waits, a deadline leaves less and less. The deadline bounds the wait for spot nodes only, and only
        while on-demand nodes may be free.
        """
        experience = self._experience
        others_full = are_full(offers(self.stage, ON_DEMAND, self.defaults), experience)
        if attempt.capacity == ON_DEMAND or others_full:
            return replace(experience, deadline=None)
        if experience.deadline is None:
            return experience
        return replace(experience, deadline=experience.deadline + waited)

    def _pending_limit(
        self, attempt: AttemptStatus, experience: Experience
    ) -> timedelta:
        """Return how long the attempt waits for a node; twice as long as before if all classes were full."""
        nodes = nodes_of(attempt)
        same_capacity = offers(self.stage, attempt.capacity or "", self.defaults)
        turns = offers_in_turns(same_capacity, experience, self._limits)
        in_turns = any(offer.nodes == nodes for offer in turns)
        limit = pending_limit(experience, self._limits, in_turns=in_turns)
        if in_turns or nodes not in experience.given_up:
            return limit
        last_wait = wait_of(self.statuses[self.stage.name], nodes)
        return max(limit, min(2 * last_wait, LONGEST_PENDING))

    def _has_alternative(self, attempt: AttemptStatus, experience: Experience) -> bool:
        """Return whether another class would be chosen if this one had no capacity."""
        nodes = nodes_of(attempt)
        given_up = dict(experience.given_up)
        # Last in the order in which classes were given up, even if it was given up before.
        given_up.pop(nodes, None)
        given_up[nodes] = Cause.NO_CAPACITY
        decision = self._decide(replace(experience, given_up=given_up))
        return decision.offer.nodes != nodes

    def _return_times(self, attempt: AttemptStatus) -> Iterator[timedelta]:
        """Yield the time after which an attempt on on-demand nodes may return to spot nodes."""
        if not attempt.started_at or not self._can_resume():
            return
        if self.stage.placement.capacity == AUTO and attempt.capacity == ON_DEMAND:
            needed = return_time(self._cause(), self._experience, self._limits)
            ran = timedelta(seconds=seconds_until(self.now, attempt))
            yield needed - ran

    def _can_resume(self) -> bool:
        """Return whether a stopped attempt goes on where it was. No other attempt is stopped for money."""
        status = self.statuses[self.stage.name]
        current = [
            attempt
            for attempt in status.attempts
            if attempt.identity == status.identity
        ]
        return saves(self.stage, current)

    def _cause(self) -> Cause:
        """Return why the newest attempt runs on its nodes."""
        placement = self.statuses[self.stage.name].placement
        # Another version of the operator may have written a cause that this version does not know.
        if placement is None or placement.cause not in {*Cause}:
            return Cause.NO_CAPACITY
        return Cause(placement.cause)

    def _pays_to_return(self) -> bool:
        experience = replace(self._experience, given_up={})
        return pays_to_return(self._decide(experience), experience)

    def _decide(self, experience: Experience) -> Decision:
        spot = offers(self.stage, SPOT, self.defaults)
        on_demand = offers(self.stage, ON_DEMAND, self.defaults)
        return decide(
            self.stage.placement.capacity, spot, on_demand, experience, self._limits
        )

    @cached_property
    def _experience(self) -> Experience:
        return experience_of(
            self.pipeline, self.stage, self.statuses, self.defaults, self.now
        )

    @cached_property
    def _limits(self) -> Limits:
        return limits_of(self.stage, self.defaults)


def _is_due(times: Iterator[timedelta]) -> bool:
    return any(time <= timedelta() for time in times)


def _is_ending(job: ObservedJob) -> bool:
    """Return whether the process has ended or is evicted, but its Job has not ended yet: there is nothing to stop."""
    return job.exit_code is not None or bool(job.disruption)
