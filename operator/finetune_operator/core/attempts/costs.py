"""Running time and money: of each attempt, each stage and the pipeline. Pure, and in decimal arithmetic.

Everything is computed anew from the times, steps and price of the attempts whenever one of them changes.
So nothing is counted twice. Only the sum of those attempts that are no longer listed is carried on.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from decimal import ROUND_HALF_UP, Decimal

from finetune_operator.api.conditions import Reason
from finetune_operator.api.costs import Costs, PipelineCosts
from finetune_operator.api.status import AttemptStatus, Outcome, StageStatus

SECONDS_AN_HOUR = Decimal(3600)
# The sum of many short attempts must be right to the cent.
UNIT = Decimal("0.0001")
"""Amounts are rounded to this: a hundredth of a cent."""
CENT = Decimal("0.01")


def running_seconds(ended: AttemptStatus) -> float:
    """Return how long an attempt ran, by the clock of its kubelet; at least as long as by the operator's clock."""
    seconds = 0.0
    if ended.finished_at:
        seconds = seconds_until(ended.finished_at, ended)
    return max(seconds, ended.stopped_after_seconds or 0.0)


def seconds_until(time: datetime, attempt: AttemptStatus) -> float:
    """Return how long the attempt's processes have run until this time, without any suspension of its Job."""
    if attempt.started_at is None:
        return 0.0
    end = attempt.suspended_at or time
    return (end - attempt.started_at).total_seconds() - attempt.suspended_seconds


def with_costs(stage: StageStatus) -> StageStatus:
    """Return the status with the time and money of each ended attempt, and with their sum."""
    attempts = tuple(_with_cost(attempt) for attempt in stage.attempts)
    total = sum_of((stage.earlier_costs or Costs(), *map(costs_of, attempts)))
    return stage.model_copy(
        update={"attempts": attempts, "costs": total if total.attempts else None}
    )


def drop_oldest(stage: StageStatus, kept: int) -> StageStatus:
    """Return the status with at most `kept` attempts, or as many as are needed, and with the sum of the others.

    Attempts that found no node are dropped first.
    """
    needed = _needed_numbers(stage)
    attempts = list(stage.attempts)
    dropped = []
    while len(attempts) > kept:
        others = [attempt for attempt in attempts[:-1] if attempt.number not in needed]
        if not others:
            break
        idle = [
            attempt
            for attempt in others
            if attempt.finished_at and not attempt.started_at
        ]
        oldest = (idle or others)[0]
        attempts.remove(oldest)
        dropped.append(oldest)
    if not dropped:
        return stage
    earlier = sum_of((stage.earlier_costs or Costs(), *map(costs_of, dropped)))
    return stage.model_copy(
        update={"attempts": tuple(attempts), "earlier_costs": earlier}
    )


def _needed_numbers(stage: StageStatus) -> set[int]:
    """Return the numbers of the attempts that the choice of nodes still needs."""
    # The newest attempt on each node class shows whether the class was full.
    newest = {
        (attempt.capacity, attempt.node_class): attempt.number
        for attempt in stage.attempts
        if stage.counts(attempt)
    }
    # The newest attempt with steps has the speed of the stage.
    stepped = [attempt.number for attempt in stage.attempts if attempt.step_seconds]
    return {*newest.values(), *stepped[-1:]}


def pipeline_costs(
    stages: Mapping[str, StageStatus], currency: str
) -> PipelineCosts | None:
    """Return the sum over all stages, or None if no price is known."""
    total = sum_of(stage.costs for stage in stages.values() if stage.costs)
    if total.attempts == total.unpriced:
        return None
    return PipelineCosts(
        **dict(total), currency=currency, saved=total.on_demand - total.spent
    )


def amount_text(amount: Decimal, currency: str) -> str:
    """Return an amount in hundredths, for people."""
    return f"{amount.quantize(CENT, ROUND_HALF_UP)} {currency}"


