"""The money that an attempt cost, by its status: nothing while there is no price."""

from finetune_operator.api.status import AttemptStatus, PipelineStatus

AMOUNTS = ("price", "cost", "lostCost")
"""Price of an hour, cost of the attempt, and the part that its interruption wasted: names in JSON."""


def cost_of(status: PipelineStatus, attempt: AttemptStatus) -> dict[str, str]:
    """Return the known amounts by their names in JSON, and the currency; empty without a price."""
    # By names in JSON: the dump also has the fields of another version of the operator.
    fields = attempt.model_dump(by_alias=True)
    known = {
        name: str(fields[name]) for name in AMOUNTS if fields.get(name) is not None
    }
    if "price" not in known:
        return {}
    if status.costs:
        known["currency"] = status.costs.currency
    return known


def cost_line(cost: dict[str, str]) -> str:
    """Return the amounts in words; empty if none is known."""
    currency = ""
    if "currency" in cost:
        currency = f" {cost['currency']}"
    meanings = {"lostCost": "lost", "cost": "for the attempt", "price": "an hour"}
    return ", ".join(
        f"{cost[name]}{currency} {meaning}"
        for name, meaning in meanings.items()
        if name in cost
    )
