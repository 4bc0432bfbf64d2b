"""Servers on Kubernetes: an attempt of `deploy` is a Deployment, and has made its result when it has answered."""

from datetime import datetime
from typing import Any

from finetune_operator.api.conditions import Reason
from finetune_operator.api.stages.base import Serving
from finetune_operator.core.history import left_running
from finetune_operator.core.job_template import JobTemplate
from finetune_operator.core.metadata import IDENTITY, SERVER, STAGE, service_name
from finetune_operator.core.observation import JobSeen, JobState, Server, Waiting
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.errors import ClusterError, Conflict
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.cache import Books
from finetune_operator.kubernetes.client import AlreadyThere, Api
from finetune_operator.kubernetes.pods.probe import Answer, Answers, NoAnswers
from finetune_operator.kubernetes.resources.owner_references import is_owned
from finetune_operator.kubernetes.resources.server import deployment, launch_of, service, serving_of, url_of
from finetune_operator.kubernetes.translate.api_errors import Refusal
from finetune_operator.kubernetes.translate.diagnose import why
from finetune_operator.kubernetes.translate.pod import Pod, time_of
from finetune_trainer.contract import DeployResult, Failure, TerminationMessage
from finetune_trainer.exit_codes import PERMANENT_EXIT_CODES

Object = dict[str, Any]
FALLS = 3
"""A server that has ended so often before it answered is given up, and the attempt has failed."""


class Servers:
    """The Deployments and Services of pipelines."""

    def __init__(self, api: Api, books: Books, answers: Answers | NoAnswers) -> None:
        self.api, self.books, self.answers = api, books, answers

    async def of(self, pipeline: Pipeline) -> dict[str, Server]:
        """Give every server of the pipeline that nobody has deleted."""
        for stage in pipeline.status.stages.values():
            if job := left_running(stage):  # before its result is taken away, be sure that it is gone
                await self._deployment(pipeline, job)
        mine = [found for found in self.books.deployments.values() if is_owned(pipeline, found) and _readable(found)]
        current = _routed_to(pipeline, await self._service(pipeline)) if mine else None
        return {
            name: Server(found["metadata"]["labels"][STAGE], name == current, _trouble(found))
            for found in mine
            if not found["metadata"].get("deletionTimestamp") and (name := found["metadata"]["name"])
        }

    async def _service(self, pipeline: Pipeline, *, afresh: bool = False) -> Object | None:
        known = self.books.services.get((pipeline.key.namespace, service_name(pipeline.key.name)))
        return await self.api.get(self._where(pipeline)) if afresh or known is None else known

    async def seen(self, pipeline: Pipeline, name: str, warning: str, now: datetime) -> JobSeen | None:
        """Give the attempt that started this server as if it were a Job; `warning`: why it has no pods."""
        found = await self._deployment(pipeline, name)
        if found is None:
            return None
        pods = self.pods(pipeline, name)
        for pod in pods:
            if failed := _fallen(name, pod):
                return failed
        unready = next((pod for pod in pods if not pod.ready), None)
        if not pods or unready or _ready(found) < found["spec"].get("replicas", 1):
            return _starting(name, unready or next(iter(pods), None), warning, now)
        serving = serving_of(found)
        answer = self.answers.of(pods[0], launch_of(serving).model, serving)
        return _answered(pipeline, found, pods[0], serving, answer) if answer else _starting(name, pods[0], "", now)

    def pods(self, pipeline: Pipeline, name: str) -> list[Pod]:
        """Give the pods of an attempt's servers, the oldest first."""
        found = self.books.server_pods.get((pipeline.key.namespace, name), {})
        return sorted(found.values(), key=lambda pod: (str(pod.raw["metadata"].get("creationTimestamp")), pod.name))

    async def _deployment(self, pipeline: Pipeline, name: str) -> Object | None:
        place = (pipeline.key.namespace, name)
        known = self.books.deployments.get(place)
        found = known or await self.api.get(paths.deployments(*place))
        if found and not is_owned(pipeline, found):
            raise ClusterError(f"the Deployment {name} belongs to somebody else: delete it, or rename the pipeline")
        if found is None or not _readable(found):
            return None
        if known is None:
            self.books.note_deployment(found)
        return found

    async def create(self, pipeline: Pipeline, template: JobTemplate, serving: Serving) -> None:
        """Start the servers of an attempt, beside those that run; raises Refusal where that is of no use."""
        if found := await self._service(pipeline, afresh=True):
            _check_owner(pipeline, found)
        where = paths.deployments(pipeline.key.namespace)
        try:
            made = await self.api.create(where, deployment(pipeline, template, serving))
        except AlreadyThere:
            if await self._deployment(pipeline, template.name) is None:
                raise
        else:
            self.books.note_deployment(made)

    async def route(self, pipeline: Pipeline, stage: str, name: str) -> None:
        """Send the requests to the servers of this attempt; raises Refusal where the Service is somebody else's."""
        wanted = service(pipeline, stage, name)
        found = await self._service(pipeline, afresh=True)
        if found is None:
            made = await self.api.create(paths.services(pipeline.key.namespace), wanted)
        else:
            _check_owner(pipeline, found)
            labels = {"metadata": {"labels": wanted["metadata"]["labels"]}}  # by which it is watched
            made = await self.api.patch(
                self._where(pipeline), {**labels, "spec": {"selector": wanted["spec"]["selector"]}}
            )
        self.books.note_service(made)

    async def stop(self, pipeline: Pipeline, name: str) -> bool:
        """Delete the servers of an attempt, and the Service with the last of them; False where there are none.

        Raises Conflict for servers that have the requests by now, whatever was seen before.
        """
        found = self.books.deployments.get((pipeline.key.namespace, name))
        if found is None or not is_owned(pipeline, found):
            return False
        front = await self._service(pipeline, afresh=True)
        if front and _routed_to(pipeline, front) == name:
            if pipeline.spec.stage(found["metadata"]["labels"].get(STAGE, "")):
                self.books.note_service(front)
                raise Conflict(f"requests are sent to {name} by now")
            await self.api.delete(self._where(pipeline), uid=front["metadata"]["uid"])
        if not found["metadata"].get("deletionTimestamp"):
            where = paths.deployments(pipeline.key.namespace, name)
            await self.api.delete(where, "Foreground", uid=found["metadata"]["uid"])
        return True

    def _where(self, pipeline: Pipeline) -> str:
        return paths.services(pipeline.key.namespace, service_name(pipeline.key.name))


