"""The Cluster protocol on one machine."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from finetune_operator.api.status import Outcome, PipelineStatus
from finetune_operator.core.events import Event
from finetune_operator.core.job_template import TRAINER, JobTemplate
from finetune_operator.core.observation import Blocker, Observation, ObservedJob
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
)
from finetune_operator.errors import ClusterError
from finetune_operator.local.digests import SourceDigests
from finetune_operator.local.history import has_measured, keep, loses_results
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
from finetune_trainer.result_folders import Unused, names_in, stages_of

POLL_SECONDS = 0.05
"""Between two checks whether a runner has ended."""
# -P: the current folder is not on the import path, so that no file of the user shadows a library.
RUNNER = (sys.executable, "-P", "-m", "finetune_operator.local.runner")
"""The command of a runner."""


@dataclass(frozen=True)
class Folders:
    """The paths of one run."""

    workdir: Path
    manifest_dir: Path
    claims: Path
    """Links to the folders that represent claims."""

    @classmethod
    def under(cls, workdir: Path, manifest_dir: Path) -> "Folders":
        """Return the default layout: the claims are links in the work folder."""
        return cls(workdir, manifest_dir, workdir / "claims")

    def job(self, name: str) -> Path:
        """Return the folder of one attempt."""
        return self.workdir / "jobs" / name

    def workspace(self, pipeline: Pipeline) -> Path:
        """Return the folder that represents the pipeline's volume."""
        claim = pipeline.spec.workspace.existing_claim
        if claim:
            return self.claims / claim
        return self.workdir / "volumes" / "workspace"

    def link_claims(self, claims: Mapping[str, Path]) -> None:
        """Link claims to folders, so that pvc://NAME/… refers to them in this run and in later runs."""
        self.claims.mkdir(parents=True, exist_ok=True)
        for name, folder in claims.items():
            link = self.claims / name
            link.unlink(missing_ok=True)
            link.symlink_to(folder.resolve())


