"""What a pipeline has cost, in the words of `finetune get` and `finetune run`."""

from collections.abc import Iterator
from decimal import Decimal

from finetune_operator.api.placement import ON_DEMAND
from finetune_operator.api.status import AttemptStatus, Outcome, PipelineCosts, PipelineStatus
from finetune_operator.core.costs import amount_text, price_text
from finetune_operator.core.durations import format_duration


def cost_lines(status: PipelineStatus) -> Iterator[str]:
    """Yield what was spent, saved and lost; the running time alone where no price is known."""
    if status.costs:
        yield _money(status.costs)
    elif costs := [stage.costs for stage in status.stages.values() if stage.costs]:
        seconds, attempts = sum(one.seconds for one in costs), sum(one.attempts for one in costs)
        yield f"{format_duration(seconds)} of running time in {_counted(attempts, 'attempt')}"


def _money(costs: PipelineCosts) -> str:
    def text(amount: Decimal) -> str:
        return amount_text(amount, costs.currency)

    parts = [f"spent {text(costs.spent)} in {format_duration(costs.seconds)}"]
    parts.append(f"{text(costs.on_demand)} on OnDemand, {text(costs.saved)} saved")
    if costs.lost:
        parts.append(f"{text(costs.lost)} lost to interruptions")
    if costs.unpriced:
        parts.append(f"the price of {_counted(costs.unpriced, 'attempt')} is not known")
    return "; ".join(parts)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")


def attempt_place(attempt: AttemptStatus) -> str:
    """Return where an attempt runs, and its price; empty for what is not said: on-demand nodes without a class."""
    if attempt.capacity is None or (attempt.capacity == ON_DEMAND and not attempt.node_class):
        return ""
    nodes = f"{attempt.capacity} ({attempt.node_class})" if attempt.node_class else attempt.capacity
    price = "" if attempt.price is None else f" at {price_text(attempt.price)} an hour"
    return f" on {nodes}{price}"


def attempt_cost(attempt: AttemptStatus) -> str:
    """Return what an ended attempt cost, and what of it an interruption has wasted; empty without a price."""
    if attempt.cost is None or attempt.outcome is Outcome.RUNNING:
        return ""
    lost = f", {attempt.lost_cost:.2f} of it lost" if attempt.lost_cost else ""
    return f"cost {attempt.cost:.2f}{lost}"
