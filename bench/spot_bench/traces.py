"""Traces of spot capacity: families with published shapes, and files.

Sources:

- NSDI'24: Wu et al., "Can't Be Late: Optimizing Spot Instance Savings under Deadlines", sections 2.2-2.4 and 6.4, and
  its open traces (github.com/skypilot-org/spot-traces): GPU nodes on AWS, nine zones, three months.
- Advisor: AWS Spot Instance Advisor, the share of capacity that was reclaimed in the trailing month: <5 %, 5-10 %,
  10-15 %, 15-20 %, >20 %.
- Spot-and-Scoot: Kim et al., 2026 (arXiv 2604.16457): 2,635 interruptions on AWS and Azure.
- Constrained preemptions: Kadupitiya et al., HPDC'20 (arXiv 1911.05160): Google's preemptible VMs.

Each family's function says what is published and what is assumed. No source says how often a user meets each of them:
all have the same weight.
"""

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HOUR = 60
DAY = 24 * HOUR
LENGTH = 28 * DAY
"""Minutes of a generated trace. It repeats."""
GRACEFUL = 0.7
"""Share of evictions with a notice that is long enough for a save. Assumed: AWS gives 120 s, GKE 15-30 s."""

Interval = tuple[int, int]
"""First minute with capacity, and first minute without."""


@dataclass(frozen=True)
class Zone:
    """Spot nodes of one node class that come and go together: all or none, 94 % of the time (NSDI'24, 2.4)."""

    node_class: str
    price_factor: float
    intervals: Sequence[Interval]
    graceful: Sequence[bool]
    """Whether the eviction at the end of each interval loses no work."""


@dataclass(frozen=True)
class Trace:
    """Availability of spot nodes in some zones, from minute 0. It repeats after its length."""

    family: str
    zones: Sequence[Zone]
    length: int = LENGTH
    begin: int = 0
    """Minute of the trace in which the job is submitted."""


Family = Callable[[np.random.Generator], list[tuple[str, float, list[Interval]]]]
"""Node class, price factor and intervals of each zone."""


def steady(rng: np.random.Generator) -> list[tuple[str, float, list[Interval]]]:
    """Return a zone as the Advisor describes most node types.

    Published: its five ranges, each drawn as often; the last ends at 40 % here. Assumed: a node lives for a day, so
    that a share q means -ln(1 - q) interruptions a day, and capacity is back after 20 minutes (median).
    """
    low, high = [(0.01, 0.05), (0.05, 0.10), (0.10, 0.15), (0.15, 0.20), (0.20, 0.40)][
        rng.integers(5)
    ]
    hours = -24 / np.log1p(-rng.uniform(low, high))
    return [
        (
            "spot",
            1.0,
            alternate(
                rng, lambda: rng.exponential(hours), lambda: lognormal(rng, 1 / 3, 1.0)
            ),
        )
    ]


def volatile(rng: np.random.Generator) -> list[tuple[str, float, list[Interval]]]:
    """Return a zone of scarce GPU nodes that is available for more than half of the time.

    Published (NSDI'24): 72 % of the cases of two months; availability goes from 100 % to 0 % within hours; outages last
    for hours or even days. In the open trace us-west-2a of February 2023, periods with capacity last from 10 minutes to
    80 hours, and without it from 10 minutes to 8 hours. Assumed: both are lognormal with these spans as four sigma.
    """
    return [("spot", 1.0, _volatile(rng))]


def _volatile(rng: np.random.Generator) -> list[Interval]:
    up = rng.uniform(2, 6)
    down = rng.uniform(1 / 3, 4 / 3)
    return alternate(
        rng, lambda: lognormal(rng, up, 1.4), lambda: lognormal(rng, down, 1.2)
    )


def scarce(rng: np.random.Generator) -> list[tuple[str, float, list[Interval]]]:
    """Return a zone that is available for less than half of the time: the other 28 % (NSDI'24, 6.4).

    Assumed: the spans of `volatile`, with the two exchanged.
    """
    up = rng.uniform(1 / 3, 4 / 3)
    down = rng.uniform(2, 6)
    return [
        (
            "spot",
            1.0,
            alternate(
                rng, lambda: lognormal(rng, up, 1.2), lambda: lognormal(rng, down, 1.4)
            ),
        )
    ]


def bursts(rng: np.random.Generator) -> list[tuple[str, float, list[Interval]]]:
    """Return a zone that is quiet for hours and then takes nodes again and again.

    Published: interruptions come together, 92 % within three minutes (Spot-and-Scoot). The open preemption trace
    us-west-2c of April 2023 has 11 and 6 quiet hours, then ten periods of 1 to 40 minutes with outages of 2 to 80.
    Assumed: quiet for 10 hours on average, bursts for 3.
    """
    left = 0.0

    def up() -> float:
        nonlocal left
        if left <= 0:
            left = rng.exponential(3)
            return rng.exponential(10)
        hours = lognormal(rng, 0.2, 1.0)
        left -= hours
        return hours

    def down() -> float:
        nonlocal left
        hours = lognormal(rng, 0.15, 1.0)
        left -= hours
        return hours

    return [("spot", 1.0, alternate(rng, up, down))]


