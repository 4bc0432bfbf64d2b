"""The Cluster protocol on Kubernetes."""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError

from finetune_operator.api.conditions import FINISHED, READY, STALLED, Condition, Reason
from finetune_operator.api.group import API_VERSION, KIND
from finetune_operator.api.spec import STAGES, PipelineSpec
from finetune_operator.api.status import Outcome, PipelineStatus, truncate_message
from finetune_operator.core.events import Event
from finetune_operator.core.job_template import JobTemplate
from finetune_operator.core.observation import Blocker, Observation, ObservedJob
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.core.plan import Action, CreateJob, DeletePipeline, StopJob, SwitchTraffic
from finetune_operator.errors import ClusterError, Conflict, InvalidObject
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.cache import JOB_NAME, ResourceCache
from finetune_operator.kubernetes.client import AlreadyExists, ApiError, KubernetesClient
from finetune_operator.kubernetes.pods.probe import NoProbe, ServerProbe
from finetune_operator.kubernetes.pods.progress import NoProgress, ProgressPoller
from finetune_operator.kubernetes.resources.job import build_job as as_job
from finetune_operator.kubernetes.resources.owner_references import is_owned_by
from finetune_operator.kubernetes.servers import Servers, replica_failure
from finetune_operator.kubernetes.translate import api_errors as refusal
from finetune_operator.kubernetes.translate.job import is_finished, observe_job
from finetune_operator.kubernetes.workspaces import Workspaces

Object = dict[str, Any]
WARNING_LOOKUP_DELAY = timedelta(seconds=5)
"""After this time without a process, it is asked what the Job's and the pod's events say."""
SERVER_STAGES = frozenset(kind.name for kind in STAGES if kind.runs_server)
UNSTORABLE_STATUS_CODES = frozenset(
    {HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.REQUEST_ENTITY_TOO_LARGE}
)
"""What an API server says of a status that it cannot keep."""
COMPONENT = "finetune-operator"
log = logging.getLogger(__name__)


