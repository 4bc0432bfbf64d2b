"""A pipeline beside namespaces that want more than their share of the operator: it ends as it does alone.

One namespace has 100 servers that do not answer, stages that are interrupted again and again, and pipelines of 560 kB,
as large as the limits of the API allow. In two others an admission webhook does not answer, so that each request to
create a Job takes ten seconds. `FAULTS=all` runs it.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.faults.api import PIPELINES
from support.faults.kubelet import run_until_deleted, succeed
from support.faults.life import Life, Outcome, a_life, replica
from support.faults.manifest import STAGES, manifest
from support.faults.operators import OperatorForks
from support.faults.pods import Ending, StagePod, interrupted
from support.faults.proxy import running_proxy
from support.faults.simulation import MUTE, Simulation, own_address, simulation, until

pytestmark = pytest.mark.skipif(
    os.environ.get("FAULTS") != "all", reason="FAULTS=all runs it: two minutes"
)
Object = dict[str, Any]
GREEDY = "greedy"
SLOW = ("slow-admission", "slow-too")
GOOD = "good"
SERVING = 10
"""Pipelines with mute servers."""
REPLICAS = 10
"""Servers of each of these pipelines."""
MAX_TOKENS = 2000
"""The operator then waits 320 s for the answer of a server."""
INTERRUPTED = 20
LARGE = 20
HELD = 20
TEXT = "x" * 4000
LARGE_ENV = [{"name": f"TEXT_{number}", "value": TEXT} for number in range(15)]
"""As much as a stage may have: 64 kB."""
WORKERS = 6
"""Few, so that the held requests would occupy all of them."""
LONGER_SECONDS = 30.0
"""By which the pipeline may take longer than alone: it shares the API server, and two processors with all programs."""
WEBHOOK = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"


@dataclass
class Result:
    """The end of the good pipeline, and how long it took."""

    outcome: Outcome
    seconds: float


async def greedy(pod: StagePod) -> Ending:
    """Interrupt each process of a pipeline for interruptions; the processes of other pipelines succeed."""
    if pod.is_server:
        return await run_until_deleted(pod)
    if pod.job_stem.startswith("interrupted"):
        await asyncio.sleep(0.5)
        return interrupted()
    return await succeed(pod)


def greedy_manifests() -> list[Object]:
    deploy: Object = {
        "deploy": {
            "replicas": REPLICAS,
            "smokeTest": {"prompt": MUTE, "maxTokens": MAX_TOKENS},
        }
    }
    large: Object = {stage: {"pod": {"env": LARGE_ENV}} for stage in STAGES}
    annotation = {"note": "x" * 250_000}
    return [
        *(manifest(f"serving-{number}", **deploy) for number in range(SERVING)),
        *(
            manifest(f"interrupted-{number}", stages=("prepare",))
            for number in range(INTERRUPTED)
        ),
        *(
            {
                **pipeline,
                "metadata": {**pipeline["metadata"], "annotations": annotation},
            }
            for pipeline in (
                manifest(f"large-{number}", **large) for number in range(LARGE)
            )
        ),
    ]


async def create_all(
    simulated: Simulation, namespace: str, manifests: list[Object]
) -> None:
    path = f"{PIPELINES}/namespaces/{namespace}/finetunepipelines"
    await asyncio.gather(
        *(simulated.api.create(path, pipeline) for pipeline in manifests)
    )


def webhook(address: str, port: int) -> Object:
    """Return a webhook for new Jobs of the slow namespaces, at a port that accepts connections and never answers."""
    selected = {
        "key": "kubernetes.io/metadata.name",
        "operator": "In",
        "values": list(SLOW),
    }
    rule = {
        "apiGroups": ["batch"],
        "apiVersions": ["v1"],
        "resources": ["jobs"],
        "operations": ["CREATE"],
    }
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": SLOW[0]},
        "webhooks": [
            {
                "name": "slow.finetune.example",
                "clientConfig": {"url": f"https://{address}:{port}/"},
                "rules": [rule],
                "namespaceSelector": {"matchExpressions": [selected]},
                "sideEffects": "None",
                "admissionReviewVersions": ["v1"],
                "timeoutSeconds": 10,
            }
        ],
    }


@asynccontextmanager
async def mute_webhook(simulated: Simulation) -> AsyncIterator[None]:
    address = own_address(simulated.endpoint)

    async def accept(
        reader: asyncio.StreamReader, _writer: asyncio.StreamWriter
    ) -> None:
        await reader.read()

    server = await asyncio.start_server(accept, address, 0)
    await simulated.api.create(
        WEBHOOK, webhook(address, server.sockets[0].getsockname()[1])
    )
    try:
        yield
    finally:
        await simulated.api.delete(f"{WEBHOOK}/{SLOW[0]}")
        server.close()


async def live(life: Life) -> Result:
    began = time.monotonic()
    await life.create()
    status = await life.wait_finished()
    seconds = time.monotonic() - began
    return Result(await life.end(status), seconds)


async def live_alone(simulated: Simulation) -> Result:
    await simulated.create_namespace("alone")
    async with a_life(simulated, "alone", "demo") as life:
        return await live(life)


async def live_beside_others(simulated: Simulation) -> Result:
    for namespace in (GREEDY, *SLOW, GOOD):
        await simulated.create_namespace(namespace)
    simulated.kubelet.behaviours[GREEDY] = greedy

    async def servers_run() -> bool:
        pods = await simulated.api.list(
            f"/api/v1/namespaces/{GREEDY}/pods", labelSelector="finetune.dev/server"
        )
        return (
            sum(pod["status"].get("phase") == "Running" for pod in pods)
            >= SERVING * REPLICAS
        )

    async with (
        mute_webhook(simulated),
        running_proxy(simulated.endpoint, simulated.session) as proxy,
    ):
        others = (f"--namespace={namespace}" for namespace in (GREEDY, *SLOW))
        operator = replica(
            simulated, proxy, GOOD, GOOD, arguments=(*others, f"--workers={WORKERS}")
        )
        operator.start()
        try:
            await create_all(simulated, GREEDY, greedy_manifests())
            await until(servers_run, 180, "not all mute servers run")
            for namespace in SLOW:
                await create_all(
                    simulated,
                    namespace,
                    [manifest(f"held-{number}") for number in range(HELD)],
                )
            return await live(Life(simulated, GOOD, "demo", proxy, operator))
        finally:
            operator.kill()
            for namespace in (GREEDY, *SLOW, GOOD):
                await simulated.delete_namespace(namespace)


@pytest.fixture(scope="module")
def results(
    kubeconfig: Path, forks: OperatorForks, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Result, Result]:
    """The good pipeline alone and beside the others."""

    async def run() -> tuple[Result, Result]:
        async with simulation(
            kubeconfig, forks, tmp_path_factory.mktemp("neighbours")
        ) as simulated:
            return await live_alone(simulated), await live_beside_others(simulated)

    alone, beside = asyncio.run(run())
    print(f"alone: {alone.seconds:.1f} s; beside the others: {beside.seconds:.1f} s")
    return alone, beside


def test_pipeline_beside_greedy_ones_ends_as_alone(results):
    alone, beside = results
    assert beside.outcome.status == alone.outcome.status
    assert beside.outcome.successes.keys() == alone.outcome.successes.keys()
    assert set(beside.outcome.successes.values()) == {1}
    assert not beside.outcome.problems
    assert not beside.outcome.leaked


def test_pipeline_beside_greedy_ones_is_not_starved(results):
    alone, beside = results
    assert beside.seconds <= alone.seconds + LONGER_SECONDS
