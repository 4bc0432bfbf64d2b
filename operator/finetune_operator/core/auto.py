"""The capacity type of the next attempt: pure, from prices, what a stage has lived through, and its deadline.

`bench/spot.py` runs this very code against traces of spot capacity.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from enum import StrEnum
from math import exp, expm1

from finetune_operator.api.placement import AUTO, ON_DEMAND, SPOT

HOUR = timedelta(hours=1)
PRIOR_HOURS = 10.0
"""Weight of the expected rate of interruptions, as hours on spot nodes that had it."""
PRIOR_RATE = 0.05
"""Interruptions per hour of a node class without a rate of its own: one in 20 hours."""
PENDING = timedelta(minutes=10)
"""Time for which a pod may find no node, where neither the user nor a deadline says more."""
MIN_PENDING = timedelta(minutes=3)
"""Least time for which a pod waits, if there is as much to spare: an autoscaler needs it for a node that there is."""
LONGEST_PENDING = timedelta(hours=2)
"""Longest time for which a pod waits when all classes were full, one after the other."""
LONGEST_INCOMPLETE = timedelta(minutes=20)
"""Longest time for which some pods of an attempt hold nodes while others have none. The processes of those that run
wait half an hour for the others."""
PENDING_SHARE = 0.9
"""Part of the spare time that one wait for spot nodes may take. `bench/spot.py`: more or less costs more."""
SIMILAR_COST = Decimal("1.2")
"""Classes whose expected cost is at most this multiple of the lowest wait in turns. `bench/spot.py`: 1.3 costs more
than waiting for the cheapest one alone."""
IN_ROW = 3
"""Interruptions in a row after which a node class is given up, where neither the user nor a deadline says more."""
RESERVE_SHARE = 0.03
"""Part of the remaining time that a deadline keeps in reserve: the measured speed varies."""
ESTIMATE_SHARE = 0.25
"""The same before the speed is measured: work may take a quarter more than an estimate that is 20 % too low."""
GAIN = 2.0
"""A running attempt is moved to spot nodes where it saves this multiple of what the move costs."""
MAX_DOUBLINGS = 10
SHORTEST_INTERVAL = 1e-6
"""Hours between two checkpoints, at least: their limit is what is meant."""
MAX_EXPONENT = 15.0
"""From here on, an estimate is not worth a number: the cost is a million times the price of the work."""


class Cause(StrEnum):
    """Why a node class was chosen."""

    REQUESTED = "Requested"
    """The user has chosen the capacity."""
    REQUESTED_DEARER = "RequestedDearer"
    """The user has chosen Spot, which costs more than on-demand."""
    LOWER_COST = "LowerCost"
    """Its expected cost is the lowest."""
    PRICE_UNKNOWN = "PriceUnknown"
    """Spot is assumed to cost less, because a price is missing."""
    SHORT_STAGE = "ShortStage"
    """The stage is too short to gain from spot."""
    DEADLINE = "Deadline"
    """There is no time to spare for an interruption."""
    INTERRUPTIONS = "Interruptions"
    """Spot was interrupted too often in a row."""
    NO_CAPACITY = "NoCapacity"
    """No node of the other capacity was found for too long."""
    NO_PROGRESS = "NoProgress"
    """Interrupted attempts in a row have made no new durable step."""
    LAST_INTERRUPTION = "LastInterruption"
    """The next interruption would fail the stage."""


@dataclass(frozen=True)
class Offer:
    """A node class on which the stage can run, and its price per hour for the stage's pods."""

    node_class: str
    price: Decimal | None = None
    interruptions_per_hour: float | None = None


@dataclass(frozen=True)
class Limits:
    """When a node class is given up. None: a deadline decides by its spare time; without one, IN_ROW or PENDING."""

    interruptions: int | None = None
    """Interruptions in a row, each within an hour of its start."""
    pending: timedelta | None = None
    """Time for which a pod finds no node."""
    fruitless: int | None = None
    """Interruptions in a row without a new durable step."""
    short_stage: timedelta = timedelta(minutes=30)
    return_after: timedelta = timedelta(minutes=30)
    """Running time on on-demand nodes before spot is tried again. Without a deadline it doubles with each attempt."""