class KubernetesCluster:
    """Pipelines of an API server; `books` is kept up to date by whoever watches."""

    def __init__(
        self,
        api: KubernetesClient,
        books: ResourceCache,
        pages: ProgressPoller | NoProgress,
        answers: ServerProbe | NoProbe,
    ) -> None:
        self.api, self.cache, self.progress, self.probes = api, books, pages, answers
        self.servers = Servers(api, books, answers)
        self.workspaces = Workspaces(api, books)
        self.rejections: dict[Key, dict[str, Blocker]] = {}

    async def read(self, key: Key) -> Pipeline | None:
        """Give the pipeline as it is now, or None where it is gone or going. Raises Unusable for one beyond us."""
        found = await self.api.get(paths.pipeline(key))
        if found is None or found["metadata"].get("deletionTimestamp"):
            return None
        return parse_pipeline(found)

    async def observe(self, pipeline: Pipeline) -> Observation:
        """Look at what was made for the pipeline, and at its workspace."""
        return replace(await self.observe_children(pipeline), workspace_blocker=await self.workspaces.observe(pipeline))

    async def observe_children(self, pipeline: Pipeline) -> Observation:
        """Look at the Jobs of attempts that have not ended: in the books, and in the API where they say nothing."""
        attempts = ((stage, status.last_attempt) for stage, status in pipeline.status.stages.items())
        names = {last.job: stage for stage, last in attempts if last and last.outcome is Outcome.RUNNING}
        seen = {name: job for name, stage in names.items() if (job := await self._observe_stage(pipeline, stage, name))}
        return Observation(seen, dict(self.rejections.get(pipeline.key, {})), await self.servers.observe(pipeline))

    async def _observe_stage(self, pipeline: Pipeline, stage: str, name: str) -> ObservedJob | None:
        if stage in SERVER_STAGES:
            return await self._observe_server(pipeline, name)
        namespace = pipeline.key.namespace
        job = self.cache.jobs.get((namespace, name)) or await self.api.get(paths.jobs(namespace, name))
        if job and not is_owned_by(pipeline, job):
            raise ClusterError(f"the Job {name} belongs to somebody else: delete it, or rename the pipeline")
        pod = self.cache.pods.get((namespace, name))
        if pod is None and (job is None or is_finished(job)):
            await self._list_pods(namespace, name)
            pod = self.cache.pods.get((namespace, name))
        now = _now()
        warning = await self._warning(namespace, job, pod.name if pod else None, now) if not _started(pod) else ""
        return observe_job(name, job, pod, now, progress=self.progress.latest(pod), warning=warning)

    async def _observe_server(self, pipeline: Pipeline, name: str) -> ObservedJob | None:
        namespace, now = pipeline.key.namespace, _now()
        late = next((pod for pod in self.servers.pods(pipeline, name) if not _started(pod)), None)
        made = self.cache.deployments.get((namespace, name))
        warning = replica_failure(made) or (await self._warning(namespace, made, late.name, now) if late else "")
        return await self.servers.observe_attempt(pipeline, name, warning, now)

    async def _list_pods(self, namespace: str, job: str) -> None:
        async for pod in self.api.list(paths.pods(namespace), labelSelector=f"{JOB_NAME}={job}"):
            self.cache.update_pod(pod)

    async def _warning(self, namespace: str, job: Object | None, pod: str | None, now: datetime) -> str:
        """Give the newest warning about a Job or a pod that is late, for neither says it itself."""
        if (
            job is None
            or is_finished(job)
            or now - datetime.fromisoformat(job["metadata"]["creationTimestamp"]) < WARNING_LOOKUP_DELAY
        ):
            return ""
        name = pod or job["metadata"]["name"]
        selector = f"involvedObject.name={name},type=Warning"
        told = [event async for event in self.api.list(paths.events(namespace), fieldSelector=selector)]
        last = max(told, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""), default={})
        return str(last.get("message") or "")

    async def write_status(self, pipeline: Pipeline, status: PipelineStatus) -> None:
        """Replace the status, where it differs; raise Conflict where the pipeline has changed since the read."""
        if status == pipeline.status:
            return
        try:
            await self._replace_status(pipeline, status)
        except ApiError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                raise Conflict(f"{pipeline.key} is gone") from error
            if error.status not in UNSTORABLE_STATUS_CODES:
                raise
            log.warning("%s: its status was refused and is written without progress: %s", pipeline.key, error)
            await self._replace_status(pipeline, without_progress(status))

    async def _replace_status(self, pipeline: Pipeline, status: PipelineStatus) -> None:
        meta = {
            "name": pipeline.key.name,
            "namespace": pipeline.key.namespace,
            "resourceVersion": pipeline.resource_version,
        }
        said = status.model_dump(mode="json", by_alias=True, exclude_none=True)
        body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": meta, "status": said}
        await self.api.replace(f"{paths.pipeline(pipeline.key)}/status", body)

    async def apply(self, pipeline: Pipeline, actions: Sequence[Action]) -> None:
        """Do all of them, what frees something first; raises the first error when all have been tried.

        What the cluster does not let us do is remembered, so that the status can say so.
        """
        errors: list[ClusterError] = []
        doing = sorted(actions, key=lambda action: isinstance(action, CreateJob))
        for step in (
            partial(self.workspaces.apply_pending_changes, pipeline),
            *(partial(self._execute, pipeline, one) for one in doing),
        ):
            try:
                await step()
            except ClusterError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    async def _execute(self, pipeline: Pipeline, action: Action) -> None:
        match action:
            case CreateJob(template):
                with self._recording_rejection(pipeline.key, template.name):
                    await self._create(pipeline, template)
            case StopJob(name, _):
                if not await self.servers.stop(pipeline, name):
                    await self._delete(pipeline, name)
            case SwitchTraffic(stage, name):
                with self._recording_rejection(pipeline.key, name):
                    await self.servers.switch_traffic(pipeline, stage, name)
            case DeletePipeline():
                self.workspaces.check_retention(pipeline)
                await self.api.delete(paths.pipeline(pipeline.key), uid=pipeline.uid)

    @contextmanager
    def _recording_rejection(self, key: Key, name: str) -> Iterator[None]:
        """Keep what was refused until it is not."""
        try:
            yield
        except refusal.Blocked as refused:
            self._record_rejection(key, name, refused.blocker)
            raise ClusterError(refused.blocker.message) from refused
        except ApiError as error:
            if waiting := refusal.classify_api_error(error):
                self._record_rejection(key, name, waiting)
            raise
        self.rejections.get(key, {}).pop(name, None)

    def _record_rejection(self, key: Key, name: str, waiting: Blocker) -> None:
        """Keep the first words of a reason: some policies never say the same twice, and the status would change."""
        known = self.rejections.setdefault(key, {})
        if name not in known or known[name].reason is not waiting.reason:
            known[name] = waiting

    async def _create(self, pipeline: Pipeline, template: JobTemplate) -> None:
        if template.serving:
            await self.servers.create(pipeline, template, template.serving)
        else:
            async with self.workspaces.locked(pipeline):
                await self._require_previous_job_gone(pipeline, template)
                await self._create_job(pipeline, template)

    async def _require_previous_job_gone(self, pipeline: Pipeline, template: JobTemplate) -> None:
        """Let no two attempts write beside each other, also where a replica that led long ago was late with one."""
        told = pipeline.status.stages.get(template.stage)
        earlier = [attempt.job for attempt in told.attempts if attempt.job != template.name] if told else []
        for name in earlier[-1:]:
            found = await self.api.get(paths.jobs(pipeline.key.namespace, name))
            if found and is_owned_by(pipeline, found) and not is_finished(found):
                await self._delete(pipeline, name)
                raise ClusterError(f"the Job {name} is still there; {template.name} begins when it is gone")

    async def _create_job(self, pipeline: Pipeline, template: JobTemplate) -> None:
        try:
            made = await self.api.create(paths.jobs(pipeline.key.namespace), as_job(pipeline, template))
        except AlreadyExists:
            found = await self.api.get(paths.jobs(pipeline.key.namespace, template.name))
            if found is None or not is_owned_by(pipeline, found):
                raise ClusterError(
                    f"a Job {template.name} that is not this pipeline's is in the way: delete it"
                ) from None
            made = found
        self.cache.update_job(made)

    async def _delete(self, pipeline: Pipeline, name: str) -> None:
        """Delete a Job so that it stays until its pod is gone: SIGTERM, the grace period, SIGKILL."""
        namespace = pipeline.key.namespace
        job = self.cache.jobs.get((namespace, name)) or await self.api.get(paths.jobs(namespace, name))
        if job and is_owned_by(pipeline, job) and not job["metadata"].get("deletionTimestamp"):
            await self.api.delete(paths.jobs(namespace, name), "Foreground", uid=job["metadata"]["uid"])

    async def emit_events(self, pipeline: Pipeline, events: Sequence[Event]) -> None:
        """Tell whoever looks with kubectl; an event is worth no second try."""
        for event in events:
            log.info("%s: %s %s", pipeline.key, event.reason, event.message)
            try:
                await self.api.create(paths.events(pipeline.key.namespace), _event_object(pipeline, event))
            except AlreadyExists:
                continue
            except ClusterError as error:
                log.warning("%s: the event %s was not written: %s", pipeline.key, event.reason, error)

    async def mark_invalid(self, key: Key, why: str) -> None:
        """Say in the status that the object cannot be used as it is; everything else in there stays."""
        found = await self.api.get(paths.pipeline(key))
        if found is None:
            return
        said = truncate_message(why)
        conditions = [
            Condition(
                type=kind,
                status=status,
                reason=Reason.SPEC_INVALID,
                message=said,
                observed_generation=found["metadata"]["generation"],
                last_transition_time=_now(),
            ).model_dump(mode="json", by_alias=True)
            for kind, status in ((READY, "False"), (STALLED, "True"), (FINISHED, "False"))
        ]
        told = (found.get("status") or {}).get("conditions") or []
        if any(one["type"] == STALLED and one["message"] == said for one in told):
            return
        await self.api.patch(f"{paths.pipeline(key)}/status", {"status": {"conditions": conditions}})

    async def close(self) -> None:
        """End what goes on beside the looks."""
        await self.progress.close()
        await self.probes.close()

    def forget(self, key: Key) -> None:
        """Drop what was remembered of a pipeline that is gone."""
        self.cache.forget(key)
        self.rejections.pop(key, None)
        self.workspaces.forget(key)
        pods = {pod.uid for pod in self.cache.all_pods()}
        self.progress.retain(pods)
        self.probes.retain(pods)


