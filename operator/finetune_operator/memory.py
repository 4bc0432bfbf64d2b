"""A cluster that is only told: pipelines as JSON, Jobs that move when someone moves them.

It is strict where a real cluster is merely confused: a second live Job of a stage, or one name for two
different Jobs, raises PromiseBroken. `fault` is called before and after everything that `reconcile` asks for,
with a name for that moment, and may raise whatever should happen there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from finetune_operator.api.spec import PipelineSpec
from finetune_operator.api.status import PipelineStatus
from finetune_operator.core.events import Event
from finetune_operator.core.job_template import JobTemplate
from finetune_operator.core.observation import JobSeen, JobState, Observed, Server
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.core.plan import Action, CreateJob, Expire, Route, StopJob
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

LIVE = frozenset({JobState.WAITING, JobState.RUNNING})


class PromiseBroken(AssertionError):
    """The operator did what it promised never to do."""


@dataclass
class Stored:
    """A pipeline as an API server keeps it: text, and nothing that is null."""

    uid: str
    spec: str
    status: str = "{}"
    generation: int = 1
    version: int = 1
    annotations: dict[str, str] = field(default_factory=dict)


@dataclass
class MemoryJob:
    """A Job, what can be seen of it, and whether it was asked to stop."""

    owner: str
    template: JobTemplate
    seen: JobSeen
    asked_to_stop: bool = False

    @property
    def live(self) -> bool:
        """Whether it may still have a process."""
        return self.seen.state in LIVE


class MemoryCluster:
    """The Cluster protocol in memory. `now` is the time at which things happen to Jobs."""

    def __init__(self, now: datetime) -> None:
        self.now = now
        self.pipelines: dict[Key, Stored] = {}
        self.jobs: dict[str, MemoryJob] = {}
        self.servers: dict[str, Server] = {}
        self.contents: dict[str, str] = {}
        self.announced: list[tuple[Key, Event]] = []
        self.deeds: list[str] = []
        """What reconciling has changed, in order; what was done already is not done again and not in here."""
        self.fault: Callable[[str], None] = lambda _moment: None

    # What people do.

    def submit(self, key: Key, spec: PipelineSpec, uid: str) -> None:
        """Create a pipeline."""
        self.pipelines[key] = Stored(uid, _json(spec))

    def edit(self, key: Key, spec: PipelineSpec) -> None:
        """Change what is asked; the generation is raised if that differs."""
        stored, text = self.pipelines[key], _json(spec)
        if text != stored.spec:
            stored.spec, stored.generation, stored.version = text, stored.generation + 1, stored.version + 1

    def annotate(self, key: Key, annotation: str, value: str) -> None:
        """Set one annotation."""
        stored = self.pipelines[key]
        stored.annotations[annotation] = value
        stored.version += 1

    # What reconciling does.

    async def read(self, key: Key) -> Pipeline | None:
        """Give the pipeline as it is now, or None where it is gone."""
        with self._moment("read"):
            stored = self.pipelines.get(key)
            return _pipeline(key, stored) if stored else None

    async def observe(self, pipeline: Pipeline) -> Observed:
        """Give all Jobs of the pipeline."""
        with self._moment("observe"):
            jobs = {name: job.seen for name, job in self.jobs.items() if job.owner == pipeline.uid}
            servers = {name: server for name, server in self.servers.items() if name in jobs}
            return Observed(jobs, contents=dict(self.contents), servers=servers)

    async def write_status(self, pipeline: Pipeline, status: PipelineStatus) -> None:
        """Keep the status, where it differs; raise Conflict where the pipeline has changed since the read."""
        with self._moment("write_status"):
            stored, text = self.pipelines.get(pipeline.key), _json(status)
            if stored is None or pipeline.resource_version != str(stored.version):
                raise Conflict(f"{pipeline.key} has changed since it was read")
            if text != stored.status:
                stored.status, stored.version = text, stored.version + 1

    async def apply(self, pipeline: Pipeline, actions: Sequence[Action]) -> None:
        """Make Jobs and ask Jobs to stop."""
        for action in actions:
            with self._moment("apply"):
                match action:
                    case CreateJob(template):
                        self._create(pipeline, template)
                    case StopJob(name, _):
                        self._ask_to_stop(name)
                    case Route(stage, name):
                        self._route(stage, name)
                    case Expire():
                        self.pipelines.pop(pipeline.key, None)

    async def announce(self, pipeline: Pipeline, events: Sequence[Event]) -> None:
        """Keep what was said."""
        with self._moment("announce"):
            self.announced.extend((pipeline.key, event) for event in events)

    def _create(self, pipeline: Pipeline, template: JobTemplate) -> None:
        there = self.jobs.get(template.name)
        if there and (there.owner, there.template.identity) != (pipeline.uid, template.identity):
            raise PromiseBroken(f"{template.name} is the name of another Job")
        if there:
            return
        for name, job in self.jobs.items():
            if job.live and (job.owner, job.template.stage) == (pipeline.uid, template.stage):
                raise PromiseBroken(f"{template.name} would run beside {name}")
        self.jobs[template.name] = MemoryJob(pipeline.uid, template, JobSeen(template.name, JobState.WAITING))
        self.deeds.append(f"create {template.name}")

    def _ask_to_stop(self, name: str) -> None:
        job = self.jobs.get(name)
        if job and job.live and not job.asked_to_stop:
            job.asked_to_stop = True
            self.deeds.append(f"stop {name}")
        if self.servers.pop(name, None):
            self.deeds.append(f"stop the server of {name}")

    def _route(self, stage: str, name: str) -> None:
        for job, server in self.servers.items():
            if server.stage == stage:
                self.servers[job] = replace(server, current=job == name)
        self.deeds.append(f"route to {name}")

    @contextmanager
    def _moment(self, name: str) -> Iterator[None]:
        self.fault(f"before {name}")
        yield
        self.fault(f"after {name}")

    # What happens to Jobs.

    def start(self, name: str) -> None:
        """Start its process."""
        self.see(name, state=JobState.RUNNING, started_at=self.now, waiting=None)

    def progress(self, name: str, step: int, **known: Any) -> None:
        """Let its process say where it is."""
        stage = self.jobs[name].template.stage
        self.see(name, progress=Progress(stage=stage, updated_at=self.now, step=step, **known))

    def complete(self, name: str, result: AnyResult | None) -> None:
        """End its process with 0; without a result it is as if nobody had seen its pod since."""
        message = TerminationMessage(result=result) if result else None
        if isinstance(result, DeployResult) and result.lasting:
            self.servers[name] = Server(self.jobs[name].template.stage, current=False)
        self._end(name, JobState.COMPLETE, exit_code=0 if result else None, message=message)

    def fail(self, name: str, exit_code: int | None, words: str = "", **evidence: Any) -> None:
        """End its process badly: by its own fault, or as the evidence has it."""
        message = TerminationMessage(failure=Failure(message=words)) if words else None
        self._end(name, JobState.FAILED, exit_code=exit_code, message=message, **evidence)

    def evict(self, name: str, step: int | None = None, saved: int | None = None, why: str | None = "evicted") -> None:
        """Ask its process to stop: it saves and says where. Without evidence, only its exit code tells of it."""
        message = TerminationMessage(interruption=Interruption(step=step, saved_step=saved))
        self._end(name, JobState.FAILED, exit_code=ExitCode.INTERRUPTED, message=message, disruption=why)

    def vanish(self, name: str) -> None:
        """Delete the Job object and all that could be seen of it."""
        del self.jobs[name]

    def _end(self, name: str, state: JobState, **facts: Any) -> None:
        self.see(name, state=state, finished_at=self.now, **facts)

    def see(self, name: str, **facts: Any) -> None:
        """Change what can be seen of a Job that is not over."""
        job = self.jobs[name]
        if not job.live:
            raise ValueError(f"{name} is over: nothing happens to it any more")
        job.seen = replace(job.seen, **facts)


def _pipeline(key: Key, stored: Stored) -> Pipeline:
    spec, status = PipelineSpec.model_validate_json(stored.spec), PipelineStatus.model_validate_json(stored.status)
    version, annotations = str(stored.version), dict(stored.annotations)
    return Pipeline(key, stored.uid, stored.generation, spec, status, version, annotations)


def _json(model: PipelineSpec | PipelineStatus) -> str:
    return model.model_dump_json(by_alias=True, exclude_none=True)
