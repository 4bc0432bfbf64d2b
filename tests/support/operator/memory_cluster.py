"""An in-memory Cluster for tests: pipelines are stored as JSON, and Jobs change only when a test changes them.

It checks the operator's invariants: two live Jobs with one claim, or one name for two different Jobs, raise
InvariantViolation. `inject_fault` is called before and after every request of `reconcile`, with the name of that
moment, and may raise any error to simulate a fault there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any

from support.operator.memory_objects import (
    InvariantViolation,
    MemoryJob,
    StoredPipeline,
)

from finetune_operator.api.defaults import NO_DEFAULTS, Defaults
from finetune_operator.api.spec import PipelineSpec
from finetune_operator.api.status import PipelineStatus
from finetune_operator.core.events import Event
from finetune_operator.core.job_template import JobTemplate
from finetune_operator.core.metadata import workspace_name
from finetune_operator.core.observation import (
    Blocker,
    ClaimUser,
    JobState,
    Observation,
    ObservedJob,
    ObservedServer,
    ObservedWorkspace,
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
from finetune_operator.core.workspace import WORKSPACE, WRITING_STAGES
from finetune_operator.errors import Conflict
from finetune_trainer.contract import (
    AnyResult,
    DeployResult,
    ExitCode,
    Failure,
    Interruption,
    Progress,
    TerminationMessage,
)


class MemoryCluster:
    """The Cluster protocol in memory. `now` is the time that is recorded when a Job changes."""

    def __init__(self, now: datetime) -> None:
        self.now = now
        self.pipelines: dict[Key, StoredPipeline] = {}
        self.jobs: dict[str, MemoryJob] = {}
        self.servers: dict[str, ObservedServer] = {}
        self.claims: dict[str, str | None] = {}
        """Claim -> the storage class with which it was created."""
        self.refusals: dict[str, Blocker] = {}
        """Subject -> why the request is refused, set by a test."""
        self.source_digests: dict[str, str] = {}
        self.keeps_images = True
        self.defaults: Defaults = NO_DEFAULTS
        self.defaults_blocker: Blocker | None = None
        """Why the defaults of the namespace cannot be used, set by a test."""
        self.emitted: list[tuple[Key, Event]] = []
        self.applied: list[str] = []
        """Changes made by reconciling, in order. An action that had no effect is not recorded."""
        self.inject_fault: Callable[[str], None] = lambda _moment: None

    # Requests of the user.

    def submit(self, key: Key, spec: PipelineSpec, uid: str) -> None:
        """Create a pipeline."""
        self.pipelines[key] = StoredPipeline(uid, _json(spec))

    def delete(self, key: Key) -> None:
        """Delete the pipeline, and ask its Jobs to stop: their pods have a grace period."""
        uid = self.pipelines.pop(key).uid
        for name, job in self.jobs.items():
            if job.owner == uid:
                self._ask_to_stop(name)

    def edit(self, key: Key, spec: PipelineSpec) -> None:
        """Replace the spec; the generation increases if the spec differs."""
        stored = self.pipelines[key]
        text = _json(spec)
        if text != stored.spec:
            stored.spec = text
            stored.generation += 1
            stored.version += 1

    def annotate(self, key: Key, annotation: str, value: str) -> None:
        """Set one annotation."""
        stored = self.pipelines[key]
        stored.annotations[annotation] = value
        stored.version += 1

    # The Cluster protocol, for reconciling.

    async def read(self, key: Key) -> Pipeline | None:
        """Return the current pipeline, or None if it does not exist."""
        with self._fault_point("read"):
            stored = self.pipelines.get(key)
            return _pipeline(key, stored) if stored else None

    async def observe(self, pipeline: Pipeline) -> Observation:
        """Return all Jobs and servers of the pipeline."""
        with self._fault_point("observe"):
            jobs = {
                name: job.observed
                for name, job in self.jobs.items()
                if job.owner == pipeline.uid
            }
            servers = {
                name: server
                for name, server in self.servers.items()
                if self.jobs[name].owner == pipeline.uid
            }
            return Observation(
                jobs,
                source_digests=dict(self.source_digests),
                keeps_images=self.keeps_images,
                servers=servers,
                has_service=any(server.current for server in servers.values()),
                workspace=self._observe_workspace(pipeline),
                defaults=self.defaults,
                defaults_blocker=self.defaults_blocker,
            )

    def _observe_workspace(self, pipeline: Pipeline) -> ObservedWorkspace:
        claim = claim_of(pipeline.key, pipeline.spec)
        sharing = {}
        for key, stored in self.pipelines.items():
            spec = stored.parsed_spec()
            if stored.uid != pipeline.uid and claim_of(key, spec) == claim:
                sharing[stored.uid] = _claim_user(key, stored)
        for job in self.jobs.values():
            writes = job.live and not job.template.serving
            if writes and job.claim == claim and job.owner != pipeline.uid:
                # A deleted pipeline leaves its Job behind until the process has ended.
                user = sharing.get(job.owner) or ClaimUser(job.owner, writing=True)
                sharing[job.owner] = replace(user, writing=True)
        return ObservedWorkspace(
            missing=claim not in self.claims
            and not pipeline.spec.workspace.existing_claim,
            seniority=("", pipeline.uid),
            users=tuple(sharing.values()),
        )

    async def write_status(
        self, pipeline: Pipeline, status: PipelineStatus
    ) -> Pipeline:
        """Store the status if it differs; raise Conflict if the pipeline has changed since it was read."""
        with self._fault_point("write_status"):
            stored = self.pipelines.get(pipeline.key)
            text = _json(status)
            if stored is None or pipeline.resource_version != str(stored.version):
                raise Conflict(f"{pipeline.key} has changed since it was read")
            if text != stored.status:
                stored.status = text
                stored.version += 1
            return replace(
                pipeline, status=status, resource_version=str(stored.version)
            )

    async def apply(
        self, pipeline: Pipeline, actions: Sequence[Action]
    ) -> Mapping[str, Blocker]:
        """Execute the actions, except the actions that a test refuses."""
        refused: dict[str, Blocker] = {}
        for action in actions:
            if WORKSPACE in refused and isinstance(action, CreateJob):
                continue
            with self._fault_point("apply"):
                refusal = self.refusals.get(subject_of(action))
                if refusal:
                    refused[subject_of(action)] = refusal
                else:
                    self._execute(pipeline, action)
        return refused

    def _execute(self, pipeline: Pipeline, action: Action) -> None:  # noqa: C901  one case for each action
        match action:
            case CreateJob(template):
                self._create(pipeline, template)
            case CreateWorkspace(storage_class):
                named = pipeline.spec.workspace.storage_class_name
                self.claims[claim_of(pipeline.key, pipeline.spec)] = (
                    named or storage_class
                )
            case StopJob(name, _):
                self._ask_to_stop(name)
            case ReplaceLost(name):
                self.applied.append(f"replace {name}")
                self._end(name, JobState.FAILED, disruption="DeletionByTaintManager")
            case DeleteJob(name):
                self._delete_ended(name)
            case SwitchTraffic(stage, name):
                self._switch_traffic(stage, name)
            case ScaleServer(name, replicas):
                self.applied.append(f"scale {name} to {replicas}")
                server = self.servers[name]
                self.servers[name] = replace(server, replicas=replicas, pods=replicas)
            case DeleteService():
                self.servers = {
                    name: replace(server, current=False)
                    for name, server in self.servers.items()
                }
                self.applied.append("delete the Service")
            case DeletePipeline():
                self.pipelines.pop(pipeline.key, None)
            case ProbeServer() | ChangeWorkspace():
                pass  # a test changes the server's Job; claims have no properties

    async def emit_events(self, pipeline: Pipeline, events: Sequence[Event]) -> None:
        """Store the events."""
        with self._fault_point("emit_events"):
            self.emitted.extend((pipeline.key, event) for event in events)

    def _create(self, pipeline: Pipeline, template: JobTemplate) -> None:
        existing = self.jobs.get(template.name)
        if existing:
            owned = existing.owner == pipeline.uid
            if not owned or existing.template.identity != template.identity:
                raise InvariantViolation(f"{template.name} is the name of another Job")
            return
        claim = claim_of(pipeline.key, pipeline.spec)
        for name, job in self.jobs.items():
            if (
                job.live
                and job.claim == claim
                and not (template.serving or job.template.serving)
            ):
                raise InvariantViolation(
                    f"{template.name} would write to {claim} at the same time as {name}"
                )
        limit = template.pod.resources.limits.get("memory", "")
        observed = ObservedJob(
            template.name, JobState.WAITING, memory_limit=limit, stage=template.stage
        )
        self.jobs[template.name] = MemoryJob(pipeline.uid, claim, template, observed)
        self.applied.append(f"create {template.name}")

    def _ask_to_stop(self, name: str) -> None:
        job = self.jobs.get(name)
        if job and job.live and not job.asked_to_stop:
            job.asked_to_stop = True
            self.applied.append(f"stop {name}")
        if self.servers.pop(name, None):
            self.applied.append(f"stop the server of {name}")

    def _delete_ended(self, name: str) -> None:
        job = self.jobs.get(name)
        if job is None:
            return
        if job.live:
            raise InvariantViolation(f"{name} is deleted although it has not ended")
        if name not in self.servers:
            del self.jobs[name]
            self.applied.append(f"delete {name}")

    def _switch_traffic(self, stage: str, name: str) -> None:
        for job, server in self.servers.items():
            if server.stage == stage:
                self.servers[job] = replace(server, current=job == name)
        self.applied.append(f"route to {name}")

    @contextmanager
    def _fault_point(self, name: str) -> Iterator[None]:
        self.inject_fault(f"before {name}")
        yield
        self.inject_fault(f"after {name}")

    # Changes of Jobs, made by a test.

    def start(self, name: str) -> None:
        """Start the process of a Job."""
        is_server = bool(self.jobs[name].template.serving)
        facts = {"started_at": self.now, "blocker": None, "unready": is_server}
        self.update_job(name, state=JobState.RUNNING, **facts)

    def progress(self, name: str, step: int, **fields: Any) -> None:
        """Report progress of the running process."""
        stage = self.jobs[name].template.stage
        progress = Progress(stage=stage, updated_at=self.now, step=step, **fields)
        self.update_job(name, progress=progress)

    def complete(self, name: str, result: AnyResult | None) -> None:
        """End the process with exit code 0. Without a result, the pod was deleted before its result was read."""
        message = TerminationMessage(result=result) if result else None
        if isinstance(result, DeployResult) and result.long_running:
            self.servers[name] = ObservedServer(
                self.jobs[name].template.stage,
                current=False,
                replicas=1,
                pods=1,
            )
        self._end(
            name, JobState.COMPLETE, exit_code=0 if result else None, message=message
        )

    def fail(
        self, name: str, exit_code: int | None, message: str = "", **evidence: Any
    ) -> None:
        """Fail the Job, optionally with evidence such as `disruption` or `out_of_memory`."""
        failure = (
            TerminationMessage(failure=Failure(message=message)) if message else None
        )
        self._end(
            name, JobState.FAILED, exit_code=exit_code, message=failure, **evidence
        )

    def evict(
        self,
        name: str,
        step: int | None = None,
        saved: int | None = None,
        disruption: str | None = "evicted",
    ) -> None:
        """Stop the process with SIGTERM: it saves a checkpoint and reports its step.

        `disruption` is the evidence. With None, only the exit code shows the interruption.
        """
        message = TerminationMessage(
            interruption=Interruption(step=step, saved_step=saved)
        )
        self._end(
            name,
            JobState.FAILED,
            exit_code=ExitCode.INTERRUPTED,
            message=message,
            disruption=disruption,
        )

    def delete_job(self, name: str) -> None:
        """Delete the Job object with its observed state."""
        del self.jobs[name]

    def _end(self, name: str, state: JobState, **facts: Any) -> None:
        self.update_job(name, state=state, finished_at=self.now, **facts)

    def update_job(self, name: str, **facts: Any) -> None:
        """Change the observed state of a live Job; raise ValueError if the Job has ended."""
        job = self.jobs[name]
        if not job.live:
            raise ValueError(f"{name} has ended and cannot change any more")
        job.observed = replace(job.observed, **facts)


def _pipeline(key: Key, stored: StoredPipeline) -> Pipeline:
    return Pipeline(
        key,
        stored.uid,
        stored.generation,
        stored.parsed_spec(),
        PipelineStatus.model_validate_json(stored.status),
        str(stored.version),
        dict(stored.annotations),
    )


def claim_of(key: Key, spec: PipelineSpec) -> str:
    """Return the name of a pipeline's claim."""
    return (
        f"{key.namespace}/{spec.workspace.existing_claim or workspace_name(key.name)}"
    )


def _claim_user(key: Key, stored: StoredPipeline) -> ClaimUser:
    status = PipelineStatus.model_validate_json(stored.status)
    suspended = stored.parsed_spec().suspend
    recorded = not WRITING_STAGES.isdisjoint(status.running_attempts())
    return ClaimUser(
        key.name,
        writing=False,
        recorded=recorded,
        finished=bool(status.finished_at) or suspended,
        seniority=("", stored.uid),
    )


def _json(model: PipelineSpec | PipelineStatus) -> str:
    return model.model_dump_json(by_alias=True, exclude_none=True)
