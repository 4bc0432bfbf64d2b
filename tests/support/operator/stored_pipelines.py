"""The corpus of stored pipelines on a real API server, with their Jobs, pods, claims and servers.

No controller runs there, so every object stays as it is written.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import cycle
from typing import Any

from support.faults.api import PIPELINES, Api
from support.operator.scenario import Scenario
from support.operator.stored_objects import corpus

from finetune_operator.api.spec import PipelineSpec
from finetune_operator.core.job_template import JobTemplate
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.kubernetes.resources.claim import build_claim
from finetune_operator.kubernetes.resources.job import build_job
from finetune_operator.kubernetes.resources.server import (
    build_deployment,
    build_service,
)
from testcluster.provider import ControlPlaneOptions

Object = dict[str, Any]
BARE = ControlPlaneOptions(
    audit_policy={"rules": [{"level": "Metadata", "omitStages": ["RequestReceived"]}]},
    flags={
        # Every line is there before the request is answered, so that the log can be read at once.
        "kube-apiserver": {"audit-log-mode": "blocking"},
        # No controller acts on Jobs, Deployments and claims.
        "kube-controller-manager": {
            "controllers": "namespace-controller,serviceaccount-controller"
        },
    },
    provisions_volumes=False,
)
"""An API server with an audit log, beside which nothing but an operator writes."""
# Its Job is stopped again after an upgrade, which is an action.
IN_FLIGHT = frozenset({"stopping"})
"""Pipelines of the corpus that no operator leaves alone."""
JOB_PREFIX = "demo-0f1e2d3c"
TIME = re.compile(r"2030-01-01[T ](\d\d:\d\d:\d\d)(Z|\+00:00)")
ROUNDS_WITH_JOBS = 2
"""Times that the corpus is stored with all Jobs; after that only with Jobs that have not ended."""
NODE = "node-1"
AT_ONCE = 16
"""Pipelines that are written at the same time."""
NO_DEFAULT = {"train": ("optimizer", "objective", "nodes"), "prepare": ("packing",)}
"""Fields that half of the pipelines do not store, because the version that stored them had no such field yet."""
LONG_AGO = "2020-01-01T00:00:00Z"
"""Start of a Job whose process has never started."""
ENDS = {
    "COMPLETE": ("SuccessCriteriaMet", "Complete", "succeeded"),
    "FAILED": ("FailureTarget", "Failed", "failed"),
}
"""State of a Job -> its two conditions and the count of its pods."""


@dataclass(frozen=True)
class StoredPipeline:
    """A pipeline as an earlier version has stored it."""

    name: str
    entry: Object
    """Its entry in the corpus, with the times of this moment."""
    keeps_jobs: bool = True
    """Whether the claim and the Jobs of what has ended are still there."""

    @property
    def is_finished(self) -> bool:
        """Whether all of its stages have ended."""
        return bool(self.entry["status"].get("finishedAt"))


def stored_pipelines(count: int) -> Iterator[StoredPipeline]:
    """Yield pipelines in the states of the corpus; every second round lacks fields that got a default later."""
    entries = [entry for _, entry in corpus() if entry["name"] not in IN_FLIGHT]
    for number, entry in zip(range(count), cycle(entries), strict=False):
        present = json.loads(_moved(entry))
        if number // len(entries) % 2:
            _drop_defaults(present)
        keeps_jobs = number < ROUNDS_WITH_JOBS * len(entries)
        yield StoredPipeline(f"{present['name']}-{number}", present, keeps_jobs)


def _drop_defaults(entry: Object) -> None:
    for stage, fields in NO_DEFAULT.items():
        for field in fields:
            # An objective other than the default is a choice of the user.
            if field != "objective" or entry["spec"][stage][field] == "SFT":
                entry["spec"][stage].pop(field, None)


def _moved(entry: Object) -> str:
    """Return the entry as JSON, with its last moment now."""
    shift = datetime.now(UTC) - datetime.fromisoformat(entry["now"])

    def moved(match: re.Match[str]) -> str:
        time = datetime.fromisoformat(f"2030-01-01T{match[1]}+00:00") + shift
        return time.strftime("%Y-%m-%dT%H:%M:%SZ")

    return TIME.sub(moved, json.dumps(entry))


async def store(api: Api, namespace: str, pipelines: list[StoredPipeline]) -> None:
    """Write all of these pipelines, with their objects."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def in_turn(pipeline: StoredPipeline) -> None:
        async with turns:
            await _Writer(api, namespace, pipeline).write()

    await asyncio.gather(*(in_turn(pipeline) for pipeline in pipelines))