def without_progress(status: PipelineStatus) -> PipelineStatus:
    """Leave out the one part that comes as it is from a process that may be somebody else's."""
    stages = {name: stage.model_copy(update={"progress": None}) for name, stage in status.stages.items()}
    return status.model_copy(update={"stages": stages})


def parse_pipeline(found: Object) -> Pipeline:
    """Read the object. Raises Unusable for one beyond us."""
    meta = found["metadata"]
    try:
        return Pipeline(
            key=Key(meta["namespace"], meta["name"]),
            uid=meta["uid"],
            generation=meta["generation"],
            resource_version=meta.get("resourceVersion", ""),  # the answer to a dry run may have none
            annotations=meta.get("annotations") or {},
            spec=PipelineSpec.model_validate(found["spec"]),
            status=PipelineStatus.model_validate(found.get("status") or {}),
        )
    except ValidationError as error:
        raise InvalidObject(refusal.describe_validation_error(error)) from error


def _now() -> datetime:
    return datetime.now(UTC)  # noqa: TID251  an edge


def _started(pod: Any) -> bool:
    return pod is not None and pod.started_at is not None


def _event_object(pipeline: Pipeline, event: Event) -> Object:
    """Write a core/v1 Event whose name follows from what it says, so that it is told once."""
    said = f"{pipeline.uid} {pipeline.resource_version} {event.reason} {event.message}"
    now = _now().isoformat(timespec="seconds").replace("+00:00", "Z")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{pipeline.key.name[:230]}.{hashlib.sha256(said.encode()).hexdigest()[:16]}",
            "namespace": pipeline.key.namespace,
        },
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": pipeline.key.name,
            "namespace": pipeline.key.namespace,
            "uid": pipeline.uid,
        },
        "type": event.type,
        "reason": event.reason,
        "message": event.message[:1024],
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
    }
