"""What an attempt cost in money, as its status tells it: nothing while there is no price."""

from finetune_operator.api.status import AttemptStatus, PipelineStatus

AMOUNTS = ("price", "cost", "lostCost")
"""Price of an hour, cost of the attempt, and the part that its interruption wasted: names in JSON."""


def cost_of(status: PipelineStatus, attempt: AttemptStatus) -> dict[str, str]:
    """Return the known amounts by their names in JSON, and the currency; empty without a price."""
    fields = attempt.model_dump(by_alias=True)  # also those of another version of the operator
    known = {name: str(fields[name]) for name in AMOUNTS if fields.get(name) is not None}
    if "price" not in known:
        return {}
    return {**known, **({"currency": status.costs.currency} if status.costs else {})}


def cost_line(cost: dict[str, str]) -> str:
    """Return the amounts in words; empty where none is known."""
    currency = f" {cost['currency']}" if "currency" in cost else ""
    words = {"lostCost": "lost", "cost": "for the attempt", "price": "an hour"}
    return ", ".join(
        f"{cost[name]}{currency} {text}" for name, text in words.items() if name in cost
    )
