"""One job on one trace, minute by minute: what attempts, waits and evictions do to time, work and cost."""

from bisect import bisect_right
from dataclasses import dataclass, field

from spot_bench.jobs import Job
from spot_bench.traces import Trace, Zone

MEASURED = 5
"""Minutes of work after which the speed is measured."""
NEVER = 10**9


class Capacity:
    """When one zone has spot nodes, for ever: its trace repeats."""

    def __init__(self, zone: Zone, trace: Trace, spot_price: float) -> None:
        self.node_class = zone.node_class
        self.price = spot_price * zone.price_factor
        self._zone = zone
        self._trace = trace
        self._starts = [start for start, _ in zone.intervals]

    def next_start(self, now: int) -> int:
        """Return the first minute from now on in which there is a node; NEVER if there is none in the trace."""
        if not self._starts:
            return NEVER
        turn, index, minute = self._find(now)
        if index >= 0 and minute < self._zone.intervals[index][1]:
            return now
        is_last = index + 1 == len(self._starts)
        later = (
            self._trace.length + self._starts[0] if is_last else self._starts[index + 1]
        )
        return turn * self._trace.length + later - self._trace.begin

    def end(self, now: int) -> tuple[int, bool]:
        """Return the minute in which a node that is there now is taken, and whether with notice."""
        turn, index, _ = self._find(now)
        end = (
            turn * self._trace.length
            + self._zone.intervals[index][1]
            - self._trace.begin
        )
        return end, bool(self._zone.graceful[index])

    def _find(self, now: int) -> tuple[int, int, int]:
        """Return how often the trace was repeated, the last interval that has begun or -1, and the trace's minute."""
        turn, minute = divmod(now + self._trace.begin, self._trace.length)
        return turn, bisect_right(self._starts, minute) - 1, minute


@dataclass
class Run:
    """A job on its way. The time is in minutes since it was submitted, the cost in dollars."""

    job: Job
    zones: list[Capacity]
    now: int = 0
    done: int = 0
    cost: float = 0.0
    measured: bool = False
    attempts: int = 0
    history: list[tuple[str, int, int]] = field(default_factory=list)
    """What it did from when to when: wait, spot or on-demand."""

    @property
    def is_done(self) -> bool:
        """Whether all work is done."""
        return self.done >= self.job.work

    @property
    def is_late(self) -> bool:
        """Whether it has missed its deadline."""
        return self.now > self.job.deadline

    def remaining(self) -> float:
        """Return the work that seems to be left: by the estimate until the speed is measured."""
        if self.measured:
            return (self.job.work - self.done) * (1 + self.job.speed_error)
        return max(1.0, self.job.estimate - self.done)

    def wait(self, until: int) -> None:
        """Spend time without a node."""
        if until > self.now:
            self.history.append(("wait", self.now, until))
        self.now = max(self.now, until)

    def first_zone(self, node_class: str | None = None) -> tuple[int, Capacity]:
        """Return when a spot node can start first, and its zone; of zones with the same start, the cheapest."""
        starts = [
            (zone.next_start(self.now), zone)
            for zone in self.zones
            if node_class in (None, zone.node_class)
        ]
        return min(starts, key=lambda pair: (pair[0], pair[1].price))

    def on_demand(self, until: int | None = None) -> None:
        """Run on an on-demand node until the work is done, or until it is stopped with all its work saved."""
        self._attempt("on-demand", self.job.on_demand_price, until, None)

    def spot(self, zone: Capacity) -> bool:
        """Run on a spot node that is there now. Return whether it was taken before the work was done."""
        end, graceful = zone.end(self.now)
        self._attempt(
            "spot", zone.price, end, None if graceful else self.job.checkpoint
        )
        return not self.is_done

    def _attempt(
        self, kind: str, price: float, until: int | None, checkpoint: int | None
    ) -> None:
        """Start, work and end at `until` at the latest; work after the last checkpoint is lost, if there is one."""
        needed = self.now + self.job.restart + self.job.work - self.done
        end = needed if until is None else min(until, needed)
        worked = max(0, end - self.now - self.job.restart)
        self.measured |= worked >= MEASURED or end == needed
        self.done += (
            worked
            if checkpoint is None or end == needed
            else worked // checkpoint * checkpoint
        )
        self.cost += (end - self.now) * price / 60
        self.history.append((kind, self.now, end))
        self.attempts += 1
        self.now = end


def start(job: Job, trace: Trace) -> Run:
    """Return a run that has not done anything."""
    return Run(job, [Capacity(zone, trace, job.spot_price) for zone in trace.zones])
