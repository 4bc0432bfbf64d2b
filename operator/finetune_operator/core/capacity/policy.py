"""The policy: spot or on-demand nodes for the next attempt, by prices, experience and the deadline. Pure.

`bench/spot.py` runs this very code against traces of spot capacity.
"""

from collections.abc import Sequence
from datetime import timedelta
from decimal import Decimal
from math import exp, expm1

from finetune_operator.api.placement import AUTO, ON_DEMAND, SPOT
from finetune_operator.core.capacity.decision import (
    Cause,
    Decision,
    Estimate,
    Estimates,
    Experience,
    Limits,
    Offer,
)

HOUR = timedelta(hours=1)
PRIOR_HOURS = 10.0
"""Weight of the expected rate of interruptions, in hours on spot nodes with that rate."""
PRIOR_RATE = 0.05
"""Interruptions per hour of a node class without a rate of its own: one in 20 hours."""
PENDING = timedelta(minutes=10)
"""Time for which a pod may find no node, if neither the user nor a deadline says more."""
# An autoscaler needs minutes for a node, even if the cloud has one.
MIN_PENDING = timedelta(minutes=3)
"""Least time for which a pod waits, if there is as much to spare."""
LONGEST_PENDING = timedelta(hours=2)
"""Longest time for which a pod waits when all classes were full, one after the other."""
# The processes that run wait half an hour for the others; the operator decides before they fail.
LONGEST_INCOMPLETE = timedelta(minutes=20)
"""Longest time for which some pods of an attempt hold nodes while others have none."""
# Found by bench/spot.py: more or less costs more.
PENDING_SHARE = 0.9
"""Part of the spare time that one wait for spot nodes may take."""
# Found by bench/spot.py: with 1.3, turns cost more than waiting for the cheapest class alone.
SIMILAR_COST = Decimal("1.2")
"""Classes wait in turns if their expected cost is at most this multiple of the lowest cost."""
IN_ROW = 3
"""Interruptions in a row after which a node class is given up, if neither the user nor a deadline says more."""
# A move that saves just its own cost would only add risk.
GAIN = 2.0
"""The operator moves a running attempt to spot nodes if the move saves this multiple of its cost."""
# 1,024 times the first interval: longer than any training, and no overflow.
MAX_DOUBLINGS = 10
# The formula divides by the interval; it has a limit at zero.
SHORTEST_INTERVAL = 1e-6
"""Hours between two checkpoints, at least."""
# From here on the cost is a million times the price of the work, and exp would overflow later.
MAX_EXPONENT = 15.0
"""Largest exponent for which an expected cost is computed."""


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
    on_demand_choice = on_demand_offer or _cheapest(on_demand, experience)
    estimates = Estimates(
        spot=estimate(spot_offer, experience) if spot_offer else None,
        on_demand=estimate_on_demand(on_demand_choice, experience),
    )
    cause = _cause_for_on_demand(estimates, experience, limits)
    if cause is None and spot_offer is None:
        cause = _last_cause(spot, experience)
    if cause and are_full(on_demand, experience):
        return _without_on_demand(spot, on_demand, spot_offer, estimates, experience)
    if cause or spot_offer is None:
        return Decision(
            ON_DEMAND, on_demand_choice, cause or Cause.NO_CAPACITY, *estimates
        )
    if estimates.spot is None or estimates.on_demand is None:
        return Decision(SPOT, spot_offer, Cause.PRICE_UNKNOWN, *estimates)
    return Decision(SPOT, spot_offer, Cause.LOWER_COST, *estimates)


def are_full(offers: Sequence[Offer], experience: Experience) -> bool:
    """Return whether all of these classes were given up because they had no node."""
    causes = [experience.given_up.get(offer.nodes) for offer in offers]
    return all(cause is Cause.NO_CAPACITY for cause in causes)


def _requested(
    capacity: str,
    spot: Sequence[Offer],
    on_demand: Sequence[Offer],
    experience: Experience,
    limits: Limits,
) -> Decision:
    """Return the decision for a capacity that the user has chosen; its classes take turns if all are full."""
    spot_offer = _next(spot, experience, limits) or _first_given_up(spot, experience)
    on_demand_offer = _next(on_demand, experience, limits) or _first_given_up(
        on_demand, experience
    )
    estimates = Estimates(
        spot=estimate(spot_offer, experience),
        on_demand=estimate_on_demand(on_demand_offer, experience),
    )
    if capacity == ON_DEMAND:
        return Decision(ON_DEMAND, on_demand_offer, Cause.REQUESTED, *estimates)
    cause = Cause.REQUESTED
    if (
        estimates.spot
        and estimates.on_demand
        and estimates.spot.cost > estimates.on_demand.cost
    ):
        cause = Cause.REQUESTED_DEARER
    return Decision(capacity, spot_offer, cause, *estimates)