def daily(rng: np.random.Generator) -> list[tuple[str, float, list[Interval]]]:
    """Return a zone that users need for themselves in their working hours.

    Published: preemptions depend on the time (Constrained preemptions); no source that we found has a curve for GPUs.
    Assumed: on seven days of ten there is no capacity for 4 to 10 hours from about 9 o'clock; else as `volatile`, but
    three times as long. The job starts at any hour.
    """
    up = rng.uniform(6, 18)
    zone = alternate(
        rng, lambda: lognormal(rng, up, 1.4), lambda: lognormal(rng, 0.5, 1.2)
    )
    shift = int(rng.integers(DAY))
    for day in range(-1, LENGTH // DAY):
        if rng.random() < 0.7:
            start = day * DAY + shift + int(rng.normal(0, HOUR))
            zone = without(zone, (start, start + int(rng.uniform(4, 10) * HOUR)))
    return [("spot", 1.0, zone)]


def outages(rng: np.random.Generator) -> list[tuple[str, float, list[Interval]]]:
    """Return a steady zone with one long outage, which begins in the first three days.

    Published: outages last for hours or even days (NSDI'24, 2.2). Assumed: 6 to 48 hours.
    """
    [(name, factor, zone)] = steady(rng)
    start = int(rng.uniform(0, 3 * DAY))
    return [
        (name, factor, without(zone, (start, start + int(rng.uniform(6, 48) * HOUR))))
    ]


def zones(rng: np.random.Generator) -> list[tuple[str, float, list[Interval]]]:
    """Return one node class in three volatile zones: there is little correlation across zones (NSDI'24, 2.2)."""
    return [("spot", 1.0, _volatile(rng)) for _ in range(3)]


def classes(rng: np.random.Generator) -> list[tuple[str, float, list[Interval]]]:
    """Return two node classes, of which the second costs 10 to 60 % more. Both are volatile. Assumed."""
    return [
        ("spot", 1.0, _volatile(rng)),
        ("spot-2", rng.uniform(1.1, 1.6), _volatile(rng)),
    ]


FAMILIES: dict[str, Family] = {
    family.__name__: family
    for family in (steady, volatile, scarce, bursts, daily, outages, zones, classes)
}


def lognormal(rng: np.random.Generator, median: float, sigma: float) -> float:
    """Return a draw, in the unit of its median."""
    return median * float(np.exp(rng.normal(0, sigma)))


def alternate(
    rng: np.random.Generator, up: Callable[[], float], down: Callable[[], float]
) -> list[Interval]:
    """Return intervals whose hours with capacity and without are drawn in turns, from a random moment on."""
    minute = -int(rng.integers(4 * DAY))
    intervals = []
    while minute < LENGTH:
        end = minute + max(1, round(up() * HOUR))
        if end > 0:
            intervals.append((max(0, minute), min(end, LENGTH)))
        minute = end + max(1, round(down() * HOUR))
    return intervals


def without(intervals: Sequence[Interval], outage: Interval) -> list[Interval]:
    """Return the intervals less one outage."""
    parts = [
        part
        for start, end in intervals
        for part in ((start, min(end, outage[0])), (max(start, outage[1]), end))
    ]
    return [(start, end) for start, end in parts if start < end]


def generate(family: str, rng: np.random.Generator) -> Trace:
    """Return a trace of a family."""
    drawn = FAMILIES[family](rng)
    return Trace(
        family,
        [Zone(*zone, (rng.random(len(zone[2])) < GRACEFUL).tolist()) for zone in drawn],
    )


def read_trace(path: Path) -> Trace:
    """Return the trace in a file, as one zone.

    A CSV file has the columns start, end (hours) and available (0 or 1). A JSON file is one of the open traces of
    NSDI'24: metadata.gap_seconds, and data, the number of nodes at each tick. Raises ValueError for any other file.
    """
    pieces = _read_json(path) if path.suffix == ".json" else _read_csv(path)
    minutes = [
        (round(start), round(end), available) for start, end, available in pieces
    ]
    up = [
        (start, end) for start, end, available in minutes if available and start < end
    ]
    if not up:
        raise ValueError(
            f"{path}: no interval has capacity: an interval with available=1 is needed"
        )
    return Trace(
        path.stem,
        [Zone("spot", 1.0, merged(up), [False] * len(up))],
        max(end for _, end, _ in minutes),
    )


def _read_csv(path: Path) -> list[tuple[float, float, bool]]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or not {"start", "end", "available"} <= rows[0].keys():
        raise ValueError(
            f"{path}: the columns are {list(rows[0]) if rows else []}: name them start,end,available"
        )
    return [
        (float(row["start"]) * HOUR, float(row["end"]) * HOUR, row["available"] == "1")
        for row in rows
    ]


def _read_json(path: Path) -> list[tuple[float, float, bool]]:
    content = json.loads(path.read_text())
    gap = content["metadata"]["gap_seconds"] / 60
    return [
        (tick * gap, (tick + 1) * gap, nodes > 0)
        for tick, nodes in enumerate(content["data"])
    ]


def merged(intervals: Sequence[Interval]) -> list[Interval]:
    """Return intervals in order; intervals that touch become one."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined
