"""Measure the time from an evicted Job's condition Failed to the creation of the next attempt's Job.

    python bench/eviction_latency.py [--evictions 100] [--pipelines 5] [--seed 1]

Creates a cluster of a control plane only, whose pods are simulated. Pods of train are evicted with the Eviction API
while they run, and each saves a new step. One watch of all Jobs delivers both events, and their times are those of
their arrival. The operator has one second of backoff after an attempt that saved nothing new: that is not measured.

Exits with 1 where p99 is longer than a second, or an attempt is missing.
"""

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "operator"), str(ROOT / "trainer"), str(ROOT / "tests")]

from support.faults.api import PIPELINES, Api  # noqa: E402
from support.faults.kubelet import run_until_deleted, succeed  # noqa: E402
from support.faults.manifest import manifest  # noqa: E402
from support.faults.operators import KUBECONFIG, OperatorForks, OperatorProcess  # noqa: E402
from support.faults.pods import INTERRUPTED, Ending, StagePod  # noqa: E402
from support.faults.simulation import PLANE, Simulation, simulation, until  # noqa: E402
from support.operator.operator_process import install_crd  # noqa: E402

from testcluster import fixtures  # noqa: E402

NAMESPACE = "evictions"
STEPS = 10
"""New steps that each attempt saves."""
LIMIT = 1.0
"""Seconds; p99 must not be longer."""
MOST_INTERRUPTIONS = 1000


@dataclass
class Latencies:
    """The times of every Job of train, by the clock of this process."""

    failed: dict[tuple[str, int], float] = field(default_factory=dict)
    """Job without its attempt, and attempt -> when its condition Failed arrived."""
    created: dict[tuple[str, int], float] = field(default_factory=dict)

    def note(self, kind: str, job: dict[str, Any]) -> None:
        """Note a watch event."""
        stem, _, number = job["metadata"]["name"].rpartition("-a")
        key, now = (stem, int(number)), time.monotonic()
        if not stem.endswith("-train"):
            return
        if kind == "ADDED":
            self.created.setdefault(key, now)
        conditions = job.get("status", {}).get("conditions", [])
        if any((one["type"], one["status"]) == ("Failed", "True") for one in conditions):
            self.failed.setdefault(key, now)

    def seconds(self) -> list[float]:
        """Return the latencies, sorted; infinite where the next Job was not created."""
        found = (
            self.created.get((stem, number + 1), math.inf) - when
            for (stem, number), when in self.failed.items()
        )
        return sorted(found)


@dataclass
class Evictions:
    """The behaviour of the pods: those of the first attempts are evicted."""

    simulated: Simulation
    each: int
    """Of each pipeline."""
    chance: random.Random

    async def behave(self, pod: StagePod) -> Ending:
        """Run for a moment, then be evicted or succeed."""
        await asyncio.sleep(self.chance.uniform(0.3, 2.0))
        if pod.stage == "train" and pod.attempt <= self.each:
            await self.simulated.kubelet.evict(pod)
            return await run_until_deleted(pod)
        return await succeed(pod)


def saved(pod: StagePod) -> Ending:
    """Return the end of a process that saved new steps on SIGTERM."""
    step = pod.attempt * STEPS
    return Ending(INTERRUPTED, json.dumps({"interruption": {"step": step, "savedStep": step}}))


async def follow(api: Api, latencies: Latencies) -> None:
    """Note every event of the Jobs until cancelled."""
    async for kind, jobs in api.follow(f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"):
        for job in jobs:
            latencies.note(kind, job)


async def measure(
    kubeconfig: Path, operator: OperatorProcess, count: int, each: int, seed: int
) -> Latencies:
    """Run pipelines whose pods are evicted, and return the times."""
    latencies = Latencies()
    async with simulation(kubeconfig, operator.forks, operator.folder) as simulated:
        await simulated.create_namespace(NAMESPACE)
        chance = random.Random(seed)  # noqa: S311  no secret
        simulated.kubelet.behaviours[NAMESPACE] = Evictions(simulated, each, chance).behave
        simulated.kubelet.ending, simulated.kubelet.grace = saved, lambda _pod: 0.1
        operator.start()
        following = asyncio.create_task(follow(simulated.api, latencies))
        try:
            await run_pipelines(simulated, count, each)
        finally:
            following.cancel()
            operator.kill()
    return latencies


async def run_pipelines(simulated: Simulation, count: int, each: int) -> None:
    """Create the pipelines and wait until all have succeeded."""
    names = [f"p{number}" for number in range(count)]
    path = f"{PIPELINES}/namespaces/{NAMESPACE}/finetunepipelines"
    for name in names:
        wanted = manifest(
            name, stages=("prepare", "train"), train={"maxInterruptions": MOST_INTERRUPTIONS}
        )
        await simulated.api.create(path, wanted)

    async def all_succeeded() -> bool:
        found = (simulated.pipelines.objects.get(f"{path}/{name}", {}) for name in names)
        return all(one.get("status", {}).get("phase") == "Succeeded" for one in found)

    await until(all_succeeded, 60 + 20 * each, "not all pipelines have succeeded")


def percentile(ordered: list[float], part: float) -> float:
    """Return the smallest value that this part of the values does not exceed."""
    return ordered[math.ceil(part * len(ordered)) - 1]


def report(ordered: list[float]) -> Iterable[str]:
    """Yield the lines of the report."""
    yield f"evictions: {len(ordered)}"
    yield "seconds from the Job's condition Failed to the next attempt's Job:"
    yield f"  median {statistics.median(ordered):.3f}, p99 {percentile(ordered, 0.99):.3f}, longest {ordered[-1]:.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--evictions", type=int, default=100, help="of all pipelines together")
    parser.add_argument("--pipelines", type=int, default=5, help="that run at a time")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    each = math.ceil(chosen.evictions / chosen.pipelines)
    with (
        fixtures.cluster("latency", "none", control_plane=PLANE) as cluster,
        tempfile.TemporaryDirectory() as folder,
    ):
        install_crd(cluster.kube)
        Path(folder, KUBECONFIG).write_text(cluster.kubeconfig.read_text())
        forks = OperatorForks()
        operator = OperatorProcess(forks, Path(folder), NAMESPACE)
        try:
            run = measure(cluster.kubeconfig, operator, chosen.pipelines, each, chosen.seed)
            ordered = asyncio.run(run).seconds()
        finally:
            forks.close()
    print("\n".join(report(ordered)))
    return int(len(ordered) != each * chosen.pipelines or percentile(ordered, 0.99) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