@dataclass(frozen=True)
class Experience:
    """What the attempts of a stage have measured."""

    total: timedelta | None = None
    """Running time that the whole stage needs. None: not known."""
    remaining: timedelta | None = None
    """Running time that it still needs."""
    measured: bool = False
    """Whether these two are from the stage's own speed. Else they are an estimate."""
    restart: timedelta = timedelta(minutes=3)
    """From the start of an attempt to its first new step."""
    loss: timedelta = timedelta(seconds=90)
    """Most work that one interruption loses, and twice what it loses on average: the time between two checkpoints."""
    interruptions: int = 0
    spot_time: timedelta = timedelta()
    """Running time on spot nodes."""
    given_up: Mapping[str, Cause] = field(default_factory=dict)
    """Node class -> why it is not tried for a while, in the order in which these were given up."""
    on_demand_attempts: int = 0
    """Attempts on on-demand nodes since the last one that ran on spot nodes."""
    deadline: timedelta | None = None
    """Time until the deadline. None: there is none."""
    later_stages: timedelta = timedelta()
    """Expected running time of the stages after this one."""
    interruptions_left: int | None = None
    """Interruptions that the stage may still have. None: any number."""

    @property
    def spare(self) -> timedelta | None:
        """Return the time that may be spent without a step, so that the deadline is kept after one more interruption.

        That takes two restarts, the lost work, and a reserve for the error of the remaining time. None: there is no
        deadline, or the remaining time is not known.
        """
        if self.deadline is None or self.remaining is None:
            return None
        reserve = (RESERVE_SHARE if self.measured else ESTIMATE_SHARE) * self.remaining
        later = (1 + ESTIMATE_SHARE) * self.later_stages
        return self.deadline - self.remaining - reserve - later - self.loss - 2 * self.restart

    def has_time_for_interruption(self) -> bool:
        """Return whether the deadline can be kept after an interruption."""
        return self.deadline is None or (self.spare is not None and self.spare > timedelta())


@dataclass(frozen=True)
class Decision:
    """The node class of an attempt, and why."""

    capacity: str
    offer: Offer
    cause: Cause
    spot: "Estimate | None" = None
    on_demand: "Estimate | None" = None


@dataclass(frozen=True)
class Estimate:
    """Expected cost of the remaining work on one node class; of an hour of work where its duration is not known."""

    price: Decimal
    cost: Decimal
    rate: float = 0.0
    """Interruptions per hour."""


def decide(
    capacity: str,
    spot: Sequence[Offer],
    on_demand: Sequence[Offer],
    experience: Experience,
    limits: Limits,
) -> Decision:
    """Return the node class of the next attempt. `spot` and `on_demand` have at least one offer each."""
    if capacity != AUTO:
        return _requested(capacity, spot, on_demand, experience, limits)
    spot_offer = _next(spot, experience, limits)
    on_demand_offer = _next(on_demand, experience, limits)
    estimates = (
        estimate(spot_offer, experience) if spot_offer else None,
        estimate_on_demand(on_demand_offer or _cheapest(on_demand, experience), experience),
    )
    cause = _cause_for_on_demand(*estimates, experience, limits)
    if cause is None and spot_offer is None:
        cause = _last_cause(spot, experience)
    if cause and are_full(on_demand, experience):
        return _without_on_demand(spot, on_demand, spot_offer, estimates, experience)
    if cause or spot_offer is None:
        offer = on_demand_offer or _cheapest(on_demand, experience)
        return Decision(ON_DEMAND, offer, cause or Cause.NO_CAPACITY, *estimates)
    known = estimates[0] and estimates[1]
    return Decision(
        SPOT, spot_offer, Cause.LOWER_COST if known else Cause.PRICE_UNKNOWN, *estimates
    )


def are_full(offers: Sequence[Offer], experience: Experience) -> bool:
    """Return whether all of these classes were given up because they had no node."""
    return all(experience.given_up.get(one.node_class) is Cause.NO_CAPACITY for one in offers)


