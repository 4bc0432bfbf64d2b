"""Pipelines that are created, finish and are deleted without end, and the operator's memory meanwhile."""

import asyncio
import time
from dataclasses import dataclass, field

from operator_bench.api import PIPELINES, Api, condition, open_api
from operator_bench.cluster import BenchCluster
from operator_bench.operator_process import running_operator
from operator_bench.pipelines import claim_name, pipeline, pipeline_name
from operator_bench.user import create_claims

WARM_UP = 0.2
"""Share of the samples at the beginning that the slope leaves out: caches and the allocator grow first."""
SAMPLE_SECONDS = 1.0
TIMEOUT = 300.0
"""Seconds in which a pipeline must finish."""


@dataclass
class Churn:
    """Slots that each run one pipeline after another on their own claim."""

    api: Api
    deadline: float
    started: int = 0
    deleted: int = 0
    finished: dict[str, asyncio.Event] = field(default_factory=dict)

    async def run(self, slots: int) -> None:
        """Run all slots until the deadline."""
        names = [pipeline_name(number) for number in range(slots)]
        await create_claims(self.api, names)
        _, version = await self.api.list(PIPELINES)
        watch = asyncio.create_task(self._watch(version))
        await asyncio.gather(*(self._run_slot(claim_name(name)) for name in names))
        watch.cancel()

    async def _watch(self, version: str) -> None:
        async for event in self.api.watch(PIPELINES, version):
            name = event["object"]["metadata"]["name"]
            if name in self.finished and condition(event["object"], "Finished"):
                self.finished[name].set()

    async def _run_slot(self, claim: str) -> None:
        while time.monotonic() < self.deadline:
            name = pipeline_name(self.started)
            self.started += 1
            finished = self.finished[name] = asyncio.Event()
            await self.api.send("POST", PIPELINES, pipeline(name, claim))
            async with asyncio.timeout(TIMEOUT):
                await finished.wait()
            del self.finished[name]
            await self.api.send("DELETE", f"{PIPELINES}/{name}")
            self.deleted += 1


@dataclass(frozen=True)
class ChurnRun:
    """Figures of one churn."""

    minutes: float
    pipelines: int
    """Pipelines that were created, finished and deleted."""
    samples: list[tuple[float, float]]
    """Seconds since the start, and resident memory in MiB."""
    slope: float
    """MiB per hour, by least squares."""


def measure_churn(bench: BenchCluster, minutes: float, slots: int, workers: int | None) -> ChurnRun:
    """Run the churn beside an operator, and sample its memory each second."""
    with running_operator(bench, workers) as operator:
        operator.wait_idle()
        began, samples = time.monotonic(), []

        async def sample() -> None:
            while True:
                samples.append((time.monotonic() - began, operator.rss))
                await asyncio.sleep(SAMPLE_SECONDS)

        async def run() -> int:
            async with open_api(bench.kubeconfig("user"), "bench-user") as api:
                sampler = asyncio.create_task(sample())
                churn = Churn(api, began + 60 * minutes)
                await churn.run(slots)
                sampler.cancel()
                return churn.deleted

        deleted = asyncio.run(run())
    return ChurnRun(minutes, deleted, samples, 3600 * slope(samples[int(len(samples) * WARM_UP) :]))


def slope(samples: list[tuple[float, float]]) -> float:
    """Return the slope of the line with the least squares through the samples."""
    mean_x = sum(x for x, _ in samples) / len(samples)
    mean_y = sum(y for _, y in samples) / len(samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / sum(
        (x - mean_x) ** 2 for x, _ in samples
    )
