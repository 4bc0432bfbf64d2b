"""The operator is killed before and after each of its requests in turn; every life ends as the undisturbed life.

A request that is killed "before" never reaches the API server. A request that is killed "after" is executed, and its
answer is lost. The operator is restarted at once. By default a spread of the cut points runs. FAULTS=all runs all of
them, and FAULTS=1/3, FAULTS=2/3 and FAULTS=3/3 a third each.
"""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.faults.faults import Cut, Kind, Request
from support.faults.life import Life, Outcome, a_life
from support.faults.operators import OperatorForks
from support.faults.simulation import Simulation, simulation

PARALLEL_LIVES = 8
REFERENCE_LIVES = 5
LONGEST = 1500
"""Characters of a difference that are printed."""
DEFAULT_POINTS = 12
"""Cut points of a default run; they are spread evenly over all."""


@dataclass(frozen=True)
class CutPoint:
    """The moment at which the operator is killed."""

    kind: Kind
    number: int
    when: str

    def __str__(self) -> str:
        return f"{self.when} {self.kind} {self.number}"


@dataclass
class CutLife:
    """A life with one cut point."""

    point: CutPoint
    reached: str = ""
    """The request at which the operator was killed; empty: the life had fewer requests."""
    outcome: Outcome | None = None
    error: str = ""

    async def run(self, life: Life) -> None:
        """Live the life and kill the operator at the cut point."""

        def rule(request: Request) -> Cut | None:
            if self.reached or (request.kind, request.number) != (
                self.point.kind,
                self.point.number,
            ):
                return None
            self.reached = str(request)
            return Cut(self.point.when, life.operator.restart)  # type: ignore[arg-type]

        life.proxy.rule = rule
        try:
            self.outcome = await life.run()
        except Exception as error:  # noqa: BLE001  one life must not end the others
            self.error = f"{type(error).__name__}: {error}"


@dataclass
class Sweep:
    """The undisturbed life, and the lives that were cut off."""

    expected: Outcome
    counts: Mapping[Kind, int]
    writes: int
    lives: list[CutLife]

    def different(self) -> dict[str, list[str]]:
        """Return what differs from the undisturbed life, by cut point."""
        problems = {
            f"{life.point} ({life.reached})": list(self._differences(life))
            for life in self.lives
        }
        return {point: texts for point, texts in problems.items() if texts}

    def _differences(self, life: CutLife):
        if life.outcome is None:
            yield life.error[-LONGEST:]
            return
        if life.outcome.status != self.expected.status:
            texts = "; ".join(differences(self.expected.status, life.outcome.status))
            yield f"status: {texts[:LONGEST]}"
        repeated = [
            stage for stage, count in life.outcome.successes.items() if count != 1
        ]
        if repeated or set(life.outcome.successes) != set(self.expected.successes):
            yield f"successes: {dict(life.outcome.successes)}"
        yield from life.outcome.problems
        yield from (f"leaked {name}" for name in life.outcome.leaked)


def differences(expected, actual, path="") -> list[str]:
    """Return the paths at which two statuses differ, with both values."""
    if expected == actual:
        return []
    if isinstance(expected, dict) and isinstance(actual, dict):
        texts = []
        for key in sorted(expected.keys() | actual.keys()):
            texts += differences(expected.get(key), actual.get(key), f"{path}.{key}")
        return texts
    if (
        isinstance(expected, list)
        and isinstance(actual, list)
        and len(expected) == len(actual)
    ):
        texts = []
        for index, (old, new) in enumerate(zip(expected, actual, strict=True)):
            texts += differences(old, new, f"{path}[{index}]")
        return texts
    return [f"{path}: {expected!r} became {actual!r}"]


@asynccontextmanager
async def namespaces(
    simulated: Simulation, count: int
) -> AsyncIterator[asyncio.Queue[str]]:
    """Create namespaces that lives use in turn; every life leaves its namespace empty, or is reported."""
    free: asyncio.Queue[str] = asyncio.Queue()
    names = [f"cut-{number}" for number in range(count)]
    await asyncio.gather(*(simulated.create_namespace(name) for name in names))
    for name in names:
        free.put_nowait(name)
    yield free
    await asyncio.gather(*(simulated.delete_namespace(name) for name in names))


