"""Servers on Kubernetes: an attempt of `deploy` is a Deployment, and has made its result when it has answered."""

from datetime import datetime
from typing import Any

from finetune_operator.api.conditions import Reason
from finetune_operator.cluster.kubernetes import paths
from finetune_operator.cluster.kubernetes.answers import Answer, Answers, NoAnswers
from finetune_operator.cluster.kubernetes.api import AlreadyThere, Api
from finetune_operator.cluster.kubernetes.books import Books
from finetune_operator.cluster.kubernetes.ownership import is_owned
from finetune_operator.cluster.kubernetes.pod import Pod, time_of
from finetune_operator.cluster.kubernetes.refusal import Refusal
from finetune_operator.cluster.kubernetes.server import deployment, launch_of, service, serving_of, url_of
from finetune_operator.errors import ClusterError
from finetune_operator.history import left_running
from finetune_operator.jobs import JobTemplate
from finetune_operator.labels import IDENTITY, SERVER, STAGE
from finetune_operator.names import service_name
from finetune_operator.observing import JobSeen, JobState, Server, Waiting
from finetune_operator.pipeline import Pipeline
from finetune_operator.stages.base import Serving
from finetune_trainer.contract import DeployResult, ExitCode, Failure, TerminationMessage

Object = dict[str, Any]
FALLS = 3
"""A server that has ended so often before it answered is given up, and the attempt has failed."""
LASTING_FAULTS = frozenset({ExitCode.CONFIG, ExitCode.DATA, ExitCode.NOT_FOUND})


class Servers:
    """The Deployments and Services of pipelines."""

    def __init__(self, api: Api, books: Books, answers: Answers | NoAnswers) -> None:
        self.api, self.books, self.answers = api, books, answers

    async def of(self, pipeline: Pipeline) -> dict[str, Server]:
        """Give every server of the pipeline that nobody has deleted."""
        for stage in pipeline.status.stages.values():
            if job := left_running(stage):  # before its result is taken away, be sure that it is gone
                await self._deployment(pipeline, job)
        mine = [found for found in self.books.deployments.values() if is_owned(pipeline, found)]
        current = await self._current(pipeline) if mine else None
        return {
            name: Server(found["metadata"]["labels"][STAGE], name == current, self._trouble(found))
            for found in mine
            if not found["metadata"].get("deletionTimestamp") and (name := found["metadata"]["name"])
        }

    async def _current(self, pipeline: Pipeline) -> str | None:
        """Name the attempt whose servers get the requests."""
        known = self.books.services.get((pipeline.key.namespace, service_name(pipeline.key.name)))
        found = known or await self.api.get(self._where(pipeline))
        return found["spec"].get("selector", {}).get(SERVER) if found and is_owned(pipeline, found) else None

    def _trouble(self, found: Object) -> Waiting | None:
        ready, wanted = _ready(found), found["spec"].get("replicas", 1)
        if ready:
            return None
        return Waiting(Reason.SERVER_NOT_READY, f"none of {wanted} replicas of {found['metadata']['name']} is ready")

    async def seen(self, pipeline: Pipeline, name: str, waiting: Waiting | None) -> JobSeen | None:
        """Give the attempt that started this server as if it were a Job; `waiting`: why its pod has not started."""
        found = await self._deployment(pipeline, name)
        if found is None:
            return None
        pod = self.books.pods.get((pipeline.key.namespace, name))
        if pod and (failed := self._fallen(name, pod)):
            return failed
        if not pod or not pod.ready or _ready(found) < found["spec"].get("replicas", 1):
            return _starting(name, pod, waiting)
        serving = serving_of(found)
        answer = await self.answers.of(pod, launch_of(serving).model, serving)
        return _answered(pipeline, found, pod, serving, answer) if answer else _starting(name, pod, waiting)

    async def _deployment(self, pipeline: Pipeline, name: str) -> Object | None:
        place = (pipeline.key.namespace, name)
        found = self.books.deployments.get(place) or await self.api.get(paths.deployments(*place))
        if found and not is_owned(pipeline, found):
            raise ClusterError(f"the Deployment {name} belongs to somebody else: delete it, or rename the pipeline")
        if found:
            self.books.note_deployment(found)
        return found

    def _fallen(self, name: str, pod: Pod) -> JobSeen | None:
        """Tell a server that will never answer from one that has not yet."""
        ended = pod.fallen
        code, memory = ended.get("exitCode"), ended.get("reason") == "OOMKilled"
        if not ended or not (memory or code in LASTING_FAULTS or pod.restarts >= FALLS):
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

    async def create(self, pipeline: Pipeline, template: JobTemplate, serving: Serving) -> None:
        """Start the servers of an attempt, beside those that run; raises Refusal where that is of no use."""
        if (found := await self.api.get(self._where(pipeline))) and not is_owned(pipeline, found):
            name = found["metadata"]["name"]
            raise Refusal(
                Reason.DEPENDENCY_NOT_READY, f"the Service {name} was not made for this pipeline: delete or rename it"
            )
        where = paths.deployments(pipeline.key.namespace)
        try:
            made = await self.api.create(where, deployment(pipeline, template, serving))
        except AlreadyThere:
            if await self._deployment(pipeline, template.name) is None:
                raise
        else:
            self.books.note_deployment(made)

    async def route(self, pipeline: Pipeline, stage: str, name: str) -> None:
        """Send the requests to the servers of this attempt."""
        wanted = service(pipeline, stage, name)
        if await self.api.get(self._where(pipeline)) is None:
            made = await self.api.create(paths.services(pipeline.key.namespace), wanted)
        else:
            made = await self.api.patch(self._where(pipeline), {"spec": {"selector": wanted["spec"]["selector"]}})
        self.books.note_service(made)

    async def stop(self, pipeline: Pipeline, name: str) -> bool:
        """Delete the servers of an attempt, and the Service with the last of them; False where there are none."""
        found = self.books.deployments.get((pipeline.key.namespace, name))
        if found is None or not is_owned(pipeline, found):
            return False
        if await self._current(pipeline) == name:
            await self.api.delete(self._where(pipeline))
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


def _starting(name: str, pod: Pod | None, waiting: Waiting | None) -> JobSeen:
    if pod and pod.started_at:
        return JobSeen(name, JobState.RUNNING, started_at=pod.started_at)
    return JobSeen(name, JobState.WAITING, waiting=waiting)


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
