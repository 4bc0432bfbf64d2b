"""Servers on Kubernetes: an attempt of `deploy` is a Deployment, and succeeds when its server answers the probe."""

from datetime import datetime
from typing import Any

from finetune_operator.api.conditions import Reason
from finetune_operator.api.stages.base import Serving
from finetune_operator.core.history import server_job
from finetune_operator.core.job_template import JobTemplate
from finetune_operator.core.metadata import IDENTITY, SERVER, STAGE, service_name
from finetune_operator.core.observation import Blocker, JobState, ObservedJob, ObservedServer
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.errors import ClusterError, Conflict
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.cache import ResourceCache
from finetune_operator.kubernetes.client import KubernetesClient
from finetune_operator.kubernetes.pods.probe import NoProbe, ProbeResult, ServerProbe
from finetune_operator.kubernetes.resources.owner_references import is_owned_by
from finetune_operator.kubernetes.resources.server import build_deployment, build_service, launch_of, serving_of, url_of
from finetune_operator.kubernetes.translate.api_errors import AlreadyExists, Blocked
from finetune_operator.kubernetes.translate.diagnose import diagnose
from finetune_operator.kubernetes.translate.pod import Pod, time_of
from finetune_trainer.contract import DeployResult, Failure, TerminationMessage
from finetune_trainer.exit_codes import PERMANENT_EXIT_CODES

Object = dict[str, Any]
MAX_CRASHES = 3
"""Number of restarts before the first answer at which the attempt fails."""


class Servers:
    """The Deployments and Services of pipelines."""

    def __init__(self, api: KubernetesClient, cache: ResourceCache, probes: ServerProbe | NoProbe) -> None:
        self.api, self.cache, self.probes = api, cache, probes

    async def observe(self, pipeline: Pipeline) -> dict[str, ObservedServer]:
        """Return the pipeline's servers that are not being deleted, by attempt."""
        for stage in pipeline.status.stages.values():
            # A server missing from the cache is read from the API: the stage loses its result only if it is gone.
            if job := server_job(stage):
                await self._deployment(pipeline, job)
        owned = [
            found for found in self.cache.deployments.values() if is_owned_by(pipeline, found) and _is_intact(found)
        ]
        current = _traffic_target(pipeline, await self._service(pipeline)) if owned else None
        return {
            name: ObservedServer(found["metadata"]["labels"][STAGE], name == current, _unavailable(found))
            for found in owned
            if not found["metadata"].get("deletionTimestamp") and (name := found["metadata"]["name"])
        }

    async def _service(self, pipeline: Pipeline, *, uncached: bool = False) -> Object | None:
        known = self.cache.services.get((pipeline.key.namespace, service_name(pipeline.key.name)))
        return await self.api.get(_service_path(pipeline)) if uncached or known is None else known

    async def observe_attempt(self, pipeline: Pipeline, name: str, warning: str, now: datetime) -> ObservedJob | None:
        """Return the state of the attempt that started this server; `warning`: why it has no running pod."""
        found = await self._deployment(pipeline, name)
        if found is None:
            return None
        pods = self.pods(pipeline, name)
        for pod in pods:
            if crashed := _observe_crash(name, pod):
                return crashed
        unready = next((pod for pod in pods if not pod.ready), None)
        if not pods or unready or _ready(found) < found["spec"].get("replicas", 1):
            return _observe_start(name, unready or next(iter(pods), None), warning, now)
        serving = serving_of(found)
        result = self.probes.result(pods[0], launch_of(serving).model, serving)
        return (
            _observe_answer(pipeline, found, pods[0], serving, result)
            if result
            else _observe_start(name, pods[0], "", now)
        )

    def pods(self, pipeline: Pipeline, name: str) -> list[Pod]:
        """Return the pods of an attempt's servers, the oldest first."""
        found = self.cache.server_pods.get((pipeline.key.namespace, name), {})
        return sorted(found.values(), key=lambda pod: (str(pod.raw["metadata"].get("creationTimestamp")), pod.name))

    async def _deployment(self, pipeline: Pipeline, name: str) -> Object | None:
        namespaced_name = (pipeline.key.namespace, name)
        known = self.cache.deployments.get(namespaced_name)
        found = known or await self.api.get(paths.deployments(*namespaced_name))
        if found and not is_owned_by(pipeline, found):
            raise ClusterError(
                f"the Deployment {name} is not owned by this pipeline: delete it, or rename the pipeline"
            )
        if found is None or not _is_intact(found):
            return None
        if known is None:
            self.cache.update_deployment(found)
        return found

    async def create(self, pipeline: Pipeline, template: JobTemplate, serving: Serving) -> None:
        """Start the servers of an attempt in parallel with running ones. Raises Blocked where they could not serve."""
        if found := await self._service(pipeline, uncached=True):
            _check_owner(pipeline, found)
        path = paths.deployments(pipeline.key.namespace)
        try:
            created = await self.api.create(path, build_deployment(pipeline, template, serving))
        except AlreadyExists:
            if await self._deployment(pipeline, template.name) is None:
                raise
        else:
            self.cache.update_deployment(created)

    async def switch_traffic(self, pipeline: Pipeline, stage: str, name: str) -> None:
        """Send requests to the servers of this attempt. Raises Blocked where the pipeline does not own the Service."""
        desired = build_service(pipeline, stage, name)
        found = await self._service(pipeline, uncached=True)
        if found is None:
            service = await self.api.create(paths.services(pipeline.key.namespace), desired)
        else:
            _check_owner(pipeline, found)
            labels = {"metadata": {"labels": desired["metadata"]["labels"]}}  # the informers select by them
            service = await self.api.patch(
                _service_path(pipeline), {**labels, "spec": {"selector": desired["spec"]["selector"]}}
            )
        self.cache.update_service(service)

    async def stop(self, pipeline: Pipeline, name: str) -> bool:
        """Delete the servers of an attempt, and the Service with the last of them; return False where there are none.

        The Service is read from the API server. Raises Conflict where it sends requests to these servers.
        """
        found = self.cache.deployments.get((pipeline.key.namespace, name))
        if found is None or not is_owned_by(pipeline, found):
            return False
        service = await self._service(pipeline, uncached=True)
        if service and _traffic_target(pipeline, service) == name:
            if pipeline.spec.stage(found["metadata"]["labels"].get(STAGE, "")):
                self.cache.update_service(service)
                raise Conflict(f"the Service sends requests to {name}, so it is not deleted")
            await self.api.delete(_service_path(pipeline), uid=service["metadata"]["uid"])
        if not found["metadata"].get("deletionTimestamp"):
            path = paths.deployments(pipeline.key.namespace, name)
            await self.api.delete(path, "Foreground", uid=found["metadata"]["uid"])
        return True


