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
from finetune_operator.kubernetes.client import KubernetesClient
from finetune_operator.kubernetes.pods.probe import NoProbe, ServerProbe
from finetune_operator.kubernetes.pods.progress import NoProgress, ProgressPoller
from finetune_operator.kubernetes.resources.job import build_job
from finetune_operator.kubernetes.resources.owner_references import is_owned_by
from finetune_operator.kubernetes.servers import Servers, replica_failure
from finetune_operator.kubernetes.translate.api_errors import (
    AlreadyExists,
    ApiError,
    Blocked,
    classify_api_error,
    describe_validation_error,
)
from finetune_operator.kubernetes.translate.job import is_finished, observe_job
from finetune_operator.kubernetes.workspaces import Workspaces

Object = dict[str, Any]
WARNING_LOOKUP_DELAY = timedelta(seconds=5)
"""Time without a process after which the Warning events of the Job and its pod are read."""
SERVER_STAGES = frozenset(kind.name for kind in STAGES if kind.runs_server)
UNSTORABLE_STATUS_CODES = frozenset(
    {HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.REQUEST_ENTITY_TOO_LARGE}
)
"""Statuses with which an API server rejects a pipeline status that it cannot store."""
COMPONENT = "finetune-operator"
log = logging.getLogger(__name__)


