"""The Cluster protocol on Kubernetes."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from http import HTTPStatus
from weakref import WeakValueDictionary

from finetune_operator.api.conditions import TROUBLESHOOTING_URL
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import AttemptStatus, PipelineStatus
from finetune_operator.core.events import Event, forbidden_event, unreadable_event
from finetune_operator.core.observation import (
    Blocker,
    Observation,
    ObservedJob,
)
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.core.planning.actions import (
    Action,
    ChangeWorkspace,
    CreateJob,
    CreateWorkspace,
    DeleteJob,
    DeletePipeline,
    DeleteService,
    ProbeServer,
    ReplaceLost,
    ScaleServer,
    StopJob,
    SwitchTraffic,
    subject_of,
)
from finetune_operator.core.report import unreadable_status
from finetune_operator.errors import ClusterError, Conflict, InvalidObject, NewerObject
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.cache.cache import (
    PIPELINES,
    ResourceCache,
)
from finetune_operator.kubernetes.cache.store import NamespacedName
from finetune_operator.kubernetes.client import KubernetesClient
from finetune_operator.kubernetes.clock import utc_now
from finetune_operator.kubernetes.event_recorder import EventRecorder, Regarding
from finetune_operator.kubernetes.jobs import Jobs
from finetune_operator.kubernetes.pipeline_object import (
    is_same_report,
    parse_pipeline,
    status_object,
    without_progress,
)
from finetune_operator.kubernetes.pods.probe import NoProbe, ServerProbe
from finetune_operator.kubernetes.pods.progress import NoProgress, ProgressPoller
from finetune_operator.kubernetes.resources.claim import claim_name
from finetune_operator.kubernetes.servers import Servers
from finetune_operator.kubernetes.translate.api_errors import (
    ApiError,
    Blocked,
    classify_api_error,
)
from finetune_operator.kubernetes.translate.attempt_pods import AttemptPods
from finetune_operator.kubernetes.translate.job import is_finished
from finetune_operator.kubernetes.workspaces import Workspaces

SERVER_STAGES = frozenset(kind.name for kind in STAGES if kind.runs_server)
UNSTORABLE_STATUS_CODES = frozenset(
    {
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.UNPROCESSABLE_ENTITY,
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    }
)
"""Status codes with which an API server rejects a pipeline status that it cannot store."""
STOPPING = (StopJob, DeleteService, ProbeServer)
"""Actions that are executed even after another action has failed."""
OPTIONAL = (ChangeWorkspace, SwitchTraffic, ScaleServer)
"""Actions that concern no other action if they are refused."""
log = logging.getLogger(__name__)


class KubernetesCluster:
    """The pipelines of an API server; the informers keep `cache` up to date."""

    def __init__(
        self,
        api: KubernetesClient,
        cache: ResourceCache,
        progress: ProgressPoller | NoProgress,
        probes: ServerProbe | NoProbe,
        on_status_written: Callable[
            [PipelineStatus, PipelineStatus], None
        ] = lambda _before, _after: None,
        *,
        enqueue: Callable[[Key], None] = lambda _key: None,
        notices: str = "",
        troubleshooting_url: str = TROUBLESHOOTING_URL,
    ) -> None:
        self.api = api
        self.cache = cache
        self.progress = progress
        self.probes = probes
        self.on_status_written = on_status_written
        self.enqueue = enqueue
        self.troubleshooting_url = troubleshooting_url
        self.jobs = Jobs(api, cache, progress, notices)
        self.servers = Servers(api, cache, probes)
        self.workspaces = Workspaces(api, cache)
        self.events = EventRecorder(api)
        self._locks: WeakValueDictionary[NamespacedName, asyncio.Lock] = (
            WeakValueDictionary()
        )

    def claim_lock(self, key: Key) -> asyncio.Lock:
        """Return the lock of the claim that the pipeline uses.

        Without it, two pipelines that are reconciled at once would each find that the other has no attempt yet.
        """
        known = self.cache.pipelines.get((key.namespace, key.name))
        # A space cannot be part of a claim's name: an unknown pipeline shares its lock with no claim.
        claim = known.claim if known else f" {key.name}"
        return self._locks.setdefault((key.namespace, claim), asyncio.Lock())

    async def read(self, key: Key) -> Pipeline | None:
        """Return the pipeline; None if it does not exist or is being deleted. Raises InvalidObject."""
        known = self.cache.pipelines.get((key.namespace, key.name))
        if known is None or known.deleting:
            return None
        return known.parsed or parse_pipeline(known.content())

    async def observe(self, pipeline: Pipeline) -> Observation:
        """Return the observed state of the pipeline's children and of its workspace."""
        # First: they may be pods of its own Jobs, or of another user of the claim.
        await self._read_lost_pods(pipeline)
        namespace = self.cache.defaults_of(pipeline.key.namespace)
        return replace(
            await self.observe_children(pipeline),
            workspace=await self.workspaces.observe(pipeline),
            defaults=namespace.defaults,
            defaults_blocker=namespace.blocker,
        )

    async def _read_lost_pods(self, pipeline: Pipeline) -> None:
        """Read the pods of deleted Jobs with its claim: the watch of pods may be behind the watch of Jobs."""
        namespace = pipeline.key.namespace
        claim = claim_name(pipeline)
        jobs = self.cache.lost_jobs(namespace, claim)
        if jobs:
            await self.jobs.read_pods(namespace, *jobs)
            self.cache.forget_lost_jobs(namespace, claim)

    async def observe_children(self, pipeline: Pipeline) -> Observation:
        """Return the observed state of the pipeline's Jobs and servers, from the cache if it has them."""
        jobs: dict[str, ObservedJob] = {}
        for stage, attempt in pipeline.status.running_attempts().items():
            observed = await self._observe_attempt(pipeline, stage, attempt)
            if observed:
                jobs[attempt.job] = observed
        for name in self._other_jobs(pipeline) - jobs.keys():
            observed = self.jobs.observe(pipeline, name)
            if observed:
                jobs[name] = observed
        return Observation(
            jobs,
            await self.servers.observe(pipeline),
            has_service=self.servers.has_service(pipeline),
            service_blocker=self.servers.service_blocker(pipeline),
        )

    def _other_jobs(self, pipeline: Pipeline) -> set[str]:
        """Return the names of all Jobs of the pipeline, and of deleted Jobs with a pod that is still there."""
        namespace = pipeline.key.namespace
        owned = {
            job["metadata"]["name"]
            for job in self.cache.jobs.select("owner", pipeline.uid)
        }
        for stage in pipeline.status.stages.values():
            for attempt in stage.attempts:
                if self.cache.pods.select("job", (namespace, attempt.job)):
                    owned.add(attempt.job)
        return owned

    async def _observe_attempt(
        self, pipeline: Pipeline, stage: str, attempt: AttemptStatus
    ) -> ObservedJob | None:
        name = attempt.job
        namespace = pipeline.key.namespace
        if stage in SERVER_STAGES:
            return await self.servers.observe_attempt(pipeline, name, utc_now())
        # A Job that was seen and is not in the cache was deleted, or has lost the operator's label.
        if attempt.created_at and self.cache.jobs.get((namespace, name)) is None:
            await self.jobs.read(pipeline, name)
        job = self.cache.jobs.get((namespace, name))
        pods = AttemptPods.of(job, self.cache.pods_of(namespace, name))
        # Only a pod has its exit code and its termination message, and its watch may be behind the watch of Jobs.
        has_unread = pods.absent or any(
            pod.exit_code is None and not pod.gone for pod in pods.pods
        )
        has_ended = is_finished(job) if job else attempt.created_at is not None
        if has_unread and has_ended:
            await self.jobs.read_pods(namespace, name)
        return self.jobs.observe(pipeline, name)

    async def write_status(
        self, pipeline: Pipeline, status: PipelineStatus
    ) -> Pipeline:
        """Replace the status and return the pipeline with it. Raises Conflict if another client has changed it."""
        try:
            return await self._replace_status(pipeline, status)
        except Conflict:
            # The cache may be older than the write of the other client.
            await self._refresh(pipeline.key)
            raise
        except ApiError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                raise Conflict(f"{pipeline.key} was deleted") from error
            if error.status not in UNSTORABLE_STATUS_CODES:
                raise
            log.warning(
                "%s: the status was rejected and is written without progress: %s",
                pipeline.key,
                error,
            )
            # Only the progress comes unchanged from a user's process, so it is the likely cause.
            return await self._replace_status(pipeline, without_progress(status))

    async def _replace_status(
        self, pipeline: Pipeline, status: PipelineStatus
    ) -> Pipeline:
        body = status_object(pipeline, status)
        answer = await self.api.replace(f"{paths.pipeline(pipeline.key)}/status", body)
        version = answer["metadata"]["resourceVersion"]
        written = replace(pipeline, status=status, resource_version=version)
        for other in self.cache.note_written(written, answer):
            self.enqueue(other)
        self.on_status_written(pipeline.status, status)
        return written

    async def _refresh(self, key: Key) -> None:
        current = await self.api.get(paths.pipeline(key))
        if current:
            # The watch event of this version is no news any more, so its change is passed on here.
            for changed in self.cache.update(PIPELINES, current).keys:
                self.enqueue(changed)

    async def apply(
        self, pipeline: Pipeline, actions: Sequence[Action]
    ) -> dict[str, Blocker]:
        """Execute the actions in order, and return the refused actions: subject -> reason.

        After an error nothing is created or deleted any more, but the actions that stop something are still executed.
        A refused change of the claim or of the traffic stops no stage. Raises the first error that is no refusal.
        """
        refused: dict[str, Blocker] = {}
        failure: ClusterError | None = None
        optional = {
            subject_of(action) for action in actions if isinstance(action, OPTIONAL)
        }
        for action in actions:
            has_failed = failure is not None or bool(refused.keys() - optional)
            if has_failed and not isinstance(action, STOPPING):
                continue
            try:
                await self._execute(pipeline, action)
            except Blocked as error:
                refused[subject_of(action)] = error.blocker
            except ApiError as error:
                blocker = classify_api_error(error)
                if blocker:
                    refused[subject_of(action)] = blocker
                else:
                    failure = failure or error
            except ClusterError as error:
                failure = failure or error
        if failure:
            raise failure
        return refused

    async def _execute(self, pipeline: Pipeline, action: Action) -> None:  # noqa: C901, PLR0912  one case for each action
        match action:
            case StopJob(name, _):
                if not await self.servers.stop(pipeline, name):
                    await self.jobs.delete(pipeline, name, "Foreground")
            case ReplaceLost(name):
                await self.jobs.replace_lost(pipeline, name)
            case DeleteService():
                await self.servers.delete_service(pipeline)
            case ChangeWorkspace(change):
                await self.workspaces.change(pipeline, change)
            case ProbeServer(name):
                self.servers.probe(pipeline, name)
            case SwitchTraffic(stage, name):
                await self.servers.switch_traffic(pipeline, stage, name)
            case ScaleServer(name, replicas):
                await self.servers.scale(pipeline, name, replicas)
            case CreateWorkspace(storage_class):
                await self.workspaces.create(pipeline, storage_class)
            case CreateJob(template):
                if template.serving:
                    await self.servers.create(pipeline, template, template.serving)
                else:
                    await self.jobs.create(pipeline, template)
            case DeleteJob(name):
                await self.jobs.delete(pipeline, name, "Background")
            # With both preconditions: the pipeline may have been edited, or created anew, since the decision.
            case DeletePipeline():
                await self.api.delete(
                    paths.pipeline(pipeline.key),
                    uid=pipeline.uid,
                    resourceVersion=pipeline.resource_version,
                )

    async def emit_events(self, pipeline: Pipeline, events: Sequence[Event]) -> None:
        """Create Kubernetes Events in the background; a failure is logged and not retried."""
        self.events.record(pipeline, events)

    async def mark_invalid(self, key: Key, error: InvalidObject) -> None:
        """Set phase and conditions of an object that the operator cannot read; the rest of its status stays.

        A finished pipeline keeps its status, unless its spec has changed since. An object that waits for no newer
        operator gets an Event, once for each generation and message.
        """
        current = await self.api.get(paths.pipeline(key))
        if current is None:
            return
        generation = current["metadata"]["generation"]
        before = current.get("status") or {}
        is_newer = isinstance(error, NewerObject)
        # An operator has read this very spec: another CRD has added a default to it, or a rule of this version is new.
        was_read = before.get("observedGeneration") == generation
        if was_read and before.get("finishedAt"):
            return
        status = unreadable_status(
            str(error),
            generation,
            utc_now(),
            self.troubleshooting_url,
            stalled=not is_newer,
        )
        if was_read:
            # The stages describe this spec, so that an operator that can read it goes on with them.
            del status["observedVersion"]
        # Without this check, each reconcile would write the same report with a new time.
        if is_same_report(status, before):
            return
        answer = await self.api.patch(
            f"{paths.pipeline(key)}/status", {"status": status}
        )
        if not is_newer:
            written = answer["metadata"]
            about = Regarding(key, written["uid"], written["resourceVersion"])
            self.events.record(
                about, [unreadable_event(str(error), self.troubleshooting_url)]
            )

    def report_forbidden(self, key: Key, error: ClusterError) -> None:
        """Create an Event about a request for this pipeline that the API server forbids."""
        known = self.cache.pipelines.get((key.namespace, key.name))
        if known:
            # Without a version: each retry would create another Event.
            about = Regarding(key, known.uid, "")
            self.events.record(about, [forbidden_event(str(error))])

    async def close(self) -> None:
        """Cancel the background requests."""
        await self.progress.close()
        await self.probes.close()
