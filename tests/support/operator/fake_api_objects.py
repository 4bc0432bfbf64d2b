"""The objects of a fake API server: pipelines, Jobs and pods of in-memory clusters."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError
from support.operator.memory_objects import MemoryJob, StoredPipeline
from support.operator.pods import (
    a_job,
    a_pod,
    controller_reference,
    job_condition,
    running,
    terminated,
)
from support.operator.scenario import Scenario, merged

from finetune_operator.api.spec import PipelineSpec
from finetune_operator.core.metadata import STAGE_CONTAINER
from finetune_operator.core.observation import JobState
from finetune_operator.core.pipeline import Key
from finetune_operator.kubernetes.resources.server import SERVING_ANNOTATION

Object = dict[str, Any]
PIPELINES = "finetunepipelines"


class FakeApiServer:
    """The objects that the server returns, and the errors that it injects."""

    def __init__(self) -> None:
        self.scenarios: dict[Key, Scenario] = {}
        self.deleted_pods: set[str] = set()
        """Jobs whose pods no longer exist."""
        self.claims: list[Object] = []
        self.nodes: dict[str, str] = {}
        """Job -> the node of its pod; spot-1 if absent."""
        self.logs: dict[str, list[str]] = {}
        """Job -> the lines that its process has written."""
        self.interrupted_logs: list[str] = []
        """Jobs whose log connection breaks once, after the first line."""
        self.kubelet_messages: dict[str, str] = {}
        """Job -> the message that the kubelet writes once in place of its log, without a timestamp."""
        self.on_eviction: Callable[[str, str], None] = lambda _job, _how: None
        """Called with the Job of a pod that was evicted (`evict`) or deleted (`kill`)."""
        self.disruption_budgets: list[str] = []
        """Messages of PodDisruptionBudgets that forbid every eviction."""
        self.admission_without_dry_run = False
        """Whether an admission webhook refuses requests with dryRun."""
        self.forbidden: set[tuple[str, str]] = set()
        """Verbs and resources that RBAC forbids."""
        self.installed = True
        """Whether the CRD is installed."""
        self.missing_namespaces: set[str] = set()
        self.last_applied: dict[Key, Object] = {}
        self.admission_error = ""
        """The message with which a webhook rejects every change."""
        self.requests: list[str] = []
        """Method and path of every request."""
        self.service_port = 0
        """Port of the program behind every Service."""
        self.unavailable = 0
        """So many of the next responses are 503."""

    def add(self, scenario: Scenario, namespace: str = "team") -> Scenario:
        """Serve the pipeline of a scenario."""
        self.scenarios[Key(namespace, scenario.key.name)] = scenario
        return scenario

    def pipeline(self, key: Key) -> Object:
        """Return the pipeline object."""
        scenario = self.scenarios[key]
        stored: StoredPipeline = scenario.cluster.pipelines[scenario.key]
        annotations = dict(stored.annotations)
        if key in self.last_applied:
            annotations["kubectl.kubernetes.io/last-applied-configuration"] = (
                json.dumps(self.last_applied[key])
            )
        return {
            "apiVersion": "finetune.dev/v1alpha1",
            "kind": "FineTunePipeline",
            "metadata": {
                "name": key.name,
                "namespace": key.namespace,
                "uid": stored.uid,
                "generation": stored.generation,
                "resourceVersion": str(stored.version),
                "annotations": annotations,
                "managedFields": [{"manager": "flux", "operation": "Apply"}],
            },
            "spec": json.loads(stored.spec),
            "status": json.loads(stored.status),
        }

    def patch(self, key: Key, body: Object, query: dict[str, str], kind: str) -> Object:
        """Patch a pipeline and return it; with `dryRun`, return the patched object only. Raises ErrorResponse."""
        if self.admission_error:
            raise ErrorResponse(422, "Invalid", self.admission_error)
        if key.namespace in self.missing_namespaces:
            raise ErrorResponse(
                404, "NotFound", f'namespaces "{key.namespace}" not found'
            )
        exists = key in self.scenarios
        before = (
            self.pipeline(key)
            if exists
            else {"metadata": {"uid": "dry", "generation": 1}, "spec": {}}
        )
        replaces = kind.startswith("application/apply") or not exists
        spec = (
            body.get("spec", {})
            if replaces
            else merged(before["spec"], body.get("spec", {}))
        )
        try:
            parsed = PipelineSpec.model_validate(spec)
        except ValidationError as error:
            raise ErrorResponse(
                422, "Invalid", f"spec: {error.errors()[0]['msg']}"
            ) from error
        if query.get("dryRun"):
            meta = {**before["metadata"], "name": key.name, "namespace": key.namespace}
            return {**before, "metadata": meta, "spec": spec}
        scenario = self.scenarios[key]
        scenario.cluster.edit(scenario.key, parsed)
        for name, value in body.get("metadata", {}).get("annotations", {}).items():
            scenario.cluster.annotate(scenario.key, name, value)
        scenario.reconcile_until_stable()
        return self.pipeline(key)

    def job(self, namespace: str, name: str) -> Object | None:
        """Return a Job, or None if it does not exist."""
        job = self._jobs(namespace).get(name)
        if job is None:
            return None
        conditions = {
            JobState.COMPLETE: [job_condition("Complete")],
            JobState.FAILED: [job_condition("Failed")],
        }
        return a_job(
            *conditions.get(job.observed.state, []),
            name=name,
            ownerReferences=[{"uid": job.owner}],
        )

    def deployment(self, namespace: str, name: str) -> Object | None:
        """Return the Deployment of an attempt whose server is starting; None for all others."""
        job = self._jobs(namespace).get(name)
        if job is None or not (job.live and job.template.serving):
            return None
        annotations = {SERVING_ANNOTATION: json.dumps(asdict(job.template.serving))}
        labels = job.template.labels
        owners = [{"uid": job.owner}]
        known = a_job(
            name=name, labels=labels, annotations=annotations, ownerReferences=owners
        )
        return {**known, "spec": {"replicas": 1}, "status": {}}

    def others(self, plural: str, namespace: str) -> list[Object]:
        """Return the claims of a namespace, or of all; there are no events."""
        if plural != "persistentvolumeclaims":
            return []
        return [
            claim
            for claim in self.claims
            if namespace in {"", claim["metadata"]["namespace"]}
        ]

    def pods(self, namespace: str) -> Iterator[Object]:
        """Yield all pods that exist in a namespace."""
        for name, job in self._jobs(namespace).items():
            if name not in self.deleted_pods:
                yield self._pod(namespace, name, job)

    def pod(self, namespace: str, name: str) -> Object:
        """Return a pod; raises ErrorResponse if it does not exist."""
        for pod in self.pods(namespace):
            if pod["metadata"]["name"] == name:
                return pod
        raise ErrorResponse(404, "NotFound", f'pods "{name}" not found')

    def progress(self, namespace: str, job: str) -> Object:
        """Return the report of a Job's process at /progress; raises ErrorResponse while it does not answer."""
        report = self._jobs(namespace)[job].observed.progress
        if report is None:
            raise ErrorResponse(
                503,
                "ServiceUnavailable",
                "error trying to reach service: connection refused",
            )
        progress: Object = json.loads(
            report.model_dump_json(by_alias=True, exclude_none=True)
        )
        return progress

    def _jobs(self, namespace: str) -> dict[str, MemoryJob]:
        return {
            name: job
            for key, scenario in self.scenarios.items()
            if key.namespace == namespace
            for name, job in scenario.cluster.jobs.items()
        }

    def _pod(self, namespace: str, name: str, job: MemoryJob) -> Object:
        match job.observed.state:
            case JobState.WAITING:
                pod = a_pod(None, phase="Pending")
            case JobState.RUNNING:
                pod = a_pod(running())
            case JobState.COMPLETE | JobState.FAILED:
                succeeded = job.observed.state is JobState.COMPLETE
                pod = a_pod(
                    terminated(job.observed.exit_code or 0),
                    phase="Succeeded" if succeeded else "Failed",
                )
        pod["metadata"] |= {
            "name": f"{name}-xyz",
            "namespace": namespace,
            "uid": f"uid-{name}",
        }
        pod["metadata"]["ownerReferences"] = [controller_reference("Job", name)]
        pod["metadata"]["labels"] = {
            **job.template.labels,
            "batch.kubernetes.io/job-name": name,
        }
        pod["spec"]["containers"] = [{"name": STAGE_CONTAINER}]
        pod["spec"]["nodeName"] = (
            self.nodes.get(name, "spot-1") if job.observed.started_at else ""
        )
        return pod


class ErrorResponse(Exception):
    """A response with an error status."""

    def __init__(
        self, status: int, reason: str, message: str, causes: list[Object] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.causes = causes or []