def _without_on_demand(
    spot: Sequence[Offer],
    on_demand: Sequence[Offer],
    spot_offer: Offer | None,
    estimates: Estimates,
    experience: Experience,
) -> Decision:
    """Return the decision if no on-demand class has nodes: any spot class, or else the class first given up."""
    offer = spot_offer or _first_given_up((*spot, *on_demand), experience)
    capacity = ON_DEMAND if offer in on_demand else SPOT
    return Decision(capacity, offer, Cause.NO_CAPACITY, *estimates)


def _first_given_up(offers: Sequence[Offer], experience: Experience) -> Offer:
    """Return the offer that was given up first; all of them were."""
    order = list(experience.given_up)
    return min(offers, key=lambda offer: order.index(offer.nodes))


def _last_cause(offers: Sequence[Offer], experience: Experience) -> Cause:
    """Return why the last of the offers was given up."""
    groups = {offer.nodes for offer in offers}
    causes = [cause for nodes, cause in experience.given_up.items() if nodes in groups]
    return causes[-1]


def _cause_for_on_demand(
    estimates: Estimates, experience: Experience, limits: Limits
) -> Cause | None:
    """Return why the attempt must not run on spot nodes, or None."""
    # A deadline and a budget come before money: a late or failed training is worth nothing.
    if not experience.has_time_for_interruption():
        return Cause.DEADLINE
    if experience.interruptions_left is not None and experience.interruptions_left <= 0:
        return Cause.LAST_INTERRUPTION
    if experience.total is not None and experience.total < limits.short_stage:
        return Cause.SHORT_STAGE
    if (
        estimates.spot
        and estimates.on_demand
        and estimates.spot.cost >= estimates.on_demand.cost
    ):
        return Cause.LOWER_COST
    return None


def _next(
    offers: Sequence[Offer], experience: Experience, limits: Limits
) -> Offer | None:
    """Return the cheapest offer that was not given up; before a dear offer, the offers that wait in turns."""
    left = [offer for offer in offers if offer.nodes not in experience.given_up]
    turns = offers_in_turns(offers, experience, limits)
    if not turns:
        if not left:
            return None
        return _cheapest(left, experience)
    untried = [offer for offer in turns if offer in left]
    if untried:
        return _cheapest(untried, experience)
    return _first_given_up(turns, experience)


def offers_in_turns(
    offers: Sequence[Offer], experience: Experience, limits: Limits
) -> Sequence[Offer]:
    """Return the offers at a similar expected cost that may have nodes, if a deadline leaves time to wait for each.

    Waiting for only one of them would cost nothing but time, and find a node later.
    """
    if limits.pending or experience.spare is None:
        return []
    lowest = estimate(_cheapest(offers, experience), experience)
    similar = [
        offer for offer in offers if _costs_similar(estimate(offer, experience), lowest)
    ]
    turns = [offer for offer in similar if _may_have_nodes(offer, experience)]
    # The dearer ones are tried, too, before the spare time ends.
    dearer = [
        offer
        for offer in offers
        if offer not in similar and offer.nodes not in experience.given_up
    ]
    has_time = experience.spare >= PENDING * (1 + len(dearer))
    if has_time and len(turns) > 1:
        return turns
    return []


def _may_have_nodes(offer: Offer, experience: Experience) -> bool:
    """Return whether the offer was not given up, or only because it had no node at that time."""
    return experience.given_up.get(offer.nodes) in (None, Cause.NO_CAPACITY)


def _costs_similar(expected: Estimate | None, lowest: Estimate | None) -> bool:
    if expected is None or lowest is None:
        return expected is lowest
    return expected.cost <= SIMILAR_COST * lowest.cost


def _cheapest(offers: Sequence[Offer], experience: Experience) -> Offer:
    """Return the first of the offers with the lowest expected cost; an offer without a price comes last."""
    return min(offers, key=lambda offer: _cost_rank(offer, experience))


def _cost_rank(offer: Offer, experience: Experience) -> tuple[bool, Decimal, Decimal]:
    expected = estimate(offer, experience)
    if expected is None:
        return True, Decimal(), Decimal()
    # If neither of two offers would ever end the work, the price decides.
    return False, expected.cost, expected.price


