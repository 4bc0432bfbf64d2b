"""A pipeline on this machine: its work folder, and the loop that reconciles until it is finished."""

import asyncio
import contextlib
import fcntl
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from finetune_cli.diagnostics import Diagnostic, InvalidManifest, UsageError
from finetune_cli.local.fault_injection import Fault, FaultInjector
from finetune_cli.manifest.manifest import Manifest
from finetune_operator.api.group import RETRY_ANNOTATION
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import Outcome, PipelineStatus, StageState
from finetune_operator.core.assess import assess
from finetune_operator.core.events import Event
from finetune_operator.core.job_template import referenced_claims
from finetune_operator.core.observation import Observation
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.core.settings import Settings
from finetune_operator.errors import ClusterError
from finetune_operator.local.cluster import Folders, LocalCluster
from finetune_operator.reconcile import reconcile
from finetune_trainer.contract.environment import InvalidLocation

REFRESH_SECONDS = 0.5
WORKDIR_RETRY_SECONDS = 60.0
"""How long the work folder may refuse to be read or written before the run gives up."""

Show = Callable[[PipelineStatus], None]


@dataclass(frozen=True)
class LocalRun:
    """One manifest and the folder its run lives in."""

    manifest: Manifest
    cluster: LocalCluster

    @classmethod
    def create(cls, manifest: Manifest, workdir: Path, tell: Callable[[Event], None] = lambda _: None) -> "LocalRun":
        """Take a work folder for a manifest; nothing is written yet."""
        return cls(manifest, LocalCluster(Folders.under(workdir, manifest.path.parent.resolve()), tell))

    @classmethod
    def read_only(cls, manifest: Manifest, workdir: Path, claims: Path) -> "LocalRun":
        """Take a work folder for reading only; `claims` holds the links, so that nothing is written."""
        folders = Folders(workdir, manifest.path.parent.resolve(), claims)
        return cls(manifest, LocalCluster(folders, lambda _: None, keep=False))

    @property
    def key(self) -> Key:
        """Which pipeline."""
        return Key(self.manifest.namespace, self.manifest.name)

    @property
    def workdir(self) -> Path:
        """Everything of the run is in it."""
        return self.cluster.folders.workdir

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs out of the work folder; raises Refused where one is in it."""
        self.workdir.parent.mkdir(parents=True, exist_ok=True)
        self.workdir.mkdir(mode=0o700, exist_ok=True)  # spec.env may hold a token, and its values are written in here
        with (self.workdir / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"another finetune run is working in {self.workdir}; wait for it or use --workdir"
                ) from None
            yield

    def apply_manifest(self, retry: str | None = None) -> Pipeline:
        """Write down what the manifest asks for, as `kubectl apply` does; raises ClusterError."""
        annotations = dict(self.manifest.annotations) | ({RETRY_ANNOTATION: retry} if retry else {})
        return self.cluster.pipeline_file.apply(self.key, self.manifest.spec, annotations)

    def check_claims(self) -> None:
        """Raise ManifestInvalid for every claim that the manifest names and nobody gave a folder for."""
        wanted = self._claims()
        missing = sorted(claim for claim in wanted if not (self.cluster.folders.claims / claim).is_dir())
        if missing:
            message = "pvc://{0}/… has no folder on this machine; add --claim {0}=FOLDER"
            file = self.manifest.path
            raise InvalidManifest(
                [Diagnostic(file, self.manifest.line, "spec", message.format(name)) for name in missing]
            )

    def check_sources(self) -> None:
        """Raise Refused where the run would write into a folder that it reads: each write would make it other data."""
        spec = self.manifest.spec
        environment = self.cluster.environment(Pipeline(self.key, "", 1, spec))
        written = {"the work folder": self.workdir, "the workspace": environment.workspace}
        with contextlib.suppress(InvalidLocation):  # the stage that needs it will say what is wrong
            written |= {"push.target": environment.locate(spec.push.target)} if spec.push else {}
        for uri in spec.source_uris():
            with contextlib.suppress(InvalidLocation):
                source = environment.locate(uri).resolve()
                for name, place in written.items():
                    if source.is_dir() and place.resolve().is_relative_to(source):
                        raise UsageError(f"{uri} is read, and {name}, {place}, lies in it; choose a place outside")

    def _claims(self) -> set[str]:
        pipeline = Pipeline(self.key, "", 1, self.manifest.spec)
        views = assess(pipeline, Observation(), datetime.now(UTC)).stages.values()  # noqa: TID251  an edge
        named = {claim for view in views if view.config for claim in referenced_claims(view.config)}
        existing = self.manifest.spec.workspace.existing_claim
        return named | ({existing} if existing else set())

    def status(self) -> PipelineStatus:
        """Give what was last written down."""
        pipeline = self.cluster.pipeline_file.read()
        return pipeline.status if pipeline else PipelineStatus()

    async def run(self, settings: Settings, drills: Sequence[Fault], show: Show) -> PipelineStatus:
        """Reconcile until the pipeline is finished, `until` is reached, or someone pressed Ctrl-C."""
        self._handle_signals()
        planned = FaultInjector(self.cluster, drills)
        watching = asyncio.create_task(planned.watch())
        try:
            while True:
                wait = await self._reconcile_once(settings)
                show(status := self.status())
                if self._is_finished(status, settings):
                    planned.report_missed()
                    return status
                await self.cluster.wait(wait)
        finally:
            watching.cancel()

    async def _reconcile_once(self, settings: Settings) -> float:
        """Reconcile once; a work folder that cannot be written is tried again for a while."""
        loop = asyncio.get_running_loop()
        until, said = loop.time() + WORKDIR_RETRY_SECONDS, ""
        while True:
            try:
                look = await reconcile(self.key, self.cluster, settings, datetime.now(UTC))  # noqa: TID251  an edge
            except ClusterError as error:
                if loop.time() > until or self.cluster.stopping:
                    raise
                if str(error) != said:
                    self.cluster.on_event(Event("Warning", "WorkFolder", f"{(said := str(error))}; trying again"))
                await asyncio.sleep(REFRESH_SECONDS)
            else:
                return min(
                    REFRESH_SECONDS,
                    look.requeue_after.total_seconds() if look.requeue_after is not None else REFRESH_SECONDS,
                )

    def _is_finished(self, status: PipelineStatus, settings: Settings) -> bool:
        running = any(a.outcome is Outcome.RUNNING for s in status.stages.values() if (a := s.last_attempt))
        if status.finished_at or running:
            return not running
        return self.cluster.stopping or self.manifest.spec.suspend or is_until_reached(status, settings.until)

    def _handle_signals(self) -> None:
        """First Ctrl-C: stop as an eviction would. Second: kill."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop)

    def _stop(self) -> None:
        if self.cluster.stopping:
            for job in list(self.cluster.runners):
                self.cluster.kill(job, "killed from the keyboard")
        self.cluster.stopping = True


def is_until_reached(status: PipelineStatus, until: str | None) -> bool:
    """Whether everything up to this stage is over."""
    if until is None:
        return False
    names = [stage.name for stage in STAGES]
    over = {StageState.SUCCEEDED, StageState.SKIPPED}
    wanted = names[: names.index(until) + 1]
    return all(name in status.stages and status.stages[name].state in over for name in wanted)


def with_spec(pipeline: Pipeline, manifest: Manifest) -> Pipeline:
    """Give the pipeline as it would be if the manifest were applied now."""
    grown = pipeline.generation + (pipeline.spec != manifest.spec)
    return replace(pipeline, spec=manifest.spec, generation=grown, annotations=manifest.annotations)
