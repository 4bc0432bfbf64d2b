"""Nodes on which attempts of a stage have ended again and again, which its next attempt avoids. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from finetune_operator.api.conditions import Reason
from finetune_operator.api.status import AttemptStatus, Outcome, StageStatus

# The first end may have been bad luck.
ENDS = 2
"""Number of ends on a node from which it is avoided."""
# Fewer than the status keeps, so that the same attempt always avoids the same nodes.
NEWEST = 8
"""Number of the newest ended attempts that count."""
SUSPICIOUS = frozenset({Outcome.FAILED, Outcome.INTERRUPTED})


@dataclass(frozen=True)
class AvoidedNodes:
    """The names of the nodes that an attempt avoids."""

    faulty: tuple[str, ...] = ()
    """Nodes with a device that failed again and again. No pod gets one of them."""
    unlucky: tuple[str, ...] = ()
    """Other nodes with several ends. The cause may be the program, so a pod gets one of them if no other is free."""


NO_NODES = AvoidedNodes()


def avoided_nodes(status: StageStatus, before: int) -> AvoidedNodes:
    """Return the nodes that the attempt of this number avoids, from the attempts before it.

    Attempts before a retry request or a change of the spec do not count: the node may have been repaired.
    """
    ended = [
        attempt
        for attempt in status.attempts
        if attempt.number < before
        and attempt.outcome in SUSPICIOUS
        and status.counts(attempt)
    ][-NEWEST:]
    failed = [attempt for attempt in ended if attempt.reason is Reason.DEVICE_FAILED]
    faulty = _repeated(failed)
    unlucky = _repeated(ended)
    others = tuple(node for node in unlucky if node not in faulty)
    if not faulty and not others:
        return NO_NODES
    return AvoidedNodes(faulty, others)


def avoidance_note(status: StageStatus) -> str:
    """Return which nodes the newest attempt must not get, and the way back; empty if it may get each."""
    last = status.last_attempt
    if last is None:
        return ""
    faulty = avoided_nodes(status, last.number).faulty
    if not faulty:
        return ""
    nodes = ", ".join(faulty)
    return (
        f"node {nodes} is avoided, because a device failed there {ENDS} times: once it is repaired, suspend the "
        "pipeline, annotate it with finetune.dev/retry, and resume it"
    )


def _repeated(attempts: Iterable[AttemptStatus]) -> tuple[str, ...]:
    ends = Counter(_nodes(attempts))
    return tuple(sorted(node for node, count in ends.items() if count >= ENDS))


def _nodes(attempts: Iterable[AttemptStatus]) -> Iterator[str]:
    for attempt in attempts:
        node = attempt.failed_node or attempt.node
        if node:
            yield node
