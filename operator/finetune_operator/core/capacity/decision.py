"""The choice of nodes for an attempt: the offers, the measurements, the limits and the decision. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from enum import StrEnum
from typing import NamedTuple

# The measured speed varies between steps and nodes.
RESERVE_SHARE = 0.03
"""Part of the remaining time that a deadline keeps in reserve."""
# Work takes a quarter more than an estimate that is 20 % too low.
ESTIMATE_SHARE = 0.25
"""Part of the remaining time that a deadline keeps in reserve before the speed is measured."""


class Cause(StrEnum):
    """Why a node class was chosen."""

    REQUESTED = "Requested"
    """The user has chosen the capacity."""
    REQUESTED_DEARER = "RequestedDearer"
    """The user has chosen Spot, which costs more than on-demand."""
    LOWER_COST = "LowerCost"
    """Its expected cost is the lowest."""
    PRICE_UNKNOWN = "PriceUnknown"
    """Spot is assumed to cost less, because a price is missing."""
    SHORT_STAGE = "ShortStage"
    """The stage is too short to gain from spot."""
    DEADLINE = "Deadline"
    """There is no time to spare for an interruption."""
    INTERRUPTIONS = "Interruptions"
    """Spot was interrupted too often in a row."""
    NO_CAPACITY = "NoCapacity"
    """No node of the other capacity was found for too long."""
    NO_PROGRESS = "NoProgress"
    """Interrupted attempts in a row have made no new durable step."""
    LAST_INTERRUPTION = "LastInterruption"
    """The next interruption would fail the stage."""


class NodeGroup(NamedTuple):
    """The nodes on which an attempt may run: a node class, or any node of a capacity type."""

    capacity: str
    node_class: str | None = None
    """None: no class is configured, so it is any node of the capacity type."""

    @property
    def label(self) -> str:
        """The name of the node class, or else of the capacity type."""
        return self.node_class or self.capacity


@dataclass(frozen=True)
class Offer:
    """Nodes on which the stage can run, and their price per hour for the stage's pods."""

    nodes: NodeGroup
    price: Decimal | None = None
    interruptions_per_hour: float | None = None

    @property
    def node_class(self) -> str | None:
        """The node class. None: any node of the capacity type."""
        return self.nodes.node_class


@dataclass(frozen=True)
class Limits:
    """When a node class is given up. None: a deadline decides by its spare time; without one, IN_ROW or PENDING."""

    interruptions: int | None = None
    """Interruptions in a row, each within an hour of its start."""
    pending: timedelta | None = None
    """Time for which a pod finds no node."""
    fruitless: int | None = None
    """Interruptions in a row without a new durable step."""
    short_stage: timedelta = timedelta(minutes=30)
    return_after: timedelta = timedelta(minutes=30)
    """Running time on on-demand nodes before the next try of spot. Without a deadline it doubles with each attempt."""


@dataclass(frozen=True)
class Experience:
    """What the attempts of a stage have measured."""

    total: timedelta | None = None
    """Running time that the whole stage needs. None: not known."""
    remaining: timedelta | None = None
    """Running time that it still needs."""
    measured: bool = False
    """Whether these two are from the stage's own speed. Else they are an estimate."""
    restart: timedelta = timedelta(minutes=3)
    """From the start of an attempt to its first new step."""
    loss: timedelta = timedelta(seconds=90)
    """Most work that an interruption loses: the time between two checkpoints. The average loss is half of it."""
    interruptions: int = 0
    spot_time: timedelta = timedelta()
    """Running time on spot nodes."""
    given_up: Mapping[NodeGroup, Cause] = field(default_factory=dict)
    """Nodes -> why they are not tried for a while, in the order in which the stage gave them up."""
    on_demand_attempts: int = 0
    """Attempts on on-demand nodes since the last attempt that ran on spot nodes."""
    deadline: timedelta | None = None
    """Time until the deadline. None: there is none."""
    later_stages: timedelta = timedelta()
    """Expected running time of the stages after this one."""
    interruptions_left: int | None = None
    """Interruptions that the stage may still have. None: any number."""

    @property
    def spare(self) -> timedelta | None:
        """Return the time that may pass without a step, so that the deadline is kept after one more interruption.

        An interruption takes two restarts, the lost work, and a reserve for the error of the remaining time. None:
        there is no deadline, or the remaining time is not known.
        """
        if self.deadline is None or self.remaining is None:
            return None
        share = RESERVE_SHARE if self.measured else ESTIMATE_SHARE
        work = (
            self.remaining
            + share * self.remaining
            + (1 + ESTIMATE_SHARE) * self.later_stages
        )
        # One restart before the interruption, if the attempt has not begun yet, and one after it.
        interruption = self.loss + 2 * self.restart
        return self.deadline - work - interruption

    def has_time_for_interruption(self) -> bool:
        """Return whether the deadline can be kept after an interruption."""
        return self.deadline is None or (
            self.spare is not None and self.spare > timedelta()
        )


@dataclass(frozen=True)
class Estimate:
    """Expected cost of the remaining work on the nodes of an offer; of an hour of work if its duration is unknown."""

    price: Decimal
    cost: Decimal
    rate: float = 0.0
    """Interruptions per hour."""


class Estimates(NamedTuple):
    """Expected costs on spot and on on-demand nodes. None: without a price."""

    spot: Estimate | None
    on_demand: Estimate | None


@dataclass(frozen=True)
class Decision:
    """The node class of an attempt, and why."""

    capacity: str
    offer: Offer
    cause: Cause
    spot: Estimate | None = None
    on_demand: Estimate | None = None
