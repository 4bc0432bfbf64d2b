"""The lowest cost with which a job can meet its deadline, if all of the trace is known in advance."""

from collections import deque

import numpy as np

from spot_bench.jobs import Job
from spot_bench.simulation import Capacity, start
from spot_bench.traces import Trace

Costs = np.ndarray
"""Dollars from a minute on, by minutes of work that are left: shape (work + 1,)."""


def optimum(job: Job, trace: Trace, reserve: int = 0) -> float:
    """Return the cost, in dollars; infinite if the deadline cannot be met.

    Dynamic programming back from the deadline, over minutes and the work that is left, in the same model as the
    policies: an attempt starts at any minute and costs the restart, a wait costs nothing. It knows when a node will be
    taken and stops in the minute before with all work saved, so losses never count: no policy can be cheaper.

    With a reserve it starts on spot nodes only if so many minutes more than the work are left until the deadline.
    """
    run = start(job, trace)
    left = np.arange(job.work + 1)
    idle = np.where(left == 0, 0.0, np.inf)
    nodes = [
        _Nodes(job, job.on_demand_price, None),
        *(_Nodes(job, zone.price, zone) for zone in run.zones),
    ]
    for node in nodes:
        node.reset(idle)
    for minute in range(job.deadline - 1, -1, -1):
        later = idle
        idle = later.copy()
        for node in nodes:
            node.step_back(minute, idle, job.deadline - minute - reserve)
        for node in nodes:
            node.allow_stop(idle)
    return float(idle[-1])


class _Nodes:
    """Cost-to-go of an attempt that works on nodes of one price, in the last minutes that were computed."""

    def __init__(self, job: Job, price: float, zone: Capacity | None) -> None:
        self._price = price / 60
        self._restart = job.restart
        self._is_spot = zone is not None
        self._up = _availability(job, zone)
        self._ready_from = _length_of_capacity(self._up)
        self._working: deque[Costs] = deque(maxlen=job.restart + 1)

    def reset(self, final: Costs) -> None:
        """Begin at the deadline."""
        self._working.clear()
        self._working.append(final)

    def step_back(self, minute: int, idle: Costs, most: int) -> None:
        """Compute a minute from the next one; lower `idle` if starting an attempt is cheaper than waiting.

        On spot nodes it may start with `most` minutes of work that are left.
        """
        later = self._working[-1]
        working = np.full_like(later, np.inf)
        if self._up[minute]:
            working[1:] = later[:-1] + self._price
            working[0] = 0.0
        self._working.append(working)
        if (
            self._ready_from[minute] >= self._restart
            and len(self._working) > self._restart
        ):
            allowed = slice(max(0, most + 1) if self._is_spot else None)
            np.minimum(
                idle[allowed],
                (self._working[0] + self._price * self._restart)[allowed],
                out=idle[allowed],
            )

    def allow_stop(self, idle: Costs) -> None:
        """Make an attempt that may end in this minute as cheap as one that has ended."""
        np.minimum(self._working[-1], idle, out=self._working[-1])


def _availability(job: Job, zone: Capacity | None) -> np.ndarray:
    """Return for each minute until the deadline whether there is a node."""
    up = np.ones(job.deadline, dtype=bool)
    minute = 0
    while zone and minute < job.deadline:
        begin = zone.next_start(minute)
        up[minute:begin] = False
        minute = zone.end(begin)[0] if begin < job.deadline else job.deadline
    return up


def _length_of_capacity(up: np.ndarray) -> np.ndarray:
    """Return for each minute how many minutes in a row there is a node from it on."""
    lengths = np.zeros(len(up) + 1, dtype=int)
    for minute in range(len(up) - 1, -1, -1):
        lengths[minute] = lengths[minute + 1] + 1 if up[minute] else 0
    return lengths