def estimate(offer: Offer, experience: Experience) -> Estimate | None:
    """Return the expected cost on spot nodes, or None without a price.

    With `r` interruptions an hour, checkpoints every `c` hours and restarts of `R` hours, `c` hours of work take
    exp(r R) (exp(r c) - 1) / r (J. T. Daly, "A higher order estimate of the optimum checkpoint interval", 2006).
    """
    if offer.price is None:
        return None
    rate = interruption_rate(offer, experience)
    work = _work_hours(experience)
    restart = experience.restart / HOUR
    between = min(work, max(experience.loss / HOUR, SHORTEST_INTERVAL))
    if rate * (between + restart) > MAX_EXPONENT:
        return Estimate(offer.price, Decimal("Infinity"), rate)
    factor = 1.0
    if rate > 0:
        factor = exp(rate * restart) * expm1(rate * between) / (rate * between)
    return Estimate(offer.price, offer.price * Decimal(work * factor), rate)


def estimate_on_demand(offer: Offer, experience: Experience) -> Estimate | None:
    """Return the cost on on-demand nodes, or None without a price."""
    if offer.price is None:
        return None
    return Estimate(offer.price, offer.price * Decimal(_work_hours(experience)))


def _work_hours(experience: Experience) -> float:
    # If nothing is left, an hour of work shows which offer costs less.
    if not experience.remaining:
        return 1.0
    return experience.remaining / HOUR


def interruption_rate(offer: Offer, experience: Experience) -> float:
    """Return interruptions per hour: first the expected rate, and with time the observed rate.

    Formula: the mean of a gamma prior of PRIOR_HOURS hours after so many interruptions in the time on spot nodes.
    """
    prior = (
        PRIOR_RATE
        if offer.interruptions_per_hour is None
        else offer.interruptions_per_hour
    )
    expected = prior * PRIOR_HOURS
    hours = PRIOR_HOURS + experience.spot_time / HOUR
    return (expected + experience.interruptions) / hours


def pending_limit(
    experience: Experience, limits: Limits, *, in_turns: bool = False
) -> timedelta:
    """Return how long a pod may find no node before its class is given up, by what was known when the attempt began.

    With a deadline, waiting costs nothing but time: most of what there is to spare. If another class at a similar
    price has its turn next, `offers_in_turns`, the limit is no longer than without a deadline.
    """
    spare = experience.spare
    if spare is None or in_turns:
        return limits.pending or PENDING
    limit = max(timedelta(), min(MIN_PENDING, spare), PENDING_SHARE * spare)
    if not limits.pending:
        return limit
    return min(limits.pending, limit)


def reason_to_give_up(
    interruptions: int, fruitless: int, experience: Experience, limits: Limits
) -> Cause | None:
    """Return why a node class is given up after interruptions in a row, or None.

    With a deadline, an interruption costs nothing but a restart: spot nodes stay right while there is time to spare.
    """
    default = IN_ROW if experience.deadline is None else None
    if _reaches(interruptions, limits.interruptions or default):
        return Cause.INTERRUPTIONS
    if _reaches(fruitless, limits.fruitless or default):
        return Cause.NO_PROGRESS
    return None


def _reaches(count: int, limit: int | None) -> bool:
    return limit is not None and count >= limit


def return_time(cause: Cause, experience: Experience, limits: Limits) -> timedelta:
    """Return the running time after which an attempt on on-demand nodes, with its cause, may return to spot nodes."""
    # Only time was missing, so no time need pass before spot nodes are right again.
    if cause is Cause.DEADLINE:
        return timedelta()
    # A deadline bounds the number of returns by itself, because each takes time.
    if experience.deadline is not None:
        return limits.return_after
    doublings = min(max(0, experience.on_demand_attempts - 1), MAX_DOUBLINGS)
    return limits.return_after * float(2**doublings)


def pays_to_return(decision: Decision, experience: Experience) -> bool:
    """Return whether this decision is to replace a running attempt on on-demand nodes."""
    if decision.capacity != SPOT or experience.remaining is None:
        return False
    if decision.spot is None or decision.on_demand is None:
        return False
    # Two restarts: the attempt on spot nodes, and another on on-demand nodes if it is interrupted.
    move = decision.on_demand.price * Decimal(2 * experience.restart / HOUR)
    return decision.on_demand.cost - decision.spot.cost > move * Decimal(GAIN)
