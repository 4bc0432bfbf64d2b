"""The operator's Auto on one job: its own functions decide, and this file does what the operator does with them.

An attempt on spot nodes that finds none for `pending_limit` is stopped, and its class is given up until an attempt has
run on on-demand nodes. So is a class for which there is a `reason_to_give_up`. From its `return_time` on, an attempt on
on-demand nodes is stopped as soon as it `pays_to_return`.
"""

from dataclasses import dataclass, field, replace
from datetime import timedelta
from decimal import Decimal

from typing_extensions import override

from finetune_operator.api.placement import AUTO, ON_DEMAND, SPOT
from finetune_operator.core.capacity.decision import (
    Cause,
    Decision,
    Experience,
    Limits,
    NodeGroup,
    Offer,
)
from finetune_operator.core.capacity.policy import (
    decide,
    offers_in_turns,
    pays_to_return,
    pending_limit,
    reason_to_give_up,
    return_time,
)
from spot_bench.simulation import Capacity, Run

LIMITS = Limits()
LOOK = 2
"""Minutes between two looks of the operator at a running attempt: it reads its progress every 15 s."""
PROBE = 3
"""Minutes for which the empty pod holds the spot node, until the attempt is stopped and another one starts there."""
QUICK = 60
"""Minutes: an interruption that soon after the start counts towards giving up a class."""


@dataclass
class Auto:
    """What the operator remembers of a stage."""

    run: Run
    limits: Limits = LIMITS
    has_deadline: bool = True
    given_up: dict[NodeGroup, Cause] = field(default_factory=dict)
    interruptions: int = 0
    spot_minutes: int = 0
    on_demand_attempts: int = 0
    in_row: dict[NodeGroup, tuple[int, int]] = field(default_factory=dict)
    """Node class -> interruptions in a row: quick ones, and interruptions without a new checkpoint."""

    def __post_init__(self) -> None:
        job = self.run.job
        self.on_demand_offer = [
            Offer(NodeGroup(ON_DEMAND), Decimal(str(job.on_demand_price)))
        ]
        prices = {zone.node_class: Decimal(str(zone.price)) for zone in self.run.zones}
        self.spot_offers = [
            Offer(NodeGroup(SPOT, node_class), price)
            for node_class, price in prices.items()
        ]

    def attempt(self) -> None:
        """Run the next attempt, to its end."""
        decision = self.decide(self.given_up)
        if decision.capacity == SPOT:
            self.run_on_spot(decision)
        else:
            self.run_on_demand(decision)

    def decide(self, given_up: dict[NodeGroup, Cause]) -> Decision:
        """Ask the operator's function."""
        return decide(
            AUTO,
            self.spot_offers,
            self.on_demand_offer,
            self.experience(given_up),
            self.limits,
        )

    def experience(self, given_up: dict[NodeGroup, Cause]) -> Experience:
        """Return what the operator has measured. The duration of a restart is its default until there was one."""
        run = self.run
        experience = Experience(
            total=minutes(run.remaining() + run.done),
            remaining=minutes(run.remaining()),
            measured=run.measured,
            loss=minutes(run.job.checkpoint),
            interruptions=self.interruptions,
            spot_time=minutes(self.spot_minutes),
            given_up=given_up,
            on_demand_attempts=self.on_demand_attempts,
            deadline=minutes(run.job.deadline - run.now) if self.has_deadline else None,
        )
        if not run.measured:
            return experience
        return replace(experience, restart=minutes(run.job.restart))

    def run_on_spot(self, decision: Decision) -> None:
        """Wait for a spot node of the class, and run until it is taken."""
        run = self.run
        nodes = decision.offer.nodes
        experience = self.experience(self.given_up)
        turns = offers_in_turns(self.spot_offers, experience, self.limits)
        in_turns = decision.offer in turns
        limit = run.now + int(
            pending_limit(experience, self.limits, in_turns=in_turns) / minutes(1)
        )
        start, zone = run.first_zone(nodes.node_class)
        run.wait(min(start, limit))
        if start > limit:
            # A class that was given up again goes to the end of the order.
            self.given_up.pop(nodes, None)
            self.given_up[nodes] = Cause.NO_CAPACITY
            return
        self.take_spot(nodes, zone)

    def take_spot(self, nodes: NodeGroup, zone: Capacity) -> None:
        """Run on a spot node that is there, and remember how that ended."""
        run = self.run
        started = self.run.now
        done = self.run.done
        taken = run.spot(zone)
        self.spot_minutes += run.now - started
        self.on_demand_attempts = 0
        if not taken:
            return
        self.interruptions += 1
        quick, fruitless = self.in_row.get(nodes, (0, 0))
        quick = quick + 1 if run.now - started < QUICK else 0
        fruitless = fruitless + 1 if run.done == done else 0
        self.in_row[nodes] = quick, fruitless
        cause = reason_to_give_up(
            quick, fruitless, self.experience(self.given_up), self.limits
        )
        if cause:
            self.given_up[nodes] = cause

    def run_on_demand(self, decision: Decision) -> None:
        """Run on an on-demand node until the work is done, or spot nodes are to be tried again."""
        run = self.run
        self.on_demand_attempts += 1
        least = int(
            return_time(decision.cause, self.experience({}), self.limits) / minutes(1)
        )
        end = run.now + max(1, least)
        look = _after(run, end)
        while not look.is_done and not self.returns(look):
            end += LOOK
            look = _after(run, end)
        run.on_demand(end)
        self.given_up.clear()
        self.in_row.clear()

    def returns(self, look: Run) -> bool:
        """Return whether spot nodes are to be tried again, when the run is as far as `look`."""
        later = replace(self, run=look)
        return pays_to_return(later.decide({}), later.experience({}))


class AutoWithProbe(Auto):
    """Auto, if the operator asked for a spot node with an empty pod before it stops an attempt on on-demand nodes."""

    @override
    def returns(self, look: Run) -> bool:
        start, zone = look.first_zone()
        if start > look.now or not super().returns(look):
            return False
        self.run.cost += PROBE * zone.price / 60
        return True


def _after(run: Run, minute: int) -> Run:
    """Return a copy of the run after it was on an on-demand node until that minute."""
    copy = Run(run.job, run.zones, run.now, run.done, measured=run.measured)
    copy.on_demand(minute)
    return copy


def minutes(count: float) -> timedelta:
    """Return a duration."""
    return timedelta(minutes=count)


def auto(run: Run) -> None:
    """Run the job as the operator does with capacity Auto."""
    _finish(Auto(run))


def auto_with_probe(run: Run) -> None:
    """Run the job with a probe before each return to spot nodes."""
    _finish(AutoWithProbe(run))


def auto_without_deadline(run: Run) -> None:
    """Run the job as the operator does with capacity Auto and no deadline."""
    _finish(Auto(run, has_deadline=False))


def _finish(state: Auto) -> None:
    while not state.run.is_done:
        state.attempt()