class KubernetesCluster:
    """The pipelines of an API server; the informers keep `cache` up to date."""

    def __init__(
        self,
        api: KubernetesClient,
        cache: ResourceCache,
        progress: ProgressPoller | NoProgress,
        probes: ServerProbe | NoProbe,
    ) -> None:
        self.api, self.cache, self.progress, self.probes = api, cache, progress, probes
        self.servers = Servers(api, cache, probes)
        self.workspaces = Workspaces(api, cache)
        self.rejections: dict[Key, dict[str, Blocker]] = {}
        """Pipeline -> attempt's name -> why it could not be created or get the requests."""

    async def read(self, key: Key) -> Pipeline | None:
        """Return the pipeline; None where it does not exist or is being deleted. Raises InvalidObject."""
        found = await self.api.get(paths.pipeline(key))
        if found is None or found["metadata"].get("deletionTimestamp"):
            return None
        return parse_pipeline(found)

    async def observe(self, pipeline: Pipeline) -> Observation:
        """Return the observed state of the pipeline's children and of its workspace."""
        return replace(await self.observe_children(pipeline), workspace_blocker=await self.workspaces.observe(pipeline))

    async def observe_children(self, pipeline: Pipeline) -> Observation:
        """Return the observed state of running attempts and servers: from the cache, else from the API server."""
        attempts = ((stage, status.last_attempt) for stage, status in pipeline.status.stages.items())
        names = {last.job: stage for stage, last in attempts if last and last.outcome is Outcome.RUNNING}
        jobs = {name: job for name, stage in names.items() if (job := await self._observe_stage(pipeline, stage, name))}
        return Observation(jobs, dict(self.rejections.get(pipeline.key, {})), await self.servers.observe(pipeline))

    async def _observe_stage(self, pipeline: Pipeline, stage: str, name: str) -> ObservedJob | None:
        if stage in SERVER_STAGES:
            return await self._observe_server(pipeline, name)
        namespace = pipeline.key.namespace
        job = self.cache.jobs.get((namespace, name)) or await self.api.get(paths.jobs(namespace, name))
        if job and not is_owned_by(pipeline, job):
            raise ClusterError(f"the Job {name} is not owned by this pipeline: delete it, or rename the pipeline")
        pod = self.cache.pods.get((namespace, name))
        # Only the pod has the exit code and the termination message, and the cache may have missed it.
        if pod is None and (job is None or is_finished(job)):
            await self._list_pods(namespace, name)
            pod = self.cache.pods.get((namespace, name))
        now = _now()
        warning = await self._warning(namespace, job, pod.name if pod else None, now) if not _started(pod) else ""
        return observe_job(name, job, pod, now, progress=self.progress.latest(pod), warning=warning)

    async def _observe_server(self, pipeline: Pipeline, name: str) -> ObservedJob | None:
        namespace, now = pipeline.key.namespace, _now()
        pending = next((pod for pod in self.servers.pods(pipeline, name) if not _started(pod)), None)
        found = self.cache.deployments.get((namespace, name))
        warning = replica_failure(found) or (
            await self._warning(namespace, found, pending.name, now) if pending else ""
        )
        return await self.servers.observe_attempt(pipeline, name, warning, now)

    async def _list_pods(self, namespace: str, job: str) -> None:
        async for pod in self.api.list(paths.pods(namespace), labelSelector=f"{JOB_NAME}={job}"):
            self.cache.update_pod(pod)

    async def _warning(self, namespace: str, owner: Object | None, pod: str | None, now: datetime) -> str:
        """Return the newest Warning event of a pod that has not started, or of its owner if there is no pod.

        The status of neither has the reason.
        """
        if (
            owner is None
            or is_finished(owner)
            or now - datetime.fromisoformat(owner["metadata"]["creationTimestamp"]) < WARNING_LOOKUP_DELAY
        ):
            return ""
        name = pod or owner["metadata"]["name"]
        selector = f"involvedObject.name={name},type=Warning"
        events = [event async for event in self.api.list(paths.events(namespace), fieldSelector=selector)]
        last = max(
            events, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""), default={}
        )
        return str(last.get("message") or "")

    async def write_status(self, pipeline: Pipeline, status: PipelineStatus) -> None:
        """Replace the status if it differs. Raises Conflict where the pipeline has changed since it was read."""
        if status == pipeline.status:
            return
        try:
            await self._replace_status(pipeline, status)
        except ApiError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                raise Conflict(f"{pipeline.key} was deleted") from error
            if error.status not in UNSTORABLE_STATUS_CODES:
                raise
            log.warning("%s: the status was rejected and is written without progress: %s", pipeline.key, error)
            await self._replace_status(pipeline, without_progress(status))

    async def _replace_status(self, pipeline: Pipeline, status: PipelineStatus) -> None:
        meta = {
            "name": pipeline.key.name,
            "namespace": pipeline.key.namespace,
            "resourceVersion": pipeline.resource_version,
        }
        content = status.model_dump(mode="json", by_alias=True, exclude_none=True)
        body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": meta, "status": content}
        await self.api.replace(f"{paths.pipeline(pipeline.key)}/status", body)

    async def apply(self, pipeline: Pipeline, actions: Sequence[Action]) -> None:
        """Execute all actions, those that free resources first; raise the first error after all have been tried.

        Rejections of the API server are recorded, so that the status can report them.
        """
        errors: list[ClusterError] = []
        ordered = sorted(actions, key=lambda action: isinstance(action, CreateJob))
        for step in (
            partial(self.workspaces.apply_pending_changes, pipeline),
            *(partial(self._execute, pipeline, action) for action in ordered),
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
        """Record a rejection of the body for this attempt, and drop the record once the body succeeds."""
        try:
            yield
        except Blocked as error:
            self._record_rejection(key, name, error.blocker)
            raise ClusterError(error.blocker.message) from error
        except ApiError as error:
            if blocker := classify_api_error(error):
                self._record_rejection(key, name, blocker)
            raise
        self.rejections.get(key, {}).pop(name, None)

    def _record_rejection(self, key: Key, name: str, blocker: Blocker) -> None:
        """Keep the first message of a reason: some policies word each rejection anew, which would change the status."""
        known = self.rejections.setdefault(key, {})
        if name not in known or known[name].reason is not blocker.reason:
            known[name] = blocker

    async def _create(self, pipeline: Pipeline, template: JobTemplate) -> None:
        if template.serving:
            await self.servers.create(pipeline, template, template.serving)
        else:
            async with self.workspaces.locked(pipeline):
                await self._require_previous_job_gone(pipeline, template)
                await self._create_job(pipeline, template)

    async def _require_previous_job_gone(self, pipeline: Pipeline, template: JobTemplate) -> None:
        """Raise ClusterError while the previous attempt's Job has not finished: two writers could corrupt the volume.

        The status may record that attempt as ended although a late request of an earlier leader created its Job.
        """
        stage = pipeline.status.stages.get(template.stage)
        earlier = [attempt.job for attempt in stage.attempts if attempt.job != template.name] if stage else []
        for name in earlier[-1:]:
            found = await self.api.get(paths.jobs(pipeline.key.namespace, name))
            if found and is_owned_by(pipeline, found) and not is_finished(found):
                await self._delete(pipeline, name)
                raise ClusterError(f"the Job {name} still exists; {template.name} is created once it is gone")

    async def _create_job(self, pipeline: Pipeline, template: JobTemplate) -> None:
        try:
            created = await self.api.create(paths.jobs(pipeline.key.namespace), build_job(pipeline, template))
        except AlreadyExists:
            found = await self.api.get(paths.jobs(pipeline.key.namespace, template.name))
            if found is None or not is_owned_by(pipeline, found):
                raise ClusterError(
                    f"the Job {template.name} exists and is not owned by this pipeline: delete it"
                ) from None
            created = found
        self.cache.update_job(created)

    async def _delete(self, pipeline: Pipeline, name: str) -> None:
        """Delete a Job in the foreground: it exists until its pod has ended by SIGTERM, grace period and SIGKILL."""
        namespace = pipeline.key.namespace
        job = self.cache.jobs.get((namespace, name)) or await self.api.get(paths.jobs(namespace, name))
        if job and is_owned_by(pipeline, job) and not job["metadata"].get("deletionTimestamp"):
            await self.api.delete(paths.jobs(namespace, name), "Foreground", uid=job["metadata"]["uid"])

    async def emit_events(self, pipeline: Pipeline, events: Sequence[Event]) -> None:
        """Create Kubernetes events for users of kubectl; a failure is logged and not retried."""
        for event in events:
            log.info("%s: %s %s", pipeline.key, event.reason, event.message)
            try:
                await self.api.create(paths.events(pipeline.key.namespace), _event_object(pipeline, event))
            except AlreadyExists:
                continue
            except ClusterError as error:
                log.warning("%s: cannot create the event %s: %s", pipeline.key, event.reason, error)

    async def mark_invalid(self, key: Key, why: str) -> None:
        """Set the conditions of an object that the operator cannot read; the rest of its status stays."""
        found = await self.api.get(paths.pipeline(key))
        if found is None:
            return
        message = truncate_message(why)
        conditions = [
            Condition(
                type=kind,
                status=status,
                reason=Reason.SPEC_INVALID,
                message=message,
                observed_generation=found["metadata"]["generation"],
                last_transition_time=_now(),
            ).model_dump(mode="json", by_alias=True)
            for kind, status in ((READY, "False"), (STALLED, "True"), (FINISHED, "False"))
        ]
        current = (found.get("status") or {}).get("conditions") or []
        if any(one["type"] == STALLED and one["message"] == message for one in current):
            return
        await self.api.patch(f"{paths.pipeline(key)}/status", {"status": {"conditions": conditions}})

    async def close(self) -> None:
        """Cancel the background requests."""
        await self.progress.close()
        await self.probes.close()

    def forget(self, key: Key) -> None:
        """Drop the state of a pipeline that no longer exists."""
        self.cache.forget(key)
        self.rejections.pop(key, None)
        self.workspaces.forget(key)
        pods = {pod.uid for pod in self.cache.all_pods()}
        self.progress.retain(pods)
        self.probes.retain(pods)


def without_progress(status: PipelineStatus) -> PipelineStatus:
    """Return the status without progress, the only part taken unchanged from a process, which may be the user's own."""
    stages = {name: stage.model_copy(update={"progress": None}) for name, stage in status.stages.items()}
    return status.model_copy(update={"stages": stages})


def parse_pipeline(found: Object) -> Pipeline:
    """Parse the object. Raises InvalidObject for one that this version of the operator cannot read."""
    meta = found["metadata"]
    try:
        return Pipeline(
            key=Key(meta["namespace"], meta["name"]),
            uid=meta["uid"],
            generation=meta["generation"],
            resource_version=meta.get("resourceVersion", ""),  # the response to a dry run may have none
            annotations=meta.get("annotations") or {},
            spec=PipelineSpec.model_validate(found["spec"]),
            status=PipelineStatus.model_validate(found.get("status") or {}),
        )
    except ValidationError as error:
        raise InvalidObject(describe_validation_error(error)) from error


def _now() -> datetime:
    return datetime.now(UTC)  # noqa: TID251  an edge


def _started(pod: Any) -> bool:
    return pod is not None and pod.started_at is not None


def _event_object(pipeline: Pipeline, event: Event) -> Object:
    """Build a core/v1 Event named by a hash of its content, so that it is created once."""
    content = f"{pipeline.uid} {pipeline.resource_version} {event.reason} {event.message}"
    now = _now().isoformat(timespec="seconds").replace("+00:00", "Z")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{pipeline.key.name[:230]}.{hashlib.sha256(content.encode()).hexdigest()[:16]}",
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
