"""Everything around an operator under test: the API server's client, the kubelet, a model server, and proxies."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web
from support.faults.api import PIPELINES, Api, Endpoint
from support.faults.kubelet import Kubelet, running_kubelet
from support.faults.manifest import MODELS, claim
from support.faults.operators import OperatorForks

from testcluster.provider import ControlPlaneOptions

PLANE = ControlPlaneOptions(provisions_volumes=False)
"""For a cluster of a simulation alone: the simulated kubelet provisions the volumes."""
MODEL_PORT = 8000
MUTE = "never answered"
"""A prompt that the model server does not answer."""
MUTE_SECONDS = 3600.0
Object = dict[str, Any]


class NotReached(AssertionError):
    """A state was not reached in time."""


@dataclass(frozen=True)
class Simulation:
    """A cluster whose pods the test controls."""

    endpoint: Endpoint
    session: aiohttp.ClientSession
    api: Api
    kubelet: Kubelet
    forks: OperatorForks
    pipelines: "Pipelines"
    folder: Path
    """For logs and kubeconfigs."""

    async def create_namespace(self, name: str) -> None:
        """Create a namespace with the claim `models`, and wait for its service account."""
        meta = {"name": name}
        await self.api.create(
            "/api/v1/namespaces",
            {"apiVersion": "v1", "kind": "Namespace", "metadata": meta},
        )
        path = f"/api/v1/namespaces/{name}"

        async def has_account() -> bool:
            return await self.api.get(f"{path}/serviceaccounts/default") is not None

        await until(has_account, 30, f"namespace {name} has no service account")
        await self.api.create(f"{path}/persistentvolumeclaims", claim(MODELS))

    async def delete_namespace(self, name: str) -> None:
        """Delete a namespace and do not wait for it."""
        await self.api.delete(f"/api/v1/namespaces/{name}")

    async def children(self, namespace: str) -> list[str]:
        """Return the objects of a namespace that an operator may leave behind, as kind/name, without claim `models`.

        Kinds that disappear last come first, and the first that still exists is returned alone: a test that waits for
        the end of a pipeline must not load the API server with lists.
        """
        kinds = {
            f"/api/v1/namespaces/{namespace}/persistentvolumeclaims": "claim",
            f"/api/v1/namespaces/{namespace}/pods": "pod",
            f"/apis/batch/v1/namespaces/{namespace}/jobs": "job",
            f"/apis/apps/v1/namespaces/{namespace}/deployments": "deployment",
            f"/apis/apps/v1/namespaces/{namespace}/replicasets": "replicaset",
            f"/api/v1/namespaces/{namespace}/services": "service",
            f"{PIPELINES}/namespaces/{namespace}/finetunepipelines": "pipeline",
        }
        for path, kind in kinds.items():
            names = [
                f"{kind}/{child['metadata']['name']}"
                for child in await self.api.list(path)
            ]
            left = [name for name in names if name != f"claim/{MODELS}"]
            if left:
                return left
        return []


class Pipelines:
    """The newest version of every pipeline, from one watch: polling each pipeline would load the API server."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        """By path."""

    async def follow(self, api: Api) -> None:
        """Keep the objects up to date until cancelled."""
        async for kind, changed in api.follow(f"{PIPELINES}/finetunepipelines"):
            paths = {pipeline_path(pipeline): pipeline for pipeline in changed}
            if kind == "LISTED":
                self.objects = paths
            elif kind == "DELETED":
                self.objects.pop(next(iter(paths)), None)
            else:
                self.objects |= paths


def pipeline_path(pipeline: Object) -> str:
    """Return the path of a pipeline."""
    meta = pipeline["metadata"]
    return (
        f"{PIPELINES}/namespaces/{meta['namespace']}/finetunepipelines/{meta['name']}"
    )


async def until(
    condition: Callable[[], Awaitable[Any]],
    seconds: float,
    otherwise: str | Callable[[], str] = "the condition is not met",
) -> Any:
    """Poll until the condition returns a true value, and return it. Raises NotReached."""
    deadline = time.monotonic() + seconds
    pause = 0.1
    while True:
        value = await condition()
        if value:
            return value
        if time.monotonic() > deadline:
            reason = otherwise if isinstance(otherwise, str) else otherwise()
            raise NotReached(f"after {seconds:g} s: {reason}")
        await asyncio.sleep(pause)
        pause = min(pause * 1.2, 1.0)


def own_address(endpoint: Endpoint) -> str:
    """Return the address of this machine that the API server sees: it is no loopback address, so pods may have it."""
    url = urlsplit(endpoint.url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((url.hostname, url.port))
        return str(probe.getsockname()[0])


async def _complete(request: web.Request) -> web.Response:
    if (await request.json()).get("prompt") == MUTE:
        await asyncio.sleep(MUTE_SECONDS)
    return web.Response(
        text=json.dumps({"choices": [{"text": "hello"}]}),
        content_type="application/json",
    )


@asynccontextmanager
async def _model_server(address: str) -> AsyncIterator[None]:
    application = web.Application()
    application.router.add_post("/v1/completions", _complete)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, address, MODEL_PORT, reuse_port=True).start()
    try:
        yield
    finally:
        await runner.cleanup()


@asynccontextmanager
async def simulation(
    kubeconfig: Path, forks: OperatorForks, folder: Path
) -> AsyncIterator[Simulation]:
    """Run a simulated kubelet and the model server of its pods on the cluster."""
    endpoint = Endpoint.read(kubeconfig)
    async with endpoint.session() as session:
        api = Api(endpoint, session)
        address = own_address(endpoint)
        pipelines = Pipelines()
        following = asyncio.create_task(pipelines.follow(api))
        try:
            async with _model_server(address), running_kubelet(api, address) as kubelet:
                yield Simulation(
                    endpoint, session, api, kubelet, forks, pipelines, folder
                )
        finally:
            following.cancel()