def price_text(price: Decimal) -> str:
    """Return a price with all of its digits, and with hundredths at least."""
    digits = price.normalize().as_tuple().exponent
    # Infinity and NaN have a letter in place of an exponent.
    if not isinstance(digits, int):
        return str(price)
    return f"{price:.{max(2, -digits)}f}"


def _with_cost(attempt: AttemptStatus) -> AttemptStatus:
    if attempt.finished_at is None:
        return attempt
    seconds = running_seconds(attempt)
    lost = None
    if attempt.outcome is Outcome.INTERRUPTED:
        lost = _amount(attempt.price, seconds - useful_seconds(attempt))
    return attempt.model_copy(
        update={
            "seconds": round(seconds, 3),
            "steps": _steps(attempt),
            "cost": _amount(attempt.price, seconds),
            "lost_cost": lost,
        }
    )


def _steps(attempt: AttemptStatus) -> int | None:
    if attempt.last_step is None:
        return None
    return max(0, attempt.last_step - (attempt.start_step or 0))


def useful_seconds(attempt: AttemptStatus) -> float:
    """Return the part of the running time that brought the stage forward.

    An attempt that was interrupted or moved brought it forward by the steps that the next attempt did not repeat; the
    rest is start-up and lost work, which a single attempt on on-demand nodes would not have.
    """
    seconds = running_seconds(attempt)
    moved = (
        attempt.outcome is Outcome.STOPPED
        and attempt.stopping is Reason.PLACEMENT_CHANGED
    )
    if attempt.outcome is not Outcome.INTERRUPTED and not moved:
        return seconds
    durable = _durable_steps(attempt)
    if attempt.step_seconds is None and durable:
        # Its progress was never read, so all of its time counts as time of its steps.
        return seconds * durable / max(durable, _steps(attempt) or 0)
    # A process may report any numbers.
    return min(seconds, max(0.0, durable * (attempt.step_seconds or 0.0)))


def _durable_steps(attempt: AttemptStatus) -> int:
    start = attempt.start_step or 0
    if attempt.lost_steps is not None and attempt.last_step is not None:
        return max(0, attempt.last_step - attempt.lost_steps - start)
    return max(0, (attempt.saved_step or 0) - start)


def costs_of(attempt: AttemptStatus) -> Costs:
    """Return the time and money of an attempt; nothing if it has not ended."""
    if attempt.finished_at is None:
        return Costs()
    return Costs(
        attempts=1,
        unpriced=int(attempt.cost is None),
        seconds=attempt.seconds or 0.0,
        spent=attempt.cost or Decimal(),
        lost=attempt.lost_cost or Decimal(),
        on_demand=_on_demand_cost(attempt),
    )


def _on_demand_cost(attempt: AttemptStatus) -> Decimal:
    """Return what the attempt's useful time costs on on-demand nodes; its own cost if their price is not known.

    An attempt without a price of its own is in no sum, so that the sums can be compared.
    """
    if attempt.cost is None:
        return Decimal()
    price = (
        attempt.price if attempt.on_demand_price is None else attempt.on_demand_price
    )
    return _amount(price, useful_seconds(attempt)) or Decimal()


def _amount(price: Decimal | None, seconds: float) -> Decimal | None:
    """Return the cost of so many seconds at a price per hour."""
    if price is None:
        return None
    # Through text, because a binary fraction would show in the last digit.
    exact = Decimal(str(round(max(0.0, seconds), 3)))
    return (price * exact / SECONDS_AN_HOUR).quantize(UNIT, ROUND_HALF_UP)


def sum_of(costs: Iterable[Costs]) -> Costs:
    """Return the sum."""
    parts = tuple(costs)
    # A single model for all parts: each reconcile of a running stage sums its attempts, and pydantic validates a model.
    return Costs(
        attempts=sum(part.attempts for part in parts),
        unpriced=sum(part.unpriced for part in parts),
        seconds=round(sum(part.seconds for part in parts), 3),
        spent=sum((part.spent for part in parts), Decimal()),
        lost=sum((part.lost for part in parts), Decimal()),
        on_demand=sum((part.on_demand for part in parts), Decimal()),
    )