def _requested(
    capacity: str,
    spot: Sequence[Offer],
    on_demand: Sequence[Offer],
    experience: Experience,
    limits: Limits,
) -> Decision:
    """Return the decision for a capacity that the user has chosen; its classes take turns where all are full."""
    spot_offer = _next(spot, experience, limits) or _first_given_up(spot, experience)
    on_demand_offer = _next(on_demand, experience, limits) or _first_given_up(on_demand, experience)
    on_spot, other = (
        estimate(spot_offer, experience),
        estimate_on_demand(on_demand_offer, experience),
    )
    if capacity == ON_DEMAND:
        return Decision(ON_DEMAND, on_demand_offer, Cause.REQUESTED, on_spot, other)
    dearer = on_spot is not None and other is not None and on_spot.cost > other.cost
    return Decision(
        capacity, spot_offer, Cause.REQUESTED_DEARER if dearer else Cause.REQUESTED, on_spot, other
    )


def _without_on_demand(
    spot: Sequence[Offer],
    on_demand: Sequence[Offer],
    spot_offer: Offer | None,
    estimates: "tuple[Estimate | None, Estimate | None]",
    experience: Experience,
) -> Decision:
    """Return the decision where no on-demand class has nodes: any spot class, or else the one first given up."""
    offer = spot_offer or _first_given_up((*spot, *on_demand), experience)
    return Decision(ON_DEMAND if offer in on_demand else SPOT, offer, Cause.NO_CAPACITY, *estimates)


def _first_given_up(offers: Sequence[Offer], experience: Experience) -> Offer:
    """Return the offer that was given up first; all of them were."""
    order = {name: number for number, name in enumerate(experience.given_up)}
    return min(offers, key=lambda one: order[one.node_class])


def _last_cause(offers: Sequence[Offer], experience: Experience) -> Cause:
    """Return why the last of the offers was given up."""
    names = {one.node_class for one in offers}
    return [cause for name, cause in experience.given_up.items() if name in names][-1]


def _cause_for_on_demand(
    spot: Estimate | None, on_demand: Estimate | None, experience: Experience, limits: Limits
) -> Cause | None:
    """Return why the attempt must not run on spot nodes, or None. A deadline comes before money."""
    if not experience.has_time_for_interruption():
        return Cause.DEADLINE
    if experience.interruptions_left is not None and experience.interruptions_left <= 0:
        return Cause.LAST_INTERRUPTION
    if experience.total is not None and experience.total < limits.short_stage:
        return Cause.SHORT_STAGE
    if spot and on_demand and spot.cost >= on_demand.cost:
        return Cause.LOWER_COST
    return None


def _next(offers: Sequence[Offer], experience: Experience, limits: Limits) -> Offer | None:
    """Return the cheapest offer that was not given up; before a dear one, those in turns that wait for nodes."""
    left = [offer for offer in offers if offer.node_class not in experience.given_up]
    turns = offers_in_turns(offers, experience, limits)
    if not turns:
        return _cheapest(left, experience) if left else None
    untried = [offer for offer in turns if offer in left]
    return _cheapest(untried, experience) if untried else _first_given_up(turns, experience)


def offers_in_turns(
    offers: Sequence[Offer], experience: Experience, limits: Limits
) -> Sequence[Offer]:
    """Return the offers at a similar expected cost that may have nodes, if a deadline leaves time to wait for each.

    Waiting for only one of them would cost nothing but time, and find a node later.
    """
    if limits.pending or experience.spare is None:
        return []
    lowest = estimate(_cheapest(offers, experience), experience)
    similar = [one for one in offers if _costs_similar(estimate(one, experience), lowest)]
    turns = [
        one
        for one in similar
        if experience.given_up.get(one.node_class) in (None, Cause.NO_CAPACITY)
    ]
    # The dearer ones are tried, too, before the spare time ends.
    dearer = [
        one for one in offers if one not in similar and one.node_class not in experience.given_up
    ]
    has_time = experience.spare >= PENDING * (1 + len(dearer))
    return turns if has_time and len(turns) > 1 else []


def _costs_similar(one: "Estimate | None", lowest: "Estimate | None") -> bool:
    if one is None or lowest is None:
        return one is lowest
    return one.cost <= SIMILAR_COST * lowest.cost


def _cheapest(offers: Sequence[Offer], experience: Experience) -> Offer:
    """Return the first of the offers with the lowest expected cost; one without a price comes last."""
    return min(offers, key=lambda offer: _expected_cost(offer, experience))


