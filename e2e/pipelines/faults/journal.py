"""The journal of the observed trainer, and what a fault cost by it: pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

WORDS = 4
"""Words of a line."""


@dataclass(frozen=True)
class Entry:
    """One line of the journal of the observed trainer."""

    pod: str
    event: str
    value: int
    time: float


def read_journal(text: str) -> list[Entry]:
    """Return the complete lines of a journal."""
    lines = (line.split() for line in text.splitlines(keepends=True) if line.endswith("\n"))
    whole = (words for words in lines if len(words) == WORDS)
    return [Entry(pod, event, int(value), float(when)) for pod, event, value, when in whole]


@dataclass(frozen=True)
class Cost:
    """What a fault cost."""

    lost: int
    """Steps that were made again."""
    allowed: int
    """The most that the last durable checkpoints allow."""
    seconds: float
    """From the fault to the next step of the last attempt; not a number if there is none."""


def cost_of(journal: Iterable[Entry], jobs: Sequence[str], struck_at: float) -> Cost:
    """Return the cost of a fault at a time, for the Jobs of all attempts in order.

    A step of an attempt counts until the next attempt makes one: what a zombie does later is lost to no attempt.
    When the write of a checkpoint begins, the checkpoint before it is durable.
    """
    entries = list(journal)
    own = [[one for one in entries if one.pod.startswith(f"{job}-")] for job in jobs]
    trained = [found for found in own if steps_of(found)]
    lost = allowed = 0
    for found, later in pairwise(trained):
        resumed = steps_of(later)[0]
        before = [one for one in found if one.time < resumed.time]
        last = max(one.value for one in steps_of(before))
        begun = [one.value for one in before if one.event == "save"]
        failed = {one.value for one in before if one.event == "unsaved"}
        durable = max(
            [steps_of(found)[0].value - 1, *(step for step in begun[:-1] if step not in failed)]
        )
        lost, allowed = lost + max(0, last - resumed.value + 1), allowed + last - durable
    newest = steps_of(trained[-1]) if trained else []
    return Cost(
        lost,
        allowed,
        min((one.time - struck_at for one in newest if one.time > struck_at), default=math.nan),
    )


def steps_of(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries of steps."""
    return [one for one in entries if one.event == "step"]