def _service_path(pipeline: Pipeline) -> str:
    return paths.services(pipeline.key.namespace, service_name(pipeline.key.name))


def replica_failure(deployment: Object | None) -> str:
    """Return why the Deployment cannot create its pods; empty where it can.

    The Deployment's condition has the reason; the events belong to its ReplicaSet.
    """
    conditions = ((deployment or {}).get("status") or {}).get("conditions") or []
    failures = (one for one in conditions if (one["type"], one["status"]) == ("ReplicaFailure", "True"))
    return next((str(one.get("message") or "") for one in failures), "")


def _ready(deployment: Object) -> int:
    return int((deployment.get("status") or {}).get("readyReplicas") or 0)


def _unavailable(deployment: Object) -> Blocker | None:
    if _ready(deployment):
        return None
    name, replicas = deployment["metadata"]["name"], deployment["spec"].get("replicas", 1)
    message = f"0 of {replicas} replicas of the Deployment {name} are ready: see `kubectl describe deployment {name}`"
    return Blocker(Reason.SERVER_NOT_READY, message)


def _traffic_target(pipeline: Pipeline, service: Object | None) -> str | None:
    selector: Object = (service["spec"].get("selector") or {}) if service and is_owned_by(pipeline, service) else {}
    return selector.get(SERVER)


def _check_owner(pipeline: Pipeline, service: Object) -> None:
    if not is_owned_by(pipeline, service):
        name = service["metadata"]["name"]
        message = f"the Service {name} was not created for this pipeline: delete it, or rename the pipeline"
        raise Blocked(Reason.DEPENDENCY_NOT_READY, message)


def _is_intact(deployment: Object) -> bool:
    """Return whether the operator's labels and annotation are still there; without them it counts as deleted."""
    labels: Object = deployment["metadata"].get("labels") or {}
    try:
        serving_of(deployment)
    except (LookupError, TypeError, ValueError):
        return False
    return STAGE in labels and IDENTITY in labels


def _observe_crash(name: str, pod: Pod) -> ObservedJob | None:
    """Return the failed attempt of a server that will never answer; None where it may still answer."""
    terminated = pod.last_failure
    code, out_of_memory = terminated.get("exitCode"), terminated.get("reason") == "OOMKilled"
    if not terminated or not (out_of_memory or code in PERMANENT_EXIT_CODES or pod.restarts >= MAX_CRASHES):
        return None
    detail = str(terminated.get("message") or "").strip()[-1000:]
    failure = Failure(message=f"the server exited with code {code}: {detail}".rstrip(": "))
    return ObservedJob(
        name,
        JobState.FAILED,
        started_at=pod.started_at,
        finished_at=time_of(terminated.get("finishedAt")),
        exit_code=code,
        out_of_memory=out_of_memory,
        message=None if out_of_memory else TerminationMessage(failure=failure),
    )


def _observe_start(name: str, pod: Pod | None, warning: str, now: datetime) -> ObservedJob:
    blocker = diagnose(pod, warning, now)
    if pod and pod.started_at:
        return ObservedJob(name, JobState.RUNNING, started_at=pod.started_at, blocker=blocker)
    return ObservedJob(name, JobState.WAITING, blocker=blocker)


def _observe_answer(
    pipeline: Pipeline, deployment: Object, pod: Pod, serving: Serving, probe: ProbeResult
) -> ObservedJob:
    """Return the attempt as complete with the probe's answer, or as failed with the probe's failure."""
    name, started_at = deployment["metadata"]["name"], pod.started_at
    if probe.failure:
        message = TerminationMessage(failure=Failure(message=probe.failure))
        return ObservedJob(name, JobState.FAILED, started_at=started_at, message=message)
    ready = time_of(pod.condition("Ready").get("lastTransitionTime"))
    result = DeployResult(
        identity=deployment["metadata"]["labels"][IDENTITY],
        digest=serving.digest or "",
        url=url_of(pipeline),
        answer=probe.text,
        seconds_to_ready=_seconds(started_at, ready),
        long_running=True,
    )
    return ObservedJob(
        name, JobState.COMPLETE, started_at=started_at, exit_code=0, message=TerminationMessage(result=result)
    )


def _seconds(started: datetime | None, ready: datetime | None) -> float:
    return max(0.0, (ready - started).total_seconds()) if started and ready else 0.0
