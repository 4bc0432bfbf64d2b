"""The journal of the observed trainer, and the cost of a fault by it: pure."""

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
    lines = (
        line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")
    )
    whole = (words for words in lines if len(words) == WORDS)
    return [
        Entry(pod, event, int(value), float(when)) for pod, event, value, when in whole
    ]


@dataclass(frozen=True)
class Cost:
    """The cost of a fault."""

    lost: int
    """Steps that were made again."""
    allowed: int
    """The most that the last durable checkpoints allow."""
    seconds: float
    """From the fault to the next step of the last attempt; not a number if there is none."""


def cost_of(journal: Iterable[Entry], jobs: Sequence[str], struck_at: float) -> Cost:
    """Return the cost of a fault at a time, for the Jobs of all attempts in order.

    A step of an attempt counts until the next attempt makes a step: the later steps of a zombie are lost to no attempt.
    When the write of a checkpoint begins, the checkpoint before it is durable.
    """
    entries = list(journal)
    attempts = [_entries_of_job(entries, job) for job in jobs]
    trained = [attempt for attempt in attempts if steps_of(attempt)]
    lost = allowed = 0
    for attempt, successor in pairwise(trained):
        resumed = steps_of(successor)[0]
        before = [entry for entry in attempt if entry.time < resumed.time]
        last = max(entry.value for entry in steps_of(before))
        start = steps_of(attempt)[0].value - 1
        lost += max(0, last - resumed.value + 1)
        allowed += last - _durable_step(before, start)
    newest = steps_of(trained[-1]) if trained else []
    waits = [entry.time - struck_at for entry in newest if entry.time > struck_at]
    return Cost(lost, allowed, min(waits, default=math.nan))


def _entries_of_job(entries: Iterable[Entry], job: str) -> list[Entry]:
    return [entry for entry in entries if entry.pod.startswith(f"{job}-")]


def _durable_step(entries: Iterable[Entry], start: int) -> int:
    """Return the step of the last durable checkpoint of an attempt; `start` if it wrote none."""
    saves = [entry.value for entry in entries if entry.event == "save"]
    failed = {entry.value for entry in entries if entry.event == "unsaved"}
    # The last write may not have ended, so only the checkpoints before it count.
    durable = [step for step in saves[:-1] if step not in failed]
    return max([start, *durable])


def steps_of(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries of steps."""
    return [entry for entry in entries if entry.event == "step"]
