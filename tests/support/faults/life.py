"""The life of a pipeline: an eviction in train, an edit of evaluate while it runs, a deployment, and the deletion."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from support.faults.api import PIPELINES
from support.faults.final_status import comparable
from support.faults.kubelet import run_until_deleted, succeed
from support.faults.manifest import manifest
from support.faults.operators import KUBECONFIG, OperatorProcess
from support.faults.pods import Ending, StagePod
from support.faults.proxy import Proxy, running_proxy
from support.faults.simulation import Simulation, until

Object = dict[str, Any]
FINISHED_WITHIN = 240.0
GONE_WITHIN = 120.0
"""Seconds. A life takes about ten, but many run at the same time, and the machine may be busy with other work."""
EDIT = {"spec": {"evaluate": {"tasks": [{"name": "exam", "limit": 7}]}}}


@dataclass(frozen=True)
class Outcome:
    """The end of a life, as far as it must not depend on faults."""

    status: Any
    """The final status before the deletion, without times."""
    successes: Counter[str]
    """How often each stage and identity succeeded."""
    problems: tuple[str, ...]
    """Two pods on one claim, or a repetition of work that was done."""
    leaked: tuple[str, ...]
    """Objects that exist after the deletion."""


@dataclass
class Life:
    """One pipeline in a namespace of its own, with an operator of its own behind a proxy of its own."""

    simulation: Simulation
    namespace: str
    name: str
    proxy: Proxy
    operator: OperatorProcess
    finished_within: float = FINISHED_WITHIN
    uid: str = ""
    evicted: bool = False
    edited_identity: str = ""
    """The identity of evaluate before the edit."""
    hooks: dict[str, Any] = field(default_factory=dict)
    """Stage -> a coroutine function that the first successful process of the stage awaits before it succeeds."""
    hooks_at_start: list[Callable[[], None]] = field(default_factory=list)
    """Called when the operator is started."""
    evaluated_at: float = 0.0
    """When the first process of evaluate started, by the monotonic clock; 0: none has."""
    _hooked: set[str] = field(default_factory=set)

    @property
    def path(self) -> str:
        """The path of the pipeline."""
        return f"{PIPELINES}/namespaces/{self.namespace}/finetunepipelines/{self.name}"

    async def behave(self, pod: StagePod) -> Ending:
        """Run one pod: the first of train is evicted, and the first of evaluate is superseded by an edit."""
        if pod.stage == "evaluate" and not self.evaluated_at:
            self.evaluated_at = time.monotonic()
        if pod.stage == "train" and not self.evicted:
            self.evicted = True
            await self.simulation.kubelet.evict(pod)
            return await run_until_deleted(pod)
        if pod.stage == "evaluate" and self.edited_identity in {"", pod.identity}:
            self.edited_identity = pod.identity
            await self.simulation.api.patch(self.path, EDIT)
            return await run_until_deleted(pod)
        if pod.stage in self.hooks and pod.stage not in self._hooked:
            self._hooked.add(pod.stage)
            await self.hooks[pod.stage](pod)
        return await succeed(pod)

    async def create(self) -> None:
        """Create the pipeline and start the operator, unless it runs."""
        self.simulation.kubelet.behaviours[self.namespace] = self.behave
        collection = self.path.rpartition("/")[0]
        created = await self.simulation.api.send(
            "POST", collection, manifest(self.name)
        )
        self.uid = created["metadata"]["uid"]
        if not self.operator.is_running():
            self.operator.start()
        for hook in self.hooks_at_start:
            hook()

    async def status(self) -> Object:
        """Return the pipeline's status; empty before the operator has written it."""
        pipeline = await self.simulation.api.get(self.path)
        return (pipeline or {}).get("status", {})

    async def has_finished(self) -> bool:
        """Return whether the status says that the current spec has finished."""
        assert self.operator.pid is None or self.operator.is_running(), (
            "the operator ended by itself"
        )
        pipeline = self.simulation.pipelines.objects.get(self.path, {"metadata": {}})
        status = pipeline.get("status", {})
        true = {
            condition["type"]
            for condition in status.get("conditions", [])
            if condition["status"] == "True"
        }
        return (
            status.get("observedGeneration") == pipeline["metadata"].get("generation")
            and "Finished" in true
        )

    async def has_settled(self) -> bool:
        """Return whether it has finished and no refused request is left, which the operator repeats with backoff."""
        status = self.simulation.pipelines.objects.get(self.path, {}).get("status", {})
        return await self.has_finished() and not status.get("refusals")

    async def wait_finished(self) -> Any:
        """Wait until the pipeline has finished and settled; return its status without times."""
        await until(self.has_settled, self.finished_within, self.describe)
        return comparable(await self.status(), self.name, self.namespace, self.uid)

    async def delete(self) -> tuple[str, ...]:
        """Delete the pipeline; return what exists after GONE_WITHIN seconds."""
        await self.simulation.api.delete(self.path)

        async def is_empty() -> bool:
            return not await self.simulation.children(self.namespace)

        try:
            await until(is_empty, GONE_WITHIN)
        except AssertionError:
            return tuple(await self.simulation.children(self.namespace))
        return ()

    async def run(self) -> Outcome:
        """Live the whole life."""
        await self.create()
        status = await self.wait_finished()
        return await self.end(status)

    async def end(self, status: Any) -> Outcome:
        """Delete the pipeline and return the outcome with this status."""
        leaked = await self.delete()
        await asyncio.sleep(
            1
        )  # what the operator may still do about a pipeline that is gone
        leaked = leaked or tuple(await self.simulation.children(self.namespace))
        successes = self.simulation.kubelet.ledger.stages_of(
            self.namespace, f"{self.name}-{self.uid[:8]}-"
        )
        return Outcome(
            status,
            successes,
            tuple(self.simulation.kubelet.ledger.problems(self.namespace)),
            leaked,
        )

    def describe(self) -> str:
        """Return the end of the operator's log and its newest requests, for failure messages."""
        log = (
            self.operator.log.read_text()[-3000:] if self.operator.log.exists() else ""
        )
        newest = "\n".join(map(str, self.proxy.requests[-15:]))
        return f"{self.namespace}/{self.name} has not finished; newest requests:\n{newest}\nlog:\n{log}"


def replica(
    simulation: Simulation, proxy: Proxy, namespace: str, name: str, **options: Any
) -> OperatorProcess:
    """Return a replica that is not started yet; `options` are OperatorProcess's."""
    folder = simulation.folder / name
    folder.mkdir()
    proxy.write_kubeconfig(folder / KUBECONFIG)
    return OperatorProcess(
        options.pop("forks", simulation.forks), folder, namespace, **options
    )


@asynccontextmanager
async def a_life(
    simulation: Simulation, namespace: str, name: str, **options: Any
) -> AsyncIterator[Life]:
    """Prepare a life in an existing namespace; kill its operator at the end. `options` are OperatorProcess's."""
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(
            running_proxy(simulation.endpoint, simulation.session)
        )
        operator = replica(
            simulation, proxy, namespace, f"{namespace}-{name}", **options
        )
        stack.callback(operator.kill)
        yield Life(simulation, namespace, name, proxy, operator)
