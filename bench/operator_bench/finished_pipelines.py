"""Thousands of finished pipelines as real objects, without running them.

One pipeline is run by the operator. Its custom resource, Jobs and pods are the template of all others: names and uids
are replaced, and each status is written by the status subresource. While the objects are created, the processes of
kube-controller-manager and kwok are stopped by SIGSTOP. Else the Job controller would create a pod for each new Job,
and kwok would run it. Afterwards they find Jobs and pods that are finished, and change nothing.

The objects differ from those of a real run in their managedFields, which name fewer writers. The real controller binds
the claims before it is stopped.
"""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from operator_bench.api import JOBS, PIPELINE, PIPELINES, PODS, STAGE, Api, Object, open_api
from operator_bench.cluster import BenchCluster
from operator_bench.pipelines import pipeline_name
from operator_bench.user import create_claims, gather
from processes import cluster_programs, report_progress

STOPPED = frozenset({"kwok", "kube-controller-manager"})
ASSIGNED_METADATA = frozenset(
    {"uid", "resourceVersion", "creationTimestamp", "generation", "managedFields"}
)
ASSIGNED_LABELS = frozenset(
    {
        "controller-uid",
        "job-name",
        "batch.kubernetes.io/controller-uid",
        "batch.kubernetes.io/job-name",
    }
)
"""Labels that the API server adds to a Job's template, with the Job's uid."""


@dataclass(frozen=True)
class Template:
    """A finished pipeline, its Jobs, and the pod of each Job by the Job's name."""

    pipeline: Object
    jobs: list[Object]
    pods: dict[str, Object]

    def termination_message(self, stage: str) -> tuple[str, str]:
        """Return the termination message of a stage's pod, and the identity in it."""
        pod = next(pod for pod in self.pods.values() if pod["metadata"]["labels"][STAGE] == stage)
        terminated = pod["status"]["containerStatuses"][0]["state"]["terminated"]
        return terminated["message"], pod["metadata"]["labels"]["finetune.dev/identity"]


async def read_template(api: Api, name: str) -> Template:
    """Read a finished pipeline and its objects."""
    query = {"labelSelector": f"{PIPELINE}={name}"}
    jobs, _ = await api.list(JOBS, **query)
    pods, _ = await api.list(PODS, **query)
    by_job = {pod["metadata"]["labels"]["job-name"]: pod for pod in pods}
    return Template(await api.send("GET", f"{PIPELINES}/{name}"), jobs, by_job)


def _new(found: Object) -> Object:
    """Return the body that creates the object again: without status and without what the API server assigns."""
    metadata = {
        key: value for key, value in found["metadata"].items() if key not in ASSIGNED_METADATA
    }
    return {**{key: value for key, value in found.items() if key != "status"}, "metadata": metadata}


def _new_job(found: Object) -> Object:
    body: Object = json.loads(json.dumps(_new(found)))
    del body["spec"]["selector"]
    for metadata in (body["metadata"], body["spec"]["template"]["metadata"]):
        metadata["labels"] = {
            key: value for key, value in metadata["labels"].items() if key not in ASSIGNED_LABELS
        }
    return body


class Copier:
    """Creates copies of a template under other names."""

    def __init__(self, api: Api, template: Template) -> None:
        self.api, self.template = api, template
        self.name, self.uid = (
            template.pipeline["metadata"]["name"],
            template.pipeline["metadata"]["uid"],
        )

    async def copy(self, name: str) -> None:
        """Create a pipeline with all of its objects, each with the status of the template's."""
        created = await self._create(
            PIPELINES, _new(self.template.pipeline), self.template.pipeline, {self.name: name}
        )
        uid = created["metadata"]["uid"]
        # Names of Jobs contain the first part of the pipeline's uid.
        changes = {self.name: name, self.uid: uid, self.uid.split("-")[0]: uid.split("-")[0]}
        for job in self.template.jobs:
            new_job = await self._create(JOBS, _new_job(job), job, changes)
            pod = self.template.pods[job["metadata"]["name"]]
            of_job = changes | {job["metadata"]["uid"]: new_job["metadata"]["uid"]}
            await self._create(PODS, _new(pod), pod, of_job)
        await self._write_status(PIPELINES, name, self.template.pipeline, changes)

    async def _create(
        self, path: str, body: Object, source: Object, changes: dict[str, str]
    ) -> Object:
        created = await self.api.send("POST", path, _replaced(body, changes))
        if path != PIPELINES:  # a pipeline's status names its Jobs, which do not exist yet
            await self._write_status(path, created["metadata"]["name"], source, changes)
        return created

    async def _write_status(
        self, path: str, name: str, source: Object, changes: dict[str, str]
    ) -> None:
        status = _replaced({"status": source["status"]}, changes)
        await self.api.send("PATCH", f"{path}/{name}/status", status, "merge-patch+json")


def _replaced(body: Object, changes: dict[str, str]) -> bytes:
    text = json.dumps(body)
    for old, new in changes.items():
        text = text.replace(old, new)
    return text.encode()


@contextmanager
def stopped_controllers(folder: Path) -> Iterator[None]:
    """Stop the processes of kube-controller-manager and kwok, and continue them at the end."""
    pids = [pid for pid, name in cluster_programs(folder).items() if name in STOPPED]
    assert len(pids) == len(STOPPED), (
        f"expected one process each of {sorted(STOPPED)}, found {len(pids)} processes"
    )
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def create_finished(bench: BenchCluster, template: Template, first: int, count: int) -> None:
    """Create this many finished pipelines, from this number on."""
    names = [pipeline_name(number) for number in range(first, first + count)]

    async def claims() -> None:
        async with open_api(bench.kubeconfig("user"), "bench-user") as api:
            await create_claims(api, names)

    async def copies() -> None:
        async with open_api(bench.kubeconfig("user"), "bench-user") as api:
            copier = Copier(api, template)
            await gather(copier.copy(name) for name in names)

    asyncio.run(claims())
    report_progress("the claims of the finished pipelines are bound")
    with stopped_controllers(bench.provider.folder):
        asyncio.run(copies())
