"""Servers on Kubernetes: an attempt of `deploy` is a Deployment, and has made its result when it has answered."""

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
from finetune_operator.kubernetes.client import AlreadyExists, KubernetesClient
from finetune_operator.kubernetes.pods.probe import NoProbe, ProbeResult, ServerProbe
from finetune_operator.kubernetes.resources.owner_references import is_owned_by
from finetune_operator.kubernetes.resources.server import build_deployment, build_service, launch_of, serving_of, url_of
from finetune_operator.kubernetes.translate.api_errors import Blocked
from finetune_operator.kubernetes.translate.diagnose import diagnose
from finetune_operator.kubernetes.translate.pod import Pod, time_of
from finetune_trainer.contract import DeployResult, Failure, TerminationMessage
from finetune_trainer.exit_codes import PERMANENT_EXIT_CODES

Object = dict[str, Any]
MAX_CRASHES = 3
"""A server that has ended so often before it answered is given up, and the attempt has failed."""


class Servers:
    """The Deployments and Services of pipelines."""

    def __init__(self, api: KubernetesClient, books: ResourceCache, answers: ServerProbe | NoProbe) -> None:
        self.api, self.cache, self.probes = api, books, answers

    async def observe(self, pipeline: Pipeline) -> dict[str, ObservedServer]:
        """Give every server of the pipeline that nobody has deleted."""
        for stage in pipeline.status.stages.values():
            if job := server_job(stage):  # before its result is taken away, be sure that it is gone
                await self._deployment(pipeline, job)
        mine = [
            found for found in self.cache.deployments.values() if is_owned_by(pipeline, found) and _is_intact(found)
        ]
        current = _traffic_target(pipeline, await self._service(pipeline)) if mine else None
        return {
            name: ObservedServer(found["metadata"]["labels"][STAGE], name == current, _unavailable(found))
            for found in mine
            if not found["metadata"].get("deletionTimestamp") and (name := found["metadata"]["name"])
        }

    async def _service(self, pipeline: Pipeline, *, afresh: bool = False) -> Object | None:
        known = self.cache.services.get((pipeline.key.namespace, service_name(pipeline.key.name)))
        return await self.api.get(self._where(pipeline)) if afresh or known is None else known

    async def observe_attempt(self, pipeline: Pipeline, name: str, warning: str, now: datetime) -> ObservedJob | None:
        """Give the attempt that started this server as if it were a Job; `warning`: why it has no pods."""
        found = await self._deployment(pipeline, name)
        if found is None:
            return None
        pods = self.pods(pipeline, name)
        for pod in pods:
            if failed := _observe_crash(name, pod):
                return failed
        unready = next((pod for pod in pods if not pod.ready), None)
        if not pods or unready or _ready(found) < found["spec"].get("replicas", 1):
            return _observe_start(name, unready or next(iter(pods), None), warning, now)
        serving = serving_of(found)
        answer = self.probes.result(pods[0], launch_of(serving).model, serving)
        return (
            _observe_answer(pipeline, found, pods[0], serving, answer)
            if answer
            else _observe_start(name, pods[0], "", now)
        )

    def pods(self, pipeline: Pipeline, name: str) -> list[Pod]:
        """Give the pods of an attempt's servers, the oldest first."""
        found = self.cache.server_pods.get((pipeline.key.namespace, name), {})
        return sorted(found.values(), key=lambda pod: (str(pod.raw["metadata"].get("creationTimestamp")), pod.name))

    async def _deployment(self, pipeline: Pipeline, name: str) -> Object | None:
        place = (pipeline.key.namespace, name)
        known = self.cache.deployments.get(place)
        found = known or await self.api.get(paths.deployments(*place))
        if found and not is_owned_by(pipeline, found):
            raise ClusterError(f"the Deployment {name} belongs to somebody else: delete it, or rename the pipeline")
        if found is None or not _is_intact(found):
            return None
        if known is None:
            self.cache.update_deployment(found)
        return found

    async def create(self, pipeline: Pipeline, template: JobTemplate, serving: Serving) -> None:
        """Start the servers of an attempt, beside those that run; raises Refusal where that is of no use."""
        if found := await self._service(pipeline, afresh=True):
            _check_owner(pipeline, found)
        where = paths.deployments(pipeline.key.namespace)
        try:
            made = await self.api.create(where, build_deployment(pipeline, template, serving))
        except AlreadyExists:
            if await self._deployment(pipeline, template.name) is None:
                raise
        else:
            self.cache.update_deployment(made)

    async def switch_traffic(self, pipeline: Pipeline, stage: str, name: str) -> None:
        """Send the requests to the servers of this attempt; raises Refusal where the Service is somebody else's."""
        wanted = build_service(pipeline, stage, name)
        found = await self._service(pipeline, afresh=True)
        if found is None:
            made = await self.api.create(paths.services(pipeline.key.namespace), wanted)
        else:
            _check_owner(pipeline, found)
            labels = {"metadata": {"labels": wanted["metadata"]["labels"]}}  # by which it is watched
            made = await self.api.patch(
                self._where(pipeline), {**labels, "spec": {"selector": wanted["spec"]["selector"]}}
            )
        self.cache.update_service(made)

    async def stop(self, pipeline: Pipeline, name: str) -> bool:
        """Delete the servers of an attempt, and the Service with the last of them; False where there are none.

        Raises Conflict for servers that have the requests by now, whatever was seen before.
        """
        found = self.cache.deployments.get((pipeline.key.namespace, name))
        if found is None or not is_owned_by(pipeline, found):
            return False
        front = await self._service(pipeline, afresh=True)
        if front and _traffic_target(pipeline, front) == name:
            if pipeline.spec.stage(found["metadata"]["labels"].get(STAGE, "")):
                self.cache.update_service(front)
                raise Conflict(f"requests are sent to {name} by now")
            await self.api.delete(self._where(pipeline), uid=front["metadata"]["uid"])
        if not found["metadata"].get("deletionTimestamp"):
            where = paths.deployments(pipeline.key.namespace, name)
            await self.api.delete(where, "Foreground", uid=found["metadata"]["uid"])
        return True

    def _where(self, pipeline: Pipeline) -> str:
        return paths.services(pipeline.key.namespace, service_name(pipeline.key.name))