def _expected_cost(offer: Offer, experience: Experience) -> tuple[bool, Decimal, Decimal]:
    expected = estimate(offer, experience)
    # Where neither of two would ever end, the price decides.
    return (False, expected.cost, expected.price) if expected else (True, Decimal(), Decimal())


def estimate(offer: Offer, experience: Experience) -> Estimate | None:
    """Return the expected cost on spot nodes, or None without a price.

    With `r` interruptions an hour, checkpoints every `c` hours and restarts of `R` hours, `c` hours of work take
    exp(r R) (exp(r c) - 1) / r (J. T. Daly, "A higher order estimate of the optimum checkpoint interval", 2006).
    """
    if offer.price is None:
        return None
    rate = interruption_rate(offer, experience)
    work, restart = _work_hours(experience), experience.restart / HOUR
    between = min(work, max(experience.loss / HOUR, SHORTEST_INTERVAL))
    exponent = rate * (between + restart)
    if exponent > MAX_EXPONENT:
        return Estimate(offer.price, Decimal("Infinity"), rate)
    factor = exp(rate * restart) * expm1(rate * between) / (rate * between) if rate > 0 else 1.0
    return Estimate(offer.price, offer.price * Decimal(work * factor), rate)


def estimate_on_demand(offer: Offer, experience: Experience) -> Estimate | None:
    """Return the cost on on-demand nodes, or None without a price."""
    return (
        None
        if offer.price is None
        else Estimate(offer.price, offer.price * Decimal(_work_hours(experience)))
    )


def _work_hours(experience: Experience) -> float:
    # Where nothing is left, an hour of work shows which one costs less.
    return experience.remaining / HOUR if experience.remaining else 1.0


def interruption_rate(offer: Offer, experience: Experience) -> float:
    """Return interruptions per hour: those that were expected, and, with time, those that were observed."""
    prior = PRIOR_RATE if offer.interruptions_per_hour is None else offer.interruptions_per_hour
    return (prior * PRIOR_HOURS + experience.interruptions) / (
        PRIOR_HOURS + experience.spot_time / HOUR
    )


def pending_limit(experience: Experience, limits: Limits, *, in_turns: bool = False) -> timedelta:
    """Return how long a pod may find no node before its class is given up, by what was known when the attempt began.

    With a deadline, waiting costs nothing but time: most of what there is to spare. Where another class at a similar
    price has its turn next, `offers_in_turns`, it is no longer than without a deadline.
    """
    spare = experience.spare
    if spare is None or in_turns:
        return limits.pending or PENDING
    limit = max(timedelta(), min(MIN_PENDING, spare), PENDING_SHARE * spare)
    return min(limits.pending, limit) if limits.pending else limit


def reason_to_give_up(
    interruptions: int, fruitless: int, experience: Experience, limits: Limits
) -> Cause | None:
    """Return why a node class is given up after interruptions in a row, or None.

    With a deadline, an interruption costs nothing but a restart: spot nodes stay right while there is time to spare.
    """
    default = IN_ROW if experience.deadline is None else None
    if _reaches(interruptions, limits.interruptions or default):
        return Cause.INTERRUPTIONS
    return Cause.NO_PROGRESS if _reaches(fruitless, limits.fruitless or default) else None


def _reaches(count: int, limit: int | None) -> bool:
    return limit is not None and count >= limit


def return_time(cause: Cause, experience: Experience, limits: Limits) -> timedelta:
    """Return the running time from which on an attempt on on-demand nodes, with its cause, may return to spot nodes.

    Where only time was missing, no time need pass. A deadline bounds the number of returns by itself: each takes time.
    """
    if cause is Cause.DEADLINE:
        return timedelta()
    if experience.deadline is not None:
        return limits.return_after
    return limits.return_after * float(
        2 ** min(max(0, experience.on_demand_attempts - 1), MAX_DOUBLINGS)
    )


def pays_to_return(decision: Decision, experience: Experience) -> bool:
    """Return whether a running attempt on on-demand nodes is to be replaced by one with this decision."""
    if (
        decision.capacity != SPOT
        or not decision.spot
        or not decision.on_demand
        or experience.remaining is None
    ):
        return False
    move = decision.on_demand.price * Decimal(2 * experience.restart / HOUR)
    return decision.on_demand.cost - decision.spot.cost > move * Decimal(GAIN)
