"""What a pipeline has cost, in the words of `finetune get` and `finetune run`."""

from collections.abc import Iterator
from decimal import Decimal

from finetune_cli.output.results import counted
from finetune_operator.api.costs import PipelineCosts
from finetune_operator.api.placement import ON_DEMAND
from finetune_operator.api.status import AttemptStatus, Outcome, PipelineStatus
from finetune_operator.core.attempts.costs import amount_text, price_text
from finetune_operator.core.durations import format_duration


def cost_lines(status: PipelineStatus) -> Iterator[str]:
    """Yield what was spent, saved and lost; the running time alone if no price is known."""
    if status.costs:
        yield _money(status.costs)
        return
    costs = [stage.costs for stage in status.stages.values() if stage.costs]
    if costs:
        seconds = sum(cost.seconds for cost in costs)
        attempts = sum(cost.attempts for cost in costs)
        yield _running_time(status, seconds, attempts)


def _running_time(status: PipelineStatus, seconds: float, attempts: int) -> str:
    """Return the running time of the present manifest, and of all edits together if that is more."""
    # Attempts with another identity worked for an earlier manifest.
    own = [
        attempt
        for stage in status.stages.values()
        for attempt in stage.attempts
        if attempt.identity == stage.identity and attempt.finished_at
    ]
    total = _time_of(seconds, attempts)
    if not own or len(own) == attempts:
        return total
    own_seconds = sum(attempt.seconds or 0.0 for attempt in own)
    return f"this run: {_time_of(own_seconds, len(own))}; with earlier edits {total}"


def _time_of(seconds: float, attempts: int) -> str:
    time = format_duration(seconds)
    return f"{time} of running time in {counted(attempts, 'attempt')}"


def _money(costs: PipelineCosts) -> str:
    def text(amount: Decimal) -> str:
        return amount_text(amount, costs.currency)

    time = format_duration(costs.seconds)
    parts = [f"spent {text(costs.spent)} in {time}"]
    saved = text(costs.saved)
    parts.append(f"{text(costs.on_demand)} on OnDemand, {saved} saved")
    if costs.lost:
        parts.append(f"{text(costs.lost)} lost to interruptions")
    if costs.unpriced:
        parts.append(f"the price of {counted(costs.unpriced, 'attempt')} is not known")
    return "; ".join(parts)


def attempt_place(attempt: AttemptStatus) -> str:
    """Return the nodes on which an attempt runs, and their price; empty for on-demand nodes without a class."""
    if attempt.capacity is None:
        return ""
    place = f" on {attempt.capacity}"
    if attempt.node_class:
        place += f" ({attempt.node_class})"
    elif attempt.capacity == ON_DEMAND:
        # The usual case: every line would have the same words.
        return ""
    if attempt.price is not None:
        place += f" at {price_text(attempt.price)} an hour"
    return place


def attempt_cost(attempt: AttemptStatus) -> str:
    """Return what an ended attempt cost, and how much of it an interruption has wasted; empty without a price."""
    # The cost of a running attempt is known only when it has ended.
    if attempt.cost is None or attempt.outcome is Outcome.RUNNING:
        return ""
    text = f"cost {attempt.cost:.2f}"
    if attempt.lost_cost:
        text += f", {attempt.lost_cost:.2f} of it lost"
    return text
