"""Churn: pipelines are started, edited, suspended, cancelled, deleted and re-created while the API server is faulty."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from support.faults import faults
from support.faults.api import PIPELINES
from support.faults.churn_model import Wanted, possible_phases
from support.faults.faults import Cut, Delay, WatchEnd
from support.faults.kubelet import run_until_deleted
from support.faults.life import replica
from support.faults.manifest import MODELS
from support.faults.operators import OperatorForks, OperatorProcess
from support.faults.pods import Ending, StagePod, failed, interrupted, succeeded
from support.faults.proxy import Proxy, running_proxy
from support.faults.simulation import NotReached, Simulation, simulation, until

Object = dict[str, Any]
NAMESPACE = "churn"
ERRORS = (
    faults.CONFLICT,
    faults.INVALID,
    faults.BUSY,
    faults.BROKEN,
    Cut("before"),
    Cut("after"),
    Delay(2.0),
)
ERROR_RATE = 0.03
SECONDS_PER_ACTION = 20.0
"""Mean time between two actions on one pipeline."""
SECONDS_PER_WATCH_FAULT = 20.0
REPORT_SECONDS = 15.0
CALM_SECONDS = 120.0
"""Time without any change after which a pipeline is not waited for: a retry waits for 60 s at most."""
ACTIONS = (
    "edit-train",
    "edit-evaluate",
    "note",
    "suspend",
    "resume",
    "cancel",
    "retry",
    "delete",
)


@dataclass(frozen=True)
class Sample:
    """The operator's state at one moment."""

    seconds: float
    actions: int
    requests: int
    resident_bytes: int

    def __str__(self) -> str:
        mebibytes = self.resident_bytes / (1 << 20)
        return f"{self.seconds:6.0f} s  {self.actions:5} actions  {self.requests:6} requests  {mebibytes:6.1f} MiB"


@dataclass
class Report:
    """The end of a churn."""

    actions: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Pipelines that are not in a predicted phase."""
    leaked: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Two pods on one claim, or a repetition of work that was done."""
    settled_seconds: float = 0.0
    processes: int = 0


class Cluster:
    """What the pods of the churn do."""

    def __init__(self, simulated: Simulation, seed: int) -> None:
        self.simulated = simulated
        self.chance = random.Random(seed)
        self.calm = False
        self._failed: set[tuple[str, str]] = set()

    async def behave(self, pod: StagePod) -> Ending:
        """Run for a while, then succeed, or be evicted, or stop, or fail; an identity fails at most once."""
        if pod.is_server:
            return await run_until_deleted(pod)
        await asyncio.sleep(self.chance.uniform(0.2, 4.0))
        fate = 1.0 if self.calm else self.chance.random()
        if fate < 0.1:
            await self.simulated.kubelet.evict(pod)
            return await run_until_deleted(pod)
        if fate < 0.15:
            return interrupted()
        if fate < 0.2 and (pod.job_stem, pod.identity) not in self._failed:
            self._failed.add((pod.job_stem, pod.identity))
            return failed(70)
        return succeeded(pod)

    def grace(self, _pod: StagePod) -> float:
        """Return how long a deleted pod still runs."""
        return self.chance.uniform(0.1, 3.0)


