"""A decision about capacity in one sentence, with its numbers. Pure."""

from datetime import date, timedelta

from finetune_operator.api.placement import ON_DEMAND, SPOT, PlacementDefaults
from finetune_operator.core.auto import IN_ROW, Cause, Decision, Estimate, Experience, Limits, pending_limit
from finetune_operator.core.costs import amount_text, price_text
from finetune_operator.core.durations import format_duration
from finetune_operator.core.placement import class_name


def message_of(
    decision: Decision, experience: Experience, limits: Limits, defaults: PlacementDefaults, today: date
) -> str:
    """Return why the node class was chosen; empty where the user has chosen and nothing speaks against it."""
    text = _reason(decision, experience, limits, defaults.currency)
    if not text:
        return ""
    name = class_name(decision.offer)
    where = f"{decision.capacity} ({name})" if name else decision.capacity
    dated = _price_date(decision, defaults, today) if decision.spot and decision.on_demand else ""
    return f"{where}: {text}{dated}"


def _reason(decision: Decision, experience: Experience, limits: Limits, currency: str) -> str:  # noqa: PLR0911
    match decision.cause:
        case Cause.REQUESTED:
            return _warning(decision, currency)
        case Cause.LOWER_COST:
            return _comparison(decision, experience, currency)
        case Cause.PRICE_UNKNOWN:
            # A cluster without any prices is not told so with each attempt.
            no_price = decision.spot is None and decision.on_demand is None
            return "" if no_price else "assumed to cost less, because one of the two prices is not known"
        case Cause.SHORT_STAGE:
            total = _text(experience.total)
            return f"expected to run for {total}, less than the {_text(limits.short_stage)} from which Spot is used"
        case Cause.DEADLINE:
            return _deadline(experience)
        case Cause.INTERRUPTIONS:
            return f"Spot was interrupted {limits.interruptions or IN_ROW} times in a row within an hour of the start"
        case Cause.NO_CAPACITY:
            known = experience.deadline is None
            limit = f"within {_text(pending_limit(experience, limits))}" if known else "in time for the deadline"
            return f"no Spot node was found {limit}"
        case Cause.NO_PROGRESS:
            return f"{limits.fruitless or IN_ROW} interruptions in a row on Spot left no new durable step"
        case Cause.LAST_INTERRUPTION:
            return "one more interruption would fail the stage: maxInterruptions is used up"


def _warning(decision: Decision, currency: str) -> str:
    """Return the warning that the chosen spot nodes cost more than on-demand nodes."""
    spot, on_demand = decision.spot, decision.on_demand
    if decision.capacity != SPOT or not spot or not on_demand or spot.cost <= on_demand.cost:
        return ""
    prices = f"{price_text(spot.price)} {currency} an hour against {price_text(on_demand.price)} on OnDemand"
    return f"costs more than OnDemand: {prices}; set capacity to Auto or OnDemand"


def _comparison(decision: Decision, experience: Experience, currency: str) -> str:
    """Return both prices and expected costs. Both are known, or their comparison would not have decided."""
    spot, on_demand = decision.spot, decision.on_demand
    if not spot or not on_demand:
        return ""
    mine, other = (on_demand, spot) if decision.capacity == ON_DEMAND else (spot, on_demand)
    other_name = SPOT if decision.capacity == ON_DEMAND else ON_DEMAND
    each = format_duration((experience.loss + experience.restart).total_seconds())
    per = "" if experience.remaining is not None else " for an hour of work"
    prices = f"{price_text(mine.price)} against {price_text(other.price)} {currency} an hour on {other_name}"
    interruptions = f"{spot.rate:.2g} interruptions of Spot an hour cost {each} each"
    return f"{prices}, {interruptions}: expected {_cost(mine, currency)} against {_cost(other, currency)}{per}"


def _cost(estimate: Estimate, currency: str) -> str:
    return amount_text(estimate.cost, currency) if estimate.cost.is_finite() else "no end"


def _deadline(experience: Experience) -> str:
    if experience.remaining is None:
        return "there is a deadline, and the duration is not known yet: set placement.expectedSeconds"
    left, work = _text(experience.deadline), _text(experience.remaining + experience.later_stages)
    return f"the deadline is in {left} and {work} of work are left, which leaves no time for an interruption"


def _text(time: timedelta | None) -> str:
    return format_duration(time.total_seconds() if time else 0)


def _price_date(decision: Decision, defaults: PlacementDefaults, today: date) -> str:
    dates = [one.price_date for one in defaults.node_classes if one.name == decision.offer.node_class]
    if not dates or dates[0] is None:
        return ""
    days = (today - dates[0]).days
    return f" (prices of {dates[0]}, {days} days old)" if days > 0 else f" (prices of {dates[0]})"
