"""A decision about capacity in one sentence, with its numbers. Pure."""

from datetime import date, timedelta

from finetune_operator.api.placement import ON_DEMAND, SPOT, PlacementDefaults
from finetune_operator.core.auto import (
    IN_ROW,
    PENDING,
    Cause,
    Decision,
    Estimate,
    Experience,
    Limits,
)
from finetune_operator.core.costs import amount_text, price_text
from finetune_operator.core.durations import format_duration
from finetune_operator.core.placement import class_name, words_for


def message_of(
    decision: Decision,
    experience: Experience,
    limits: Limits,
    defaults: PlacementDefaults,
    today: date,
) -> str:
    """Return why the node class was chosen; empty where the user has chosen and nothing speaks against it."""
    reason = _reason(decision, experience, limits, defaults.currency)
    left = _left(decision, experience)
    text = "; ".join(one for one in (left, reason) if one)
    if not text:
        return ""
    name = class_name(decision.offer)
    where = f"{decision.capacity} ({name})" if name else decision.capacity
    dated = _price_date(decision, defaults, today) if decision.cause in BY_PRICE else ""
    return f"{where}: {text}{dated}"


FIXED = {
    Cause.REQUESTED: "",
    Cause.LAST_INTERRUPTION: "one more interruption would fail the stage, by its maxInterruptions",
}
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
    return f"{limit} or in time for the deadline" if limits.pending else "in time for the deadline"


def _left(decision: Decision, experience: Experience) -> str:
    """Return why other node classes were left, where the decision is not about that by itself."""
    if decision.cause in LEFT or decision.cause is Cause.DEADLINE:
        return ""
    others = (
        (name, cause)
        for name, cause in experience.given_up.items()
        if name != decision.offer.node_class
    )
    return ", ".join(f"{words_for(name)} {LEFT[cause]}" for name, cause in others)


def _reason(decision: Decision, experience: Experience, limits: Limits, currency: str) -> str:  # noqa: PLR0911
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
    """Return that a price is missing; empty where all are: such a cluster is not told so with each attempt."""
    known = decision.spot or decision.on_demand
    return "assumed to cost less, because one of the two prices is not known" if known else ""


def _comparison(decision: Decision, experience: Experience, currency: str) -> str:
    """Return both prices and expected costs. Both are known, or their comparison would not have decided."""
    spot, on_demand = decision.spot, decision.on_demand
    if not spot or not on_demand:
        return ""
    mine, other = (on_demand, spot) if decision.capacity == ON_DEMAND else (spot, on_demand)
    other_name = SPOT if decision.capacity == ON_DEMAND else ON_DEMAND
    each = format_duration((experience.loss / 2 + experience.restart).total_seconds())
    per = "" if experience.remaining is not None else " for an hour of work"
    prices = f"{price_text(mine.price)} against {price_text(other.price)} {currency} an hour on {other_name}"
    interruptions = f"{spot.rate:.2g} interruptions of Spot an hour cost {each} each"
    return f"{prices}, {interruptions}: expected {_cost(mine, currency)} against {_cost(other, currency)}{per}"


def _cost(estimate: Estimate, currency: str) -> str:
    return amount_text(estimate.cost, currency) if estimate.cost.is_finite() else "no end"


def _deadline(experience: Experience) -> str:
    if experience.remaining is None:
        return (
            "there is a deadline, and the duration is not known yet: set placement.expectedSeconds"
        )
    work = f"{_text(experience.remaining + experience.later_stages)} of work are left"
    left = experience.deadline or timedelta()
    if left <= timedelta():
        return f"the deadline was {_text(-left)} ago, and {work}"
    return f"the deadline is in {_text(left)} and {work}, which leaves no time for an interruption"


def _text(time: timedelta | None) -> str:
    return format_duration(time.total_seconds() if time else 0)


def _price_date(decision: Decision, defaults: PlacementDefaults, today: date) -> str:
    dates = [
        one.price_date for one in defaults.node_classes if one.name == decision.offer.node_class
    ]
    if not dates or dates[0] is None:
        return ""
    days = (today - dates[0]).days
    return f" (prices of {dates[0]}, {days} days old)" if days > 0 else f" (prices of {dates[0]})"
