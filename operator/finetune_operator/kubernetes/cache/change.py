"""The pipelines to reconcile because an object has changed."""

from dataclasses import dataclass
from enum import IntEnum

from finetune_operator.core.pipeline import Key


class Urgency(IntEnum):
    """How soon a change is to be reconciled."""

    NEVER = 0
    LATER = 1
    """It changes what the status shows, but nothing that the operator does."""
    NOW = 2


@dataclass(frozen=True)
class Change:
    """The pipelines to reconcile because of a change."""

    keys: tuple[Key, ...] = ()
    urgency: Urgency = Urgency.NEVER


NO_CHANGE = Change()