class Churn:
    """A user who changes pipelines at random, and a network that fails at random."""

    def __init__(
        self,
        simulated: Simulation,
        proxy: Proxy,
        operator: OperatorProcess,
        count: int,
        seed: int,
    ) -> None:
        self.simulated = simulated
        self.proxy = proxy
        self.operator = operator
        self.chance = random.Random(seed)
        names = [f"p{number}" for number in range(count)]
        self.wanted = {
            name: Wanted(name, serves=number % 5 == 0, retained=number % 2 == 0)
            for number, name in enumerate(names)
        }
        self.report = Report()
        self.cluster = Cluster(simulated, seed)
        self.began = time.monotonic()
        simulated.kubelet.behaviours[NAMESPACE] = self.cluster.behave
        simulated.kubelet.grace = self.cluster.grace

    # The user.

    def path(self, name: str = "") -> str:
        """Return the path of a pipeline, or of all."""
        pipelines = f"{PIPELINES}/namespaces/{NAMESPACE}/finetunepipelines"
        return f"{pipelines}/{name}" if name else pipelines

    async def act(self) -> None:
        """Do something to one pipeline."""
        wanted = self.wanted[self.chance.choice(list(self.wanted))]
        action = self.chance.choice(ACTIONS) if wanted.uid else "create"
        if await self._do(action, wanted):
            self.report.actions[action] += 1

    async def _do(self, action: str, wanted: Wanted) -> bool:
        match action:
            case "create":
                created = await self.simulated.api.create(
                    self.path(), wanted.manifest()
                )
                if created:
                    self.wanted[wanted.name] = wanted.created(
                        created["metadata"]["uid"]
                    )
                return created is not None
            case "delete":
                await self.simulated.api.delete(self.path(wanted.name))
                self.wanted[wanted.name] = wanted.deleted()
                return True
            case "cancel" | "retry":
                return await self._annotate(action, wanted)
        changed = {
            "edit-train": replace(wanted, train=wanted.train + 1),
            "edit-evaluate": replace(wanted, evaluate=wanted.evaluate + 1),
            "note": replace(wanted, notes=wanted.notes + 1),
            "suspend": replace(wanted, suspended=True),
            "resume": replace(wanted, suspended=False),
        }[action]
        self.wanted[wanted.name] = changed
        await self.simulated.api.patch(self.path(wanted.name), {"spec": changed.spec()})
        return True

    async def _annotate(self, verb: str, wanted: Wanted) -> bool:
        """Cancel or retry, unless the operator must still handle the previous annotation: they have no order."""
        stored = await self.simulated.api.get(self.path(wanted.name)) or {}
        observed = stored.get("status", {}).get("observedAnnotations", {})
        annotations = stored.get("metadata", {}).get("annotations", {})
        if any(
            annotations.get(f"finetune.dev/{annotation}") != observed.get(annotation)
            for annotation in ("cancel", "retry")
        ):
            return False
        changed = replace(wanted, token=wanted.token + 1, cancelled=verb == "cancel")
        self.wanted[wanted.name] = changed
        body = {
            "metadata": {"annotations": {f"finetune.dev/{verb}": str(changed.token)}}
        }
        await self.simulated.api.patch(self.path(wanted.name), body)
        return True

    # The network.

    async def disturb_watches(self) -> None:
        """End all watches now and then."""
        while True:
            await asyncio.sleep(self.chance.expovariate(1 / SECONDS_PER_WATCH_FAULT))
            self.proxy.end_watches(self.chance.choice(list(WatchEnd)))

    async def sample(self) -> None:
        """Record and print the operator's memory now and then."""
        while True:
            sample = Sample(
                time.monotonic() - self.began,
                self.report.actions.total(),
                len(self.proxy.requests),
                self.operator.resident_bytes(),
            )
            self.report.samples.append(sample)
            print(sample, flush=True)
            await asyncio.sleep(REPORT_SECONDS)

    # From the start to the report.

    async def run(self, seconds: float) -> Report:
        """Act for this time, then wait until all is calm, and compare with the model."""
        sampling = asyncio.create_task(self.sample())
        async with self.faulty_network():
            while time.monotonic() - self.began < seconds:
                await self.act()
                await asyncio.sleep(
                    self.chance.expovariate(len(self.wanted) / SECONDS_PER_ACTION)
                )
        await self.settle()
        if not self.operator.is_running():
            self.report.wrong.append("the operator ended by itself")
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
        self.report.problems = self.simulated.kubelet.ledger.problems(NAMESPACE)
        self.report.processes = self.simulated.kubelet.ledger.runs.total()
        return self.report

    @asynccontextmanager
    async def faulty_network(self) -> AsyncIterator[None]:
        """Inject faults until the end of the context."""
        self.proxy.rule = faults.random_faults(self.chance, ERROR_RATE, *ERRORS)
        disturbing = asyncio.create_task(self.disturb_watches())
        try:
            yield
        finally:
            disturbing.cancel()
            self.proxy.rule = faults.no_fault
            self.proxy.drop_silent_watches()
            self.cluster.calm = True

    async def settle(self) -> None:
        """Resume what serves, and wait until every pipeline is as predicted; report differences."""
        ended = time.monotonic()
        for wanted in [
            pipeline
            for pipeline in self.wanted.values()
            if pipeline.serves and pipeline.uid
        ]:
            await self._do("resume", wanted)
            with suppress(NotReached):  # it is then reported as what it is
                await until(partial(self._do, "retry", self.wanted[wanted.name]), 30)
        changed = time.monotonic()
        before = ""
        while time.monotonic() < changed + CALM_SECONDS:
            self.report.wrong = await self.wrong_pipelines()
            self.report.leaked = await self.leaked_objects()
            self.report.settled_seconds = time.monotonic() - ended
            if not self.report.wrong and not self.report.leaked:
                break
            # On a busy machine all that takes minutes, and pipelines that still change are not stuck.
            versions = await self._versions()
            if versions != before:
                changed = time.monotonic()
                before = versions
            await asyncio.sleep(2)

    async def _versions(self) -> str:
        """Return the versions of all pipelines: a text that changes with each write."""
        listed = await self.simulated.api.list(self.path())
        return " ".join(
            sorted(stored["metadata"]["resourceVersion"] for stored in listed)
        )

    async def wrong_pipelines(self) -> list[str]:
        """Return the pipelines that are not in a phase that the model predicts."""
        listed = await self.simulated.api.list(self.path())
        by_name = {stored["metadata"]["name"]: stored for stored in listed}
        differences = [
            self._difference(wanted, by_name.get(wanted.name))
            for wanted in self.wanted.values()
        ]
        return [text for text in differences if text]

    def _difference(self, wanted: Wanted, stored: Object | None) -> str:
        ledger = self.simulated.kubelet.ledger
        expected = possible_phases(
            wanted, ledger.succeeded_in(NAMESPACE), ledger.readable_in(NAMESPACE)
        )
        status = (stored or {}).get("status", {})
        is_current = (
            stored is None
            or status.get("observedGeneration") == stored["metadata"]["generation"]
        )
        phase = status.get("phase", "no status") if stored else "Absent"
        if phase in expected and is_current:
            return ""
        return f"{wanted.name}: {phase} (current: {is_current}) instead of {' or '.join(expected)}; {wanted}"

    async def leaked_objects(self) -> list[str]:
        """Return objects without a pipeline, and processes of pipelines that are not to run."""
        uids = {wanted.uid for wanted in self.wanted.values()}
        retained = {
            f"{wanted.name}-workspace"
            for wanted in self.wanted.values()
            if wanted.retained
        }
        groups = {
            "job": "/apis/batch/v1/namespaces/churn/jobs",
            "deployment": "/apis/apps/v1/namespaces/churn/deployments",
            "service": "/api/v1/namespaces/churn/services",
            "claim": "/api/v1/namespaces/churn/persistentvolumeclaims",
        }
        leaked = []
        for kind, path in groups.items():
            for item in await self.simulated.api.list(path):
                owners = {
                    owner["uid"]
                    for owner in item["metadata"].get("ownerReferences", [])
                }
                kept = kind == "claim" and item["metadata"]["name"] in {
                    MODELS,
                    *retained,
                }
                if not kept and not owners & uids:
                    leaked.append(f"{kind}/{item['metadata']['name']}")
        pods = await self.simulated.api.list("/api/v1/namespaces/churn/pods")
        running = [
            StagePod(pod)
            for pod in pods
            if pod["status"].get("phase") not in {"Succeeded", "Failed"}
        ]
        return [*leaked, *(f"pod/{pod.name}" for pod in running if not pod.is_server)]


async def churn(
    kubeconfig: Path,
    forks: OperatorForks,
    folder: Path,
    *,
    pipelines: int,
    seconds: float,
    seed: int,
) -> Report:
    """Run a churn on a cluster that has the CRD, with one operator in a namespace of its own."""
    async with (
        simulation(kubeconfig, forks, folder) as simulated,
        running_proxy(simulated.endpoint, simulated.session) as proxy,
    ):
        await simulated.create_namespace(NAMESPACE)
        operator = replica(simulated, proxy, NAMESPACE, NAMESPACE)
        operator.start()
        try:
            return await Churn(simulated, proxy, operator, pipelines, seed).run(seconds)
        finally:
            operator.kill()
            await simulated.delete_namespace(NAMESPACE)
