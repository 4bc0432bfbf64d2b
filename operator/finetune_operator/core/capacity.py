"""Where the attempts of a stage run: the choice for the next one, and when a running one is to move. Pure."""

from collections.abc import Callable, Iterator
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
from finetune_operator.core.auto import (
    LONGEST_INCOMPLETE,
    LONGEST_PENDING,
    Cause,
    Decision,
    Experience,
    Limits,
    are_full,
    decide,
    offers_in_turns,
    pays_to_return,
    pending_limit,
    return_time,
)
from finetune_operator.core.experience import class_of, experience_of, limits_of, saves, wait_of
from finetune_operator.core.observation import ObservedJob
from finetune_operator.core.placement import class_name, offers
from finetune_operator.core.placement_message import message_of


@dataclass(frozen=True)
class CapacityChoice:
    """The choice of nodes for the attempts of one stage, at one moment: what it is asked twice, it computes once."""

    pipeline: PipelineSpec
    stage: StageSpec
    statuses: Callable[[str], StageStatus]
    """Name of a stage -> its status."""
    defaults: PlacementDefaults
    now: datetime

    @cached_property
    def decision(self) -> Decision:
        """The node class of the next attempt."""
        return self._decide(self._experience)

    @cached_property
    def placement(self) -> PlacementStatus:
        """The same for the status, with the reason."""
        message = message_of(
            self.decision, self._experience, self._limits, self.defaults, self.now.date()
        )
        return PlacementStatus(
            capacity=self.decision.capacity,
            node_class=class_name(self.decision.offer),
            cause=self.decision.cause,
            message=truncate_message(message),
        )

    def place(self, attempt: AttemptStatus) -> AttemptStatus:
        """Return the attempt with its node class and prices."""
        on_demand = self.decision.on_demand
        chosen = {
            "capacity": self.decision.capacity,
            "node_class": class_name(self.decision.offer),
            "price": self.decision.offer.price,
            "on_demand_price": on_demand.price if on_demand else None,
        }
        return attempt.model_copy(update=chosen)

    @property
    def duration(self) -> timedelta | None:
        """The running time that the stage still needs. None: not known."""
        return self._experience.remaining

    def reason_to_move(self, attempt: AttemptStatus, job: ObservedJob | None) -> Reason | None:
        """Return why the running attempt is to be replaced by one on other nodes, or None."""
        if job is None or _is_ending(job):
            return None
        if any(time <= timedelta() for time in self._pending_times(attempt, job)):
            return Reason.WAITING_FOR_CAPACITY
        if any(time <= timedelta() for time in self._incomplete_times(attempt, job)):
            return job.blocker.reason if job.blocker else Reason.WAITING_FOR_CAPACITY
        due = any(time <= timedelta() for time in self._return_times(attempt))
        return Reason.PLACEMENT_CHANGED if due and self._pays_to_return() else None

    def review_times(self, attempt: AttemptStatus, job: ObservedJob | None) -> Iterator[timedelta]:
        """Yield the times after which the running attempt may have to move."""
        yield from self._pending_times(attempt, job)
        yield from self._incomplete_times(attempt, job)
        # What is due and did not pay may pay later; it is looked at again whenever the pipeline is.
        yield from (time for time in self._return_times(attempt) if time > timedelta())

    def _pending_times(
        self, attempt: AttemptStatus, job: ObservedJob | None
    ) -> Iterator[timedelta]:
        """Yield the time after which an attempt that finds no node gives up its class, if there is another one."""
        if (
            job is None
            or job.unschedulable_since is None
            or job.blocker is None
            or job.started_at
            or _is_ending(job)
        ):
            return
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

        It does so also where it can only start again on the same nodes: two such attempts would wait for each other.
        """
        if job is None or job.incomplete_since is None or attempt.started_at or _is_ending(job):
            return
        waited = self.now - job.incomplete_since
        limit = self._pending_limit(attempt, self._experience_without_node(attempt, waited))
        yield min(limit, LONGEST_INCOMPLETE) - waited

    def _experience_without_node(self, attempt: AttemptStatus, waited: timedelta) -> Experience:
        """Return the experience by which an attempt waits for a node: that of the time when it began to wait.

        While it waits, a deadline leaves less and less. It bounds the wait for spot nodes only, and only while there
        may be others.
        """
        experience = self._experience
        others_full = are_full(offers(self.stage, ON_DEMAND, self.defaults), experience)
        if attempt.capacity == ON_DEMAND or others_full:
            return replace(experience, deadline=None)
        return (
            experience
            if experience.deadline is None
            else replace(experience, deadline=experience.deadline + waited)
        )

    def _pending_limit(self, attempt: AttemptStatus, experience: Experience) -> timedelta:
        """Return how long the attempt waits for a node; twice as long as before where all classes were full."""
        turns = offers_in_turns(
            offers(self.stage, attempt.capacity or "", self.defaults), experience, self._limits
        )
        in_turns = any(one.node_class == class_of(attempt) for one in turns)
        limit = pending_limit(experience, self._limits, in_turns=in_turns)
        if in_turns or class_of(attempt) not in experience.given_up:
            return limit
        return max(
            limit,
            min(2 * wait_of(self.statuses(self.stage.name), class_of(attempt)), LONGEST_PENDING),
        )

    def _has_alternative(self, attempt: AttemptStatus, experience: Experience) -> bool:
        """Return whether another class would be chosen if this one had no capacity."""
        name = class_of(attempt)
        earlier = {one: cause for one, cause in experience.given_up.items() if one != name}
        given_up = {**earlier, name: Cause.NO_CAPACITY}  # in the order in which they were given up
        return self._decide(replace(experience, given_up=given_up)).offer.node_class != name

    def _return_times(self, attempt: AttemptStatus) -> Iterator[timedelta]:
        """Yield the time after which it is asked whether an attempt on on-demand nodes is better on spot nodes."""
        if not attempt.started_at or not self._can_resume():
            return
        if self.stage.placement.capacity == AUTO and attempt.capacity == ON_DEMAND:
            needed = return_time(self._cause(), self._experience, self._limits)
            yield needed - (self.now - attempt.started_at)

    def _can_resume(self) -> bool:
        """Return whether an attempt that is stopped goes on where it was: no other one is stopped for money."""
        status = self.statuses(self.stage.name)
        return saves(
            self.stage, [one for one in status.attempts if one.identity == status.identity]
        )

    def _cause(self) -> Cause:
        """Return why the newest attempt runs where it does; another version may have written another cause."""
        placement = self.statuses(self.stage.name).placement
        known = placement and placement.cause in {*Cause}
        return Cause(placement.cause) if placement and known else Cause.NO_CAPACITY

    def _pays_to_return(self) -> bool:
        experience = replace(self._experience, given_up={})
        return pays_to_return(self._decide(experience), experience)

    def _decide(self, experience: Experience) -> Decision:
        spot, on_demand = (
            offers(self.stage, capacity, self.defaults) for capacity in (SPOT, ON_DEMAND)
        )
        return decide(self.stage.placement.capacity, spot, on_demand, experience, self._limits)

    @cached_property
    def _experience(self) -> Experience:
        return experience_of(self.pipeline, self.stage, self.statuses, self.defaults, self.now)

    @cached_property
    def _limits(self) -> Limits:
        return limits_of(self.stage, self.defaults)


def _is_ending(job: ObservedJob) -> bool:
    """Return whether the process has ended or is evicted, and only its Job has not yet: that is no stop of ours."""
    return job.exit_code is not None or bool(job.disruption)
