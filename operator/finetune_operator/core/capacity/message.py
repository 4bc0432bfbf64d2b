"""The message that explains the choice of nodes in one sentence, with its numbers. Pure."""

from datetime import date, timedelta

from finetune_operator.api.placement import ON_DEMAND, SPOT, PlacementDefaults
from finetune_operator.core.attempts.costs import amount_text, price_text
from finetune_operator.core.capacity.decision import (
    Cause,
    Decision,
    Estimate,
    Experience,
    Limits,
)
from finetune_operator.core.capacity.policy import IN_ROW, PENDING
from finetune_operator.core.durations import format_duration


def message_of(
    decision: Decision,
    experience: Experience,
    limits: Limits,
    defaults: PlacementDefaults,
    today: date,
) -> str:
    """Return why the node class was chosen; empty if the user has chosen and nothing speaks against it."""
    reason = _reason(decision, experience, limits, defaults.currency)
    left = _left(decision, experience)
    text = "; ".join(part for part in (left, reason) if part)
    if not text:
        return ""
    nodes = decision.capacity
    if decision.offer.node_class:
        nodes = f"{decision.capacity} ({decision.offer.node_class})"
    # Only a message with prices says how old they are.
    dated = _price_date(decision, defaults, today) if decision.cause in BY_PRICE else ""
    return f"{nodes}: {text}{dated}"


FIXED = {
    Cause.REQUESTED: "",
    Cause.LAST_INTERRUPTION: "one more interruption would fail the stage, by its maxInterruptions",
}
# These choices follow from the prices, so the message says of which day the prices are.
BY_PRICE = frozenset({Cause.LOWER_COST, Cause.REQUESTED_DEARER})
LEFT = {
    Cause.NO_CAPACITY: "had no node",
    Cause.INTERRUPTIONS: "was interrupted too often",
    Cause.NO_PROGRESS: "made no durable step",
}


def _pending(capacity: str, experience: Experience, limits: Limits) -> str:
    """Return how long a pod has found no node, at least."""
    limit = f"within {_text(limits.pending or PENDING)}"
    if experience.deadline is None or capacity == ON_DEMAND:
        return limit
    if limits.pending:
        return f"{limit} or in time for the deadline"
    return "in time for the deadline"


def _left(decision: Decision, experience: Experience) -> str:
    """Return why other node classes were given up, unless the cause of the decision says it already."""
    if decision.cause in LEFT or decision.cause is Cause.DEADLINE:
        return ""
    parts = [
        f"{nodes.label} {LEFT[cause]}"
        for nodes, cause in experience.given_up.items()
        if nodes != decision.offer.nodes
    ]
    return ", ".join(parts)


def _reason(  # noqa: PLR0911  one for each cause
    decision: Decision, experience: Experience, limits: Limits, currency: str
) -> str:
    match decision.cause:
        case Cause.REQUESTED | Cause.LAST_INTERRUPTION:
            return FIXED[decision.cause]
        case Cause.REQUESTED_DEARER:
            return f"costs more than OnDemand: {_comparison(decision, experience, currency)}"
        case Cause.LOWER_COST:
            return _comparison(decision, experience, currency)
        case Cause.PRICE_UNKNOWN:
            return _unknown_price(decision)
        case Cause.SHORT_STAGE:
            total = _text(experience.total)
            return f"expected to run for {total}, less than the {_text(limits.short_stage)} from which Spot is used"
        case Cause.DEADLINE:
            return _deadline(experience)
        case Cause.INTERRUPTIONS:
            return f"Spot was interrupted {limits.interruptions or IN_ROW} times in a row within an hour of the start"
        case Cause.NO_CAPACITY:
            other = SPOT if decision.capacity == ON_DEMAND else ON_DEMAND
            return f"no {other} node was found {_pending(other, experience, limits)}"
        case Cause.NO_PROGRESS:
            return f"{limits.fruitless or IN_ROW} interruptions in a row on Spot left no new durable step"


def _unknown_price(decision: Decision) -> str:
    """Return that a price is missing; empty if no price is known."""
    # A cluster without any prices would get this message with each attempt.
    if not decision.spot and not decision.on_demand:
        return ""
    return "assumed to cost less, because one of the two prices is not known"


def _comparison(decision: Decision, experience: Experience, currency: str) -> str:
    """Return both prices and expected costs. Both are known, or their comparison would not have decided."""
    spot = decision.spot
    on_demand = decision.on_demand
    if not spot or not on_demand:
        return ""
    chosen = spot
    other = on_demand
    other_name = ON_DEMAND
    if decision.capacity == ON_DEMAND:
        chosen = on_demand
        other = spot
        other_name = SPOT
    # An interruption comes in the middle between two checkpoints, on average.
    lost = experience.loss / 2 + experience.restart
    cost = format_duration(lost.total_seconds())
    prices = f"{price_text(chosen.price)} against {price_text(other.price)} {currency} an hour"
    interruptions = f"{spot.rate:.2g} interruptions of Spot an hour cost {cost} each"
    costs = f"expected {_cost(chosen, currency)} against {_cost(other, currency)}"
    if experience.remaining is None:
        costs = f"{costs} for an hour of work"
    return f"{prices} on {other_name}, {interruptions}: {costs}"


def _cost(estimate: Estimate, currency: str) -> str:
    return (
        amount_text(estimate.cost, currency) if estimate.cost.is_finite() else "no end"
    )


def _deadline(experience: Experience) -> str:
    if experience.remaining is None:
        unknown = "there is a deadline, and the duration is not known yet"
        return f"{unknown}: set placement.expectedSeconds"
    work = f"{_text(experience.remaining + experience.later_stages)} of work are left"
    left = experience.deadline or timedelta()
    if left <= timedelta():
        return f"the deadline was {_text(-left)} ago, and {work}"
    return f"the deadline is in {_text(left)} and {work}, which leaves no time for an interruption"


def _text(time: timedelta | None) -> str:
    return format_duration(time.total_seconds() if time else 0)


def _price_date(decision: Decision, defaults: PlacementDefaults, today: date) -> str:
    dates = {
        node_class.name: node_class.price_date for node_class in defaults.node_classes
    }
    price_date = dates.get(decision.offer.node_class or "")
    if price_date is None:
        return ""
    days = (today - price_date).days
    if days <= 0:
        return f" (prices of {price_date})"
    return f" (prices of {price_date}, {days} days old)"