@dataclass
class _Writer:
    api: Api
    namespace: str
    stored: StoredPipeline

    async def write(self) -> None:
        entry = self.stored.entry
        path = f"{PIPELINES}/namespaces/{self.namespace}/finetunepipelines"
        meta = {"name": self.stored.name, "annotations": entry["annotations"]}
        body = {
            "apiVersion": PIPELINES.removeprefix("/apis/"),
            "kind": "FineTunePipeline",
            "metadata": meta,
            "spec": entry["spec"],
        }
        created = await self.api.send("POST", path, body)
        pipeline = Pipeline(
            Key(self.namespace, self.stored.name),
            created["metadata"]["uid"],
            1,
            PipelineSpec.model_validate(entry["spec"]),
        )
        prefix = f"{self.stored.name}-{pipeline.uid[:8]}"
        text = json.dumps(entry).replace(JOB_PREFIX, prefix)
        text = text.replace("demo-deploy", f"{self.stored.name}-deploy")
        # This API server has seen no edit of the spec.
        text = re.sub(r'"observedGeneration": \d+', '"observedGeneration": 1', text)
        own = json.loads(text)
        _record_nodes(own["status"])
        await self._write_children(pipeline, own)
        body = {**created, "status": own["status"]}
        await self.api.send("PUT", f"{path}/{self.stored.name}/status", body)

    async def _write_children(self, pipeline: Pipeline, entry: Object) -> None:
        if self.stored.keeps_jobs or not self.stored.is_finished:
            claims = f"/api/v1/namespaces/{self.namespace}/persistentvolumeclaims"
            await self.api.send("POST", claims, build_claim(pipeline))
        for job in entry["jobs"]:
            has_ended = job["state"] in ENDS
            if job["stage"] != "deploy" and (self.stored.keeps_jobs or not has_ended):
                await self._write_job(pipeline, job)
        for name, server in entry["servers"].items():
            await self._write_server(pipeline, name, is_current=server["current"])

    async def _write_job(self, pipeline: Pipeline, job: Object) -> None:
        path = f"/apis/batch/v1/namespaces/{self.namespace}/jobs"
        template = _template(job["stage"], job["name"])
        created = await self.api.send("POST", path, build_job(pipeline, template))
        if job["state"] in ENDS:
            status = {"status": _ended(job)}
            await self.api.patch(f"{path}/{job['name']}/status", status)
        elif job["state"] == "RUNNING":
            await self._write_pod(created, job["startedAt"])

    async def _write_pod(self, job: Object, started_at: str) -> None:
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        name = f"{job['metadata']['name']}-pod"
        template = job["spec"]["template"]
        owner = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": job["metadata"]["name"],
            "uid": job["metadata"]["uid"],
            "controller": True,
        }
        meta = {
            **template["metadata"],
            "name": name,
            "ownerReferences": [owner],
        }
        pod = {
            "metadata": meta,
            "spec": {**template["spec"], "nodeName": NODE},
        }
        await self.api.send("POST", path, pod)
        state = {"running": {"startedAt": started_at}}
        container = {"name": "stage", "ready": True, "started": True, "state": state}
        status = {"phase": "Running", "containerStatuses": [container]}
        await self.api.patch(f"{path}/{name}/status", {"status": status})

    async def _write_server(
        self, pipeline: Pipeline, name: str, *, is_current: bool
    ) -> None:
        path = f"/apis/apps/v1/namespaces/{self.namespace}/deployments"
        template = _template("deploy", name)
        assert template.serving
        deployment = build_deployment(pipeline, template, template.serving)
        await self.api.send("POST", path, deployment)
        ready = {"status": {"replicas": 1, "readyReplicas": 1}}
        await self.api.patch(f"{path}/{name}/status", ready)
        if is_current:
            services = f"/api/v1/namespaces/{self.namespace}/services"
            service = build_service(pipeline, "deploy", name)
            await self.api.send("POST", services, service)


def _record_nodes(status: Object) -> None:
    """Record the node of each running pod, as an operator does that has seen the pod."""
    for stage in status["stages"]:
        for attempt in stage["attempts"]:
            if attempt["outcome"] == "Running" and attempt.get("startedAt"):
                attempt["node"] = NODE


def _ended(job: Object) -> Object:
    conditions = ENDS[job["state"]][:2]
    count = ENDS[job["state"]][2]
    begin = job["startedAt"] or job["createdAt"] or LONG_AGO
    end = datetime.fromisoformat(begin) + timedelta(seconds=1)
    time = end.strftime("%Y-%m-%dT%H:%M:%SZ")
    status = {
        "startTime": begin,
        count: 1,
        "conditions": [
            {"type": kind, "status": "True", "lastTransitionTime": time}
            for kind in conditions
        ],
    }
    return status | {"completionTime": time} if count == "succeeded" else status


@cache
def _templates() -> dict[str, JobTemplate]:
    jobs = Scenario().finish().cluster.jobs.values()
    return {job.template.stage: job.template for job in jobs}


def _template(stage: str, name: str) -> JobTemplate:
    """Return a Job of the stage under another name."""
    return replace(_templates()[stage], name=name)
