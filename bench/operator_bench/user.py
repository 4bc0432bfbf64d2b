"""Requests of the pipelines' user: create pipelines and volumes, concurrently, and read objects."""

import asyncio
import time
from collections.abc import Coroutine, Iterable
from typing import Any

from operator_bench.api import CLAIMS, PIPELINES, VOLUMES, Api, Object, open_api
from operator_bench.cluster import BenchCluster
from operator_bench.pipelines import claim, claim_name, pipeline, pipeline_name, volume

CONCURRENT = 16
BOUND_WITHIN = 300
BOUND_SECONDS_PER_CLAIM = 0.1
"""Timeout until claims are bound."""


async def gather(
    work: Iterable[Coroutine[Any, Any, Any]], limit: int = CONCURRENT
) -> list[Any]:
    """Run coroutines, at most `limit` of them at a time, and return their results in order."""
    semaphore = asyncio.Semaphore(limit)

    async def limited(coroutine: Coroutine[Any, Any, Any]) -> Any:
        async with semaphore:
            return await coroutine

    return await asyncio.gather(*(limited(coroutine) for coroutine in work))


async def create_pipelines(api: Api, manifests: Iterable[Object]) -> float:
    """Create pipelines as fast as the API server accepts them; return when the first request was sent."""
    started = time.monotonic()
    await gather(api.send("POST", PIPELINES, manifest) for manifest in manifests)
    return started


async def create_claims(api: Api, names: list[str]) -> None:
    """Create a volume and a claim for each pipeline, and wait until all claims are bound."""
    await create_volumes(api, names)
    await gather(api.send("POST", CLAIMS, claim(claim_name(name))) for name in names)
    async with asyncio.timeout(BOUND_WITHIN + BOUND_SECONDS_PER_CLAIM * len(names)):
        while not all(  # noqa: ASYNC110  the API server is asked
            item["status"]["phase"] == "Bound" for item in (await api.list(CLAIMS))[0]
        ):
            await asyncio.sleep(0.5)


async def create_volumes(api: Api, names: Iterable[str]) -> None:
    """Create a volume for each pipeline."""
    await gather(api.send("POST", VOLUMES, volume(f"volume-{name}")) for name in names)


def prepare_claims(bench: BenchCluster, count: int, *, existing: bool) -> None:
    """Create what the claims of the pipelines need: volumes only, or bound claims."""

    async def create() -> None:
        names = [pipeline_name(number) for number in range(count)]
        async with open_api(bench.kubeconfig("user"), "bench-user") as api:
            await (
                create_claims(api, names) if existing else create_volumes(api, names)
            )

    asyncio.run(create())


async def create_paced(api: Api, manifests: Iterable[Object], interval: float) -> float:
    """Create a pipeline every `interval` seconds; return when the first request was sent.

    A late answer does not delay the next request, so the offered load stays what it is.
    """
    started = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number, manifest in enumerate(manifests):
            due = started + number * interval
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            group.create_task(api.send("POST", PIPELINES, manifest))
    return started


def submit(
    bench: BenchCluster, count: int, *, existing_claims: bool, interval: float = 0.0
) -> float:
    """Create this many pipelines, at once or with an interval of seconds; return when the first request was sent."""

    async def create() -> float:
        names = (pipeline_name(number) for number in range(count))
        manifests = (
            pipeline(name, claim_name(name) if existing_claims else None)
            for name in names
        )
        async with open_api(bench.kubeconfig("user"), "bench-user") as api:
            if interval:
                return await create_paced(api, manifests, interval)
            return await create_pipelines(api, manifests)

    return asyncio.run(create())
