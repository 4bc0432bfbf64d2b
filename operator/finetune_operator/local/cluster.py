"""The Cluster protocol on one machine."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from finetune_operator.api.status import Outcome, PipelineStatus
from finetune_operator.core.events import Event
from finetune_operator.core.job_template import JobTemplate
from finetune_operator.core.observation import Observation, ObservedJob
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.core.plan import Action, CreateJob, DeletePipeline, StopJob, SwitchTraffic
from finetune_operator.errors import ClusterError
from finetune_operator.local.digests import SourceDigests
from finetune_operator.local.job_folder import observe_job
from finetune_operator.local.pipeline_file import PipelineFile
from finetune_operator.local.runner import (
    EVICT,
    JOB_FILE,
    KILL,
    LOG,
    PROGRESS,
    STOP,
    TERMINATION,
    record_start_failure,
)
from finetune_trainer.contract import Environment
from finetune_trainer.files import write_durably

POLL_SECONDS = 0.05
RUNNER = (sys.executable, "-P", "-m", "finetune_operator.local.runner")
"""-P: what lies in the folder of the command is not importable, so that no file there takes a library's place."""


@dataclass(frozen=True)
class Folders:
    """What a work folder holds."""

    workdir: Path
    manifest_dir: Path
    claims: Path
    """Links to the folders that stand for claims."""

    @classmethod
    def under(cls, workdir: Path, manifest_dir: Path) -> "Folders":
        """Give the usual places."""
        return cls(workdir, manifest_dir, workdir / "claims")

    def job(self, name: str) -> Path:
        """Give the folder of one attempt."""
        return self.workdir / "jobs" / name

    def workspace(self, pipeline: Pipeline) -> Path:
        """Give the folder that stands for the pipeline's volume."""
        claim = pipeline.spec.workspace.existing_claim
        return self.claims / claim if claim else self.workdir / "volumes" / "workspace"

    def link_claims(self, claims: Mapping[str, Path]) -> None:
        """Let pvc://NAME/… mean these folders, now and in later runs."""
        self.claims.mkdir(parents=True, exist_ok=True)
        for name, folder in claims.items():
            link = self.claims / name
            link.unlink(missing_ok=True)
            link.symlink_to(folder.resolve())