def all_points(counts: Mapping[Kind, int]) -> list[CutPoint]:
    """Return every cut point; of the requests for the Lease the first two, which acquire it."""
    numbers = {"request": counts["request"], "watch": counts["watch"], "lease": 2}
    return [
        CutPoint(kind, number, when)  # type: ignore[arg-type]
        for kind, last in numbers.items()
        for number in range(1, last + 1)
        for when in ("before", "after")
    ]


def chosen_points(points: list[CutPoint]) -> list[CutPoint]:
    """Return all points with FAULTS=all, every third with FAULTS=1/3, else DEFAULT_POINTS, spread evenly."""
    part, _, parts = os.environ.get("FAULTS", "").partition("/")
    if parts:
        return points[int(part) - 1 :: int(parts)]
    if part == "all" or len(points) <= DEFAULT_POINTS:
        return points
    return [
        points[index * len(points) // DEFAULT_POINTS] for index in range(DEFAULT_POINTS)
    ]


async def undisturbed(
    simulated: Simulation, namespace: str
) -> tuple[Outcome, list[Request]]:
    """Live a life without faults; return its outcome and the requests of its operator."""
    async with a_life(simulated, namespace, "undisturbed") as life:
        return await life.run(), life.proxy.requests


async def run_sweep(kubeconfig: Path, forks: OperatorForks, folder: Path) -> Sweep:
    """Live some undisturbed lives, then the others, PARALLEL_LIVES at a time.

    How many requests a life has depends on how many events lead to one reconcile. The cut points are taken
    from the undisturbed life with the median number of requests.
    """
    async with (
        simulation(kubeconfig, forks, folder) as simulated,
        namespaces(simulated, PARALLEL_LIVES) as free,
    ):
        references = await asyncio.gather(
            *(
                undisturbed(simulated, f"cut-{number}")
                for number in range(REFERENCE_LIVES)
            )
        )
        references.sort(key=lambda reference: len(reference[1]))
        expected, requests = references[REFERENCE_LIVES // 2]
        counts = Counter(request.kind for request in requests)
        writes = sum(
            request.is_write and request.kind == "request" for request in requests
        )
        lives = [CutLife(point) for point in chosen_points(all_points(counts))]

        async def run(life: CutLife) -> None:
            namespace = await free.get()
            name = f"{life.point.when}-{life.point.kind}-{life.point.number}"
            async with a_life(simulated, namespace, name) as prepared:
                await life.run(prepared)
            free.put_nowait(namespace)

        await asyncio.gather(*(run(life) for life in lives))
    return Sweep(expected, dict(counts), writes, lives)


@pytest.fixture(scope="module")
def sweep(kubeconfig, forks, tmp_path_factory) -> Sweep:
    sweep = asyncio.run(run_sweep(kubeconfig, forks, tmp_path_factory.mktemp("cut")))
    reached = sum(bool(life.reached) for life in sweep.lives)
    total = len(all_points(sweep.counts))
    print(f"\nundisturbed life: {sweep.counts}, {sweep.writes} of the requests write")
    print(
        f"cut points: {total}; lives: {len(sweep.lives)}; cut: {reached}; different: {len(sweep.different())}"
    )
    return sweep


def test_undisturbed_life_succeeds_and_leaves_nothing(sweep):
    assert sweep.expected.status["phase"] == "Succeeded"
    assert list(sweep.expected.successes.values()) == [1, 1, 1, 1]
    assert not sweep.expected.problems
    assert not sweep.expected.leaked


def test_killed_operator_ends_every_life_like_undisturbed(sweep):
    different = sweep.different()
    assert not different, "\n".join(
        f"{point}: {' | '.join(problems)}" for point, problems in different.items()
    )


def test_most_cut_points_are_reached(sweep):
    """A life may have fewer requests than the undisturbed life, because several events lead to one reconcile."""
    assert sum(bool(life.reached) for life in sweep.lives) >= 0.7 * len(sweep.lives)