def not_made(found: Object | None) -> str:
    """Give what keeps the Deployment from making its pods: the events of that are its ReplicaSet's."""
    conditions = ((found or {}).get("status") or {}).get("conditions") or []
    failures = (one for one in conditions if (one["type"], one["status"]) == ("ReplicaFailure", "True"))
    return next((str(one.get("message") or "") for one in failures), "")


def _ready(found: Object) -> int:
    return int((found.get("status") or {}).get("readyReplicas") or 0)


def _trouble(found: Object) -> Waiting | None:
    if _ready(found):
        return None
    words = f"none of {found['spec'].get('replicas', 1)} replicas of {found['metadata']['name']} is ready"
    return Waiting(Reason.SERVER_NOT_READY, words)


def _routed_to(pipeline: Pipeline, front: Object | None) -> str | None:
    selector: Object = (front["spec"].get("selector") or {}) if front and is_owned(pipeline, front) else {}
    return selector.get(SERVER)


def _check_owner(pipeline: Pipeline, front: Object) -> None:
    if not is_owned(pipeline, front):
        words = f"the Service {front['metadata']['name']} was not made for this pipeline: delete it, or rename one"
        raise Refusal(Reason.DEPENDENCY_NOT_READY, words)


def _readable(found: Object) -> bool:
    """Whether nobody has taken away what we wrote on it; without that it is as good as gone."""
    labels: Object = found["metadata"].get("labels") or {}
    try:
        serving_of(found)
    except (LookupError, TypeError, ValueError):
        return False
    return STAGE in labels and IDENTITY in labels


def _fallen(name: str, pod: Pod) -> JobSeen | None:
    """Tell a server that will never answer from one that has not yet."""
    ended = pod.fallen
    code, memory = ended.get("exitCode"), ended.get("reason") == "OOMKilled"
    if not ended or not (memory or code in PERMANENT_EXIT_CODES or pod.restarts >= FALLS):
        return None
    words = str(ended.get("message") or "").strip()[-1000:]
    said = TerminationMessage(failure=Failure(message=f"the server ended with code {code}: {words}".rstrip(": ")))
    return JobSeen(
        name,
        JobState.FAILED,
        started_at=pod.started_at,
        finished_at=time_of(ended.get("finishedAt")),
        exit_code=code,
        out_of_memory=memory,
        message=None if memory else said,
    )


def _starting(name: str, pod: Pod | None, warning: str, now: datetime) -> JobSeen:
    held = why(pod, warning, now)
    if pod and pod.started_at:
        return JobSeen(name, JobState.RUNNING, started_at=pod.started_at, waiting=held)
    return JobSeen(name, JobState.WAITING, waiting=held)


def _answered(pipeline: Pipeline, found: Object, pod: Pod, serving: Serving, answer: Answer) -> JobSeen:
    """Make the answer the attempt's result, or the lack of it the attempt's failure."""
    name, began = found["metadata"]["name"], pod.started_at
    if answer.failure:
        message = TerminationMessage(failure=Failure(message=answer.failure))
        return JobSeen(name, JobState.FAILED, started_at=began, message=message)
    ready = time_of(pod.condition("Ready").get("lastTransitionTime"))
    result = DeployResult(
        identity=found["metadata"]["labels"][IDENTITY],
        digest=serving.digest or "",
        url=url_of(pipeline),
        answer=answer.text,
        seconds_to_ready=_seconds(began, ready),
        lasting=True,
    )
    return JobSeen(name, JobState.COMPLETE, started_at=began, exit_code=0, message=TerminationMessage(result=result))


def _seconds(began: datetime | None, ready: datetime | None) -> float:
    return max(0.0, (ready - began).total_seconds()) if began and ready else 0.0