class LocalCluster:
    """Runs one pipeline's Jobs as processes of this machine."""

    def __init__(
        self,
        folders: Folders,
        on_event: Callable[[Event], None],
        *,
        save_digests: bool = True,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.folders = folders
        self.on_event = on_event
        self.variables = variables or {}
        """Environment variables of all stages; the manifest's variables of the same names take precedence."""
        self.pipeline_file = PipelineFile(folders.workdir)
        self.source_digests = SourceDigests(
            folders.workdir / "contents.json", save=save_digests
        )
        self.runners: dict[str, subprocess.Popen[bytes]] = {}
        self.stopping = False
        """Whether the user pressed Ctrl-C: has the effect of spec.suspend, but for this command only."""

    async def read(self, key: Key) -> Pipeline | None:
        """Return the work folder's pipeline, or None if its key differs."""
        pipeline = self.pipeline_file.read()
        if pipeline is None or pipeline.key != key:
            return None
        if not self.stopping:
            return pipeline
        return replace(
            pipeline, spec=pipeline.spec.model_copy(update={"suspend": True})
        )

    async def observe(self, pipeline: Pipeline) -> Observation:
        """Read the folders of the attempts that have not ended, and the digests of the sources."""
        jobs: dict[str, ObservedJob] = {}
        for attempt in pipeline.status.running_attempts().values():
            job = self.job(attempt.job)
            if job:
                jobs[attempt.job] = job
        sources = pipeline.spec.source_uris()
        environment = self.environment(pipeline)
        # In a thread: hashing a large model takes a while, and the event loop must keep handling Ctrl-C.
        digests = await asyncio.to_thread(
            self.source_digests.digests, sources, environment
        )
        return Observation(
            jobs,
            source_digests=digests,
            machine_failures=frozenset(self._machine_failures(pipeline)),
            keeps_images=False,
        )

    def _machine_failures(self, pipeline: Pipeline) -> Iterator[str]:
        """Yield the last attempts that ended because of this machine: its disk is full, or it has no network."""
        for stage in pipeline.status.stages.values():
            last = stage.last_attempt
            if last is None or last.outcome is Outcome.SUCCEEDED or last.stopping:
                continue
            job = self.job(last.job)
            # An attempt that was interrupted meanwhile is no failure.
            if job is None or job.disruption or job.message is None:
                continue
            failure = job.message.failure
            if failure and failure.machine:
                yield last.job

    def keep_generation(self) -> None:
        """Keep the stored pipeline in the history of the run; raise ClusterError if that fails."""
        pipeline = self.pipeline_file.read()
        if pipeline and has_measured(pipeline.status):
            keep(self.folders.workdir, pipeline, self.folders.workspace(pipeline))

    def job(self, name: str) -> ObservedJob | None:
        """Return the current state of one attempt's Job, or None if it never started."""
        return observe_job(self.folders.job(name))

    async def write_status(
        self, pipeline: Pipeline, status: PipelineStatus
    ) -> Pipeline:
        """Write the status to pipeline.json; raise ClusterError if that fails.

        What was measured is kept before another result begins.
        """
        if loses_results(pipeline, status):
            self.keep_generation()
        try:
            return self.pipeline_file.write_status(pipeline, status)
        except OSError as error:
            raise ClusterError(
                f"cannot write {self.pipeline_file.path}: {error}"
            ) from error

    async def apply(
        self, pipeline: Pipeline, actions: Sequence[Action]
    ) -> Mapping[str, Blocker]:
        """Start and stop runners; raise ClusterError if a runner cannot be started."""
        for action in actions:
            match action:
                case CreateJob(job):
                    # In a thread, as above: a large folder takes a while.
                    await asyncio.to_thread(self._prune, pipeline, job)
                    self._start(pipeline, job)
                case StopJob(name, _):
                    self._send_command(name, STOP)
                case (
                    DeletePipeline()
                    | DeleteJob()
                    | CreateWorkspace(_)
                    | ChangeWorkspace()
                ):
                    # The user deletes the work folder.
                    pass
                case ProbeServer() | SwitchTraffic() | ScaleServer() | DeleteService():
                    # No local server outlives its attempt.
                    pass
                case ReplaceLost():
                    # A single machine loses no node.
                    pass
        return {}

    async def emit_events(self, pipeline: Pipeline, events: Sequence[Event]) -> None:
        """Show the events to the user, and append them to events.jsonl."""
        if not events:
            return
        for event in events:
            self.on_event(event)
        lines = []
        for event in events:
            line = {
                "pipeline": str(pipeline.key),
                "type": event.type,
                "reason": event.reason,
                "message": event.message,
            }
            lines.append(json.dumps(line) + "\n")
        try:
            with (self.folders.workdir / "events.jsonl").open("a") as file:
                file.writelines(lines)
        except OSError as error:
            raise ClusterError(f"cannot write events.jsonl: {error}") from error

    def evict(self, job: str, reason: str) -> None:
        """Evict the Job's process: SIGTERM, then SIGKILL after the grace period."""
        self._send_command(job, f"{EVICT} {reason}")

    def kill(self, job: str, reason: str) -> None:
        """Kill the Job's process with SIGKILL at once, as the loss of its node would."""
        self._send_command(job, f"{KILL} {reason}")

    async def wait(self, seconds: float) -> None:
        """Wait until a runner has ended, at most this long."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while loop.time() < deadline:
            ended = [
                name
                for name, runner in self.runners.items()
                if runner.poll() is not None
            ]
            for name in ended:
                self._record_failed_start(name, self.runners.pop(name).returncode)
            if ended:
                return
            await asyncio.sleep(POLL_SECONDS)

    def environment(self, pipeline: Pipeline, job: Path | None = None) -> Environment:
        """Return the paths of a stage's process; without a job folder, the paths that a reader of URIs needs."""
        return Environment(
            workspace=self.folders.workspace(pipeline),
            claims=self.folders.claims,
            manifest_dir=self.folders.manifest_dir,
            termination_log=(job or self.folders.workdir) / TERMINATION,
            progress_file=job / PROGRESS if job else None,
        )

    def _prune(self, pipeline: Pipeline, job: JobTemplate) -> None:
        """Remove unused results before a program of the user starts; the trainer removes them itself."""
        pruning = job.pruning
        if pruning is None or job.command[: len(TRAINER)] == TRAINER:
            return
        unused = Unused(
            self.folders.workspace(pipeline),
            stages_of(pruning.keep),
            frozenset(pruning.keep) | names_in(pipeline.spec.source_uris()),
            pruning.keep_unused,
            pipeline.uid,
            pruning.shared,
        )
        # What stays only takes space.
        with contextlib.suppress(OSError):
            list(unused.prune())

    def _start(self, pipeline: Pipeline, job: JobTemplate) -> None:
        """Write job.json and start a runner. A second runner of the same Job waits for the lock, then does nothing."""
        if job.name in self.runners:
            return
        folder = self.folders.job(job.name)
        environment = replace(
            self.environment(pipeline, folder),
            pipeline_uid=pipeline.uid,
            attempt=job.attempt,
            max_silence_seconds=job.max_silence_seconds,
            pruning=job.pruning,
        )
        command = job.command
        if command[0] == "python":
            # The interpreter of this command: its environment has the trainer.
            command = (sys.executable, *command[1:])
        job_file = {
            "command": command,
            "env": {
                "PYTHONUNBUFFERED": "1",
                **self.variables,
                **job.env,
                **environment.variables(),
            },
            "folder": str(self.folders.manifest_dir),
            "graceSeconds": job.grace.total_seconds(),
        }
        try:
            environment.workspace.mkdir(parents=True, exist_ok=True)
            write_durably(folder / JOB_FILE, json.dumps(job_file, indent=1).encode())
            with (folder / LOG).open("ab") as log:
                self.runners[job.name] = subprocess.Popen(
                    [*RUNNER, str(folder)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    # Ctrl-C in the terminal must reach this command only, which then decides.
                    start_new_session=True,
                )
        except OSError as error:
            raise ClusterError(f"cannot start {job.name}: {error}") from error

    def _record_failed_start(self, job: str, code: int) -> None:
        """Record the failure of a runner that ended before it started its process.

        Without the record the Job would seem never to have started, and would be started again forever.
        """
        folder = self.folders.job(job)
        if code and self.job(job) is None:
            message = f"its runner ended with exit code {code} before it started the process; see {folder / LOG}"
            # The next start of the Job reports a problem with the disk.
            with contextlib.suppress(OSError):
                record_start_failure(folder, message)

    def _send_command(self, job: str, command: str) -> None:
        runner = self.runners.get(job)
        if runner is None or runner.stdin is None:
            # An earlier `finetune run` started it and closed its pipe: the runner is evicting it already.
            return
        try:
            runner.stdin.write(command.encode() + b"\n")
            runner.stdin.flush()
        except BrokenPipeError:
            # The runner has ended.
            return
