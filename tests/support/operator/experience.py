"""What is known of an attempt when its capacity is chosen, and what nodes offer."""

from datetime import timedelta
from decimal import Decimal
from typing import Any

from finetune_operator.api.placement import ON_DEMAND, SPOT
from finetune_operator.core.capacity.decision import (
    Experience,
    NodeGroup,
    Offer,
)

HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)
ON_DEMAND_CLASSES = {"h100", "a100", "b200", "4090"}


def nodes(name: str) -> NodeGroup:
    return NodeGroup(ON_DEMAND if name in ON_DEMAND_CLASSES else SPOT, name or None)


def offer(
    name: str, price: Decimal | None = None, interruptions_per_hour: float | None = None
):
    return Offer(nodes(name), price, interruptions_per_hour)


def of(hours: float, **fields) -> Experience:
    """A stage that needs some hours more."""
    duration: dict[str, Any] = {
        "total": hours * HOUR,
        "remaining": hours * HOUR,
        "measured": True,
    }
    given_up = {
        nodes(name): cause for name, cause in fields.pop("given_up", {}).items()
    }
    return Experience(**(duration | fields), given_up=given_up)