def replica_failure(found: Object | None) -> str:
    """Give what keeps the Deployment from making its pods: the events of that are its ReplicaSet's."""
    conditions = ((found or {}).get("status") or {}).get("conditions") or []
    failures = (one for one in conditions if (one["type"], one["status"]) == ("ReplicaFailure", "True"))
    return next((str(one.get("message") or "") for one in failures), "")


def _ready(found: Object) -> int:
    return int((found.get("status") or {}).get("readyReplicas") or 0)


def _unavailable(found: Object) -> Blocker | None:
    if _ready(found):
        return None
    words = f"none of {found['spec'].get('replicas', 1)} replicas of {found['metadata']['name']} is ready"
    return Blocker(Reason.SERVER_NOT_READY, words)


def _traffic_target(pipeline: Pipeline, front: Object | None) -> str | None:
    selector: Object = (front["spec"].get("selector") or {}) if front and is_owned_by(pipeline, front) else {}
    return selector.get(SERVER)


def _check_owner(pipeline: Pipeline, front: Object) -> None:
    if not is_owned_by(pipeline, front):
        words = f"the Service {front['metadata']['name']} was not made for this pipeline: delete it, or rename one"
        raise Blocked(Reason.DEPENDENCY_NOT_READY, words)


def _is_intact(found: Object) -> bool:
    """Whether nobody has taken away what we wrote on it; without that it is as good as gone."""
    labels: Object = found["metadata"].get("labels") or {}
    try:
        serving_of(found)
    except (LookupError, TypeError, ValueError):
        return False
    return STAGE in labels and IDENTITY in labels


def _observe_crash(name: str, pod: Pod) -> ObservedJob | None:
    """Tell a server that will never answer from one that has not yet."""
    ended = pod.last_failure
    code, memory = ended.get("exitCode"), ended.get("reason") == "OOMKilled"
    if not ended or not (memory or code in PERMANENT_EXIT_CODES or pod.restarts >= MAX_CRASHES):
        return None
    words = str(ended.get("message") or "").strip()[-1000:]
    said = TerminationMessage(failure=Failure(message=f"the server ended with code {code}: {words}".rstrip(": ")))
    return ObservedJob(
        name,
        JobState.FAILED,
        started_at=pod.started_at,
        finished_at=time_of(ended.get("finishedAt")),
        exit_code=code,
        out_of_memory=memory,
        message=None if memory else said,
    )


def _observe_start(name: str, pod: Pod | None, warning: str, now: datetime) -> ObservedJob:
    held = diagnose(pod, warning, now)
    if pod and pod.started_at:
        return ObservedJob(name, JobState.RUNNING, started_at=pod.started_at, blocker=held)
    return ObservedJob(name, JobState.WAITING, blocker=held)


def _observe_answer(pipeline: Pipeline, found: Object, pod: Pod, serving: Serving, answer: ProbeResult) -> ObservedJob:
    """Make the answer the attempt's result, or the lack of it the attempt's failure."""
    name, began = found["metadata"]["name"], pod.started_at
    if answer.failure:
        message = TerminationMessage(failure=Failure(message=answer.failure))
        return ObservedJob(name, JobState.FAILED, started_at=began, message=message)
    ready = time_of(pod.condition("Ready").get("lastTransitionTime"))
    result = DeployResult(
        identity=found["metadata"]["labels"][IDENTITY],
        digest=serving.digest or "",
        url=url_of(pipeline),
        answer=answer.text,
        seconds_to_ready=_seconds(began, ready),
        long_running=True,
    )
    return ObservedJob(
        name, JobState.COMPLETE, started_at=began, exit_code=0, message=TerminationMessage(result=result)
    )


def _seconds(began: datetime | None, ready: datetime | None) -> float:
    return max(0.0, (ready - began).total_seconds()) if began and ready else 0.0