class LocalCluster:
    """Runs one pipeline's Jobs as processes of this machine."""

    def __init__(self, folders: Folders, tell: Callable[[Event], None], *, keep: bool = True) -> None:
        self.folders, self.on_event = folders, tell
        self.pipeline_file = PipelineFile(folders.workdir)
        self.source_digests = SourceDigests(folders.workdir / "contents.json", keep=keep)
        self.runners: dict[str, subprocess.Popen[bytes]] = {}
        self.stopping = False
        """Asked to stop by the person at the keyboard: as if spec.suspend were true, but only for now."""

    async def read(self, key: Key) -> Pipeline | None:
        """Give the folder's pipeline if it is the one."""
        pipeline = self.pipeline_file.read()
        if pipeline is None or pipeline.key != key:
            return None
        return replace(pipeline, spec=pipeline.spec.model_copy(update={"suspend": True})) if self.stopping else pipeline

    async def observe(self, pipeline: Pipeline) -> Observation:
        """Look into the folders of the attempts that have not ended."""
        attempts = (stage.last_attempt for stage in pipeline.status.stages.values())
        names = [attempt.job for attempt in attempts if attempt and attempt.outcome is Outcome.RUNNING]
        jobs = {name: job for name in names if (job := self.job(name))}
        # Beside the loop: to read a big model takes a while, and Ctrl-C is heard by the loop.
        sources, environment = pipeline.spec.source_uris(), self.environment(pipeline)
        return Observation(
            jobs, source_digests=await asyncio.to_thread(self.source_digests.digests, sources, environment)
        )

    def job(self, name: str) -> ObservedJob | None:
        """Give one attempt as it is now."""
        return observe_job(self.folders.job(name))

    async def write_status(self, pipeline: Pipeline, status: PipelineStatus) -> None:
        """Write pipeline.json anew."""
        try:
            self.pipeline_file.write_status(pipeline, status)
        except OSError as error:
            raise ClusterError(f"cannot write {self.pipeline_file.path}: {error}") from error

    async def apply(self, pipeline: Pipeline, actions: Sequence[Action]) -> None:
        """Start and stop runners."""
        for action in actions:
            match action:
                case CreateJob(job):
                    self._start(pipeline, job)
                case StopJob(name, _):
                    self._send_command(name, STOP)
                case DeletePipeline() | SwitchTraffic():
                    pass  # a folder is its owner's to delete; no server outlives its attempt here

    async def emit_events(self, pipeline: Pipeline, events: Sequence[Event]) -> None:
        """Tell the person at the keyboard, and keep it in events.jsonl."""
        if not events:
            return
        for event in events:
            self.on_event(event)
        lines = (json.dumps({"pipeline": str(pipeline.key), **vars(event)}) + "\n" for event in events)
        try:
            with (self.folders.workdir / "events.jsonl").open("a") as file:
                file.writelines(lines)
        except OSError as error:
            raise ClusterError(f"cannot write events.jsonl: {error}") from error

    def evict(self, job: str, why: str) -> None:
        """Take the process's right to run: SIGTERM, the grace period, SIGKILL."""
        self._send_command(job, f"{EVICT} {why}")

    def kill(self, job: str, why: str) -> None:
        """Lose its node: SIGKILL at once."""
        self._send_command(job, f"{KILL} {why}")

    async def wait(self, seconds: float) -> None:
        """Return when a Job has ended, or after this time."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while loop.time() < until:
            over = [name for name, runner in self.runners.items() if runner.poll() is not None]
            for name in over:
                self._record_failed_start(name, self.runners.pop(name).returncode)
            if over:
                return
            await asyncio.sleep(POLL_SECONDS)

    def environment(self, pipeline: Pipeline, job: Path | None = None) -> Environment:
        """Say where a stage's process finds its mounts and side channels."""
        return Environment(
            workspace=self.folders.workspace(pipeline),
            claims=self.folders.claims,
            manifest_dir=self.folders.manifest_dir,
            termination_log=(job or self.folders.workdir) / TERMINATION,
            progress_file=job / PROGRESS if job else None,
        )

    def _start(self, pipeline: Pipeline, job: JobTemplate) -> None:
        """Write the order down and start a runner for it; a second one finds the first one's lock."""
        if job.name in self.runners:
            return
        folder = self.folders.job(job.name)
        environment = self.environment(pipeline, folder)
        program = (sys.executable, *job.command[1:]) if job.command[0] == "python" else job.command
        order = {
            "command": program,
            "env": {"PYTHONUNBUFFERED": "1", **job.env, **environment.variables()},
            "folder": str(self.folders.manifest_dir),
            "graceSeconds": job.grace.total_seconds(),
        }
        try:
            environment.workspace.mkdir(parents=True, exist_ok=True)
            write_durably(folder / JOB_FILE, json.dumps(order, indent=1).encode())
            with (folder / LOG).open("ab") as log:
                self.runners[job.name] = subprocess.Popen(
                    [*RUNNER, str(folder)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            raise ClusterError(f"cannot start {job.name}: {error}") from error

    def _record_failed_start(self, job: str, code: int) -> None:
        """Write down what a runner that died before its process was started cannot; else it would be tried for ever."""
        folder = self.folders.job(job)
        if code and self.job(job) is None:
            words = f"its runner ended with code {code} before anything was started; {folder / LOG} says why"
            with contextlib.suppress(OSError):  # then starting it once more will say what is wrong with the disk
                record_start_failure(folder, words)

    def _send_command(self, job: str, words: str) -> None:
        runner = self.runners.get(job)
        if runner is None or runner.stdin is None:
            return  # of an earlier command: its pipe is closed, so it is being evicted already
        try:
            runner.stdin.write(words.encode() + b"\n")
            runner.stdin.flush()
        except BrokenPipeError:
            return  # it is over
