"""A local run: its work folder, and the loop that reconciles the pipeline until it is finished."""

import asyncio
import contextlib
import fcntl
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from finetune_cli.diagnostics import Diagnostic, InvalidManifest, UsageError, sort_diagnostics
from finetune_cli.local.fault_injection import Fault, FaultInjector
from finetune_cli.manifest.manifest import Manifest
from finetune_cli.runs import MANIFEST
from finetune_cli.source_check import check_manifest
from finetune_operator.api.group import RETRY_ANNOTATION
from finetune_operator.api.spec import STAGES, PipelineSpec
from finetune_operator.api.status import Outcome, PipelineStatus, StageState
from finetune_operator.core.assess import assess
from finetune_operator.core.events import Event
from finetune_operator.core.job_template import referenced_claims
from finetune_operator.core.observation import Observation
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.core.settings import Settings
from finetune_operator.errors import ClusterError
from finetune_operator.local.cluster import Folders, LocalCluster
from finetune_operator.local.runner import LOCK
from finetune_operator.reconcile import reconcile
from finetune_trainer.contract import Environment
from finetune_trainer.contract.environment import InvalidLocation

REFRESH_SECONDS = 0.5
"""Longest time between two reconciles, and so between two updates of the display."""
WORKDIR_RETRY_SECONDS = 60.0
"""How long reads and writes of the work folder may fail before the run is given up."""

Show = Callable[[PipelineStatus], None]


@dataclass(frozen=True)
class LocalRun:
    """One manifest and its work folder."""

    manifest: Manifest
    cluster: LocalCluster

    @classmethod
    def create(
        cls, manifest: Manifest, workdir: Path, on_event: Callable[[Event], None] = lambda _: None
    ) -> "LocalRun":
        """Create a run in a work folder; writes nothing yet."""
        return cls(
            manifest, LocalCluster(Folders.under(workdir, manifest.path.parent.resolve()), on_event)
        )

    @classmethod
    def read_only(cls, manifest: Manifest, workdir: Path, claims: Path) -> "LocalRun":
        """Create a run that writes nothing to its work folder; the links to claims are in the folder `claims`."""
        folders = Folders(workdir, manifest.path.parent.resolve(), claims)
        return cls(manifest, LocalCluster(folders, lambda _: None, save_digests=False))

    @property
    def key(self) -> Key:
        """The key of the pipeline."""
        return Key(self.manifest.namespace, self.manifest.name)

    @property
    def workdir(self) -> Path:
        """The work folder, which holds all files of the run."""
        return self.cluster.folders.workdir

    @property
    def environment(self) -> Environment:
        """The paths that a reader of URIs needs."""
        return self.cluster.environment(Pipeline(self.key, "", 1, self.manifest.spec))

    def link_claims(self, given: Mapping[str, Path]) -> None:
        """Link the claims of earlier runs in the work folder, and those given now, which take precedence."""
        earlier = {
            link.name: link.resolve()
            for link in (self.workdir / "claims").glob("*")
            if link.is_dir()
        }
        self.cluster.folders.link_claims({**earlier, **given})

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the work folder; raise UsageError if another run holds the lock."""
        self.workdir.parent.mkdir(parents=True, exist_ok=True)
        self.workdir.mkdir(
            mode=0o700, exist_ok=True
        )  # private: spec.env may hold a token, and job.json contains its values
        with (self.workdir / LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"another finetune run uses {self.workdir}; wait for it to end, or use another --workdir"
                ) from None
            yield

    def apply_manifest(self, retry: str | None = None) -> Pipeline:
        """Store the manifest in pipeline.json, as `kubectl apply` does; raise ClusterError if that fails.

        The path of the manifest is stored beside it, so that later commands need only the run's name.
        """
        annotations = dict(self.manifest.annotations) | ({RETRY_ANNOTATION: retry} if retry else {})
        applied = self.cluster.pipeline_file.apply(self.key, self.manifest.spec, annotations)
        (self.workdir / MANIFEST).write_text(str(self.manifest.path.absolute()), "utf-8")
        return applied

    def check(self) -> list[str]:
        """Check what the run needs before anything starts, and return the sources that were not looked at.

        Raises InvalidManifest or UsageError.
        """
        self.check_claims()
        self.check_written_folders()
        errors, not_looked_at = check_manifest(self.manifest, self.environment)
        if errors:
            raise InvalidManifest(sort_diagnostics(errors))
        return not_looked_at

    def check_claims(self) -> None:
        """Raise InvalidManifest with every claim that the manifest refers to and that has no folder."""
        missing = sorted(
            claim
            for claim in self._referenced_claims()
            if not (self.cluster.folders.claims / claim).is_dir()
        )
        if missing:
            message = "claim {0} has no folder on this machine; add --claim {0}=FOLDER"
            file = self.manifest.path
            raise InvalidManifest(
                [
                    Diagnostic(file, self.manifest.line, "spec", message.format(name))
                    for name in missing
                ]
            )

    def check_written_folders(self) -> None:
        """Raise UsageError if the run would write into a folder that it reads: each write would change the digest."""
        spec, environment = self.manifest.spec, self.environment
        written = {"the work folder": self.workdir, "the workspace": environment.workspace}
        with contextlib.suppress(
            InvalidLocation
        ):  # the push stage reports what is wrong with its target
            written |= {f"push.targets {uri}": environment.locate(uri) for uri in _targets(spec)}
        for uri in spec.source_uris():
            with contextlib.suppress(InvalidLocation):
                source = environment.locate(uri).resolve()
                for name, folder in written.items():
                    if source.is_dir() and folder.resolve().is_relative_to(source):
                        raise UsageError(
                            f"{uri} is a source, but contains {name}, {folder}; choose a folder outside it"
                        )

    def _referenced_claims(self) -> set[str]:
        pipeline = Pipeline(self.key, "", 1, self.manifest.spec)
        stages = assess(pipeline, Observation(), datetime.now(UTC)).stages.values()  # noqa: TID251  an edge
        named = {
            claim for stage in stages if stage.config for claim in referenced_claims(stage.config)
        }
        existing = self.manifest.spec.workspace.existing_claim
        return named | ({existing} if existing else set())

    def status(self) -> PipelineStatus:
        """Return the last status that was written; an empty status before the first."""
        pipeline = self.cluster.pipeline_file.read()
        return pipeline.status if pipeline else PipelineStatus()

    async def run(self, settings: Settings, faults: Sequence[Fault], show: Show) -> PipelineStatus:
        """Reconcile until the pipeline is finished, the stage `until` is done, or the user presses Ctrl-C."""
        self._handle_signals()
        injector = FaultInjector(self.cluster, faults)
        injecting = asyncio.create_task(injector.watch())
        try:
            while True:
                delay = await self._reconcile_once(settings)
                show(status := self.status())
                if self._is_finished(status, settings):
                    injector.report_missed()
                    return status
                await self.cluster.wait(delay)
        finally:
            injecting.cancel()

    async def _reconcile_once(self, settings: Settings) -> float:
        """Reconcile once and return the seconds until the next time; retry for a while if the work folder fails."""
        loop = asyncio.get_running_loop()
        deadline, reported = loop.time() + WORKDIR_RETRY_SECONDS, ""
        while True:
            try:
                result = await reconcile(self.key, self.cluster, settings, datetime.now(UTC))  # noqa: TID251  an edge
            except ClusterError as error:
                if loop.time() > deadline or self.cluster.stopping:
                    raise
                if str(error) != reported:  # each error once, although it is retried twice a second
                    reported = str(error)
                    self.cluster.on_event(Event("Warning", "WorkFolder", f"{reported}; retrying"))
                await asyncio.sleep(REFRESH_SECONDS)
            else:
                return min(
                    REFRESH_SECONDS,
                    result.requeue_after.total_seconds()
                    if result.requeue_after is not None
                    else REFRESH_SECONDS,
                )

    def _is_finished(self, status: PipelineStatus, settings: Settings) -> bool:
        running = any(
            a.outcome is Outcome.RUNNING for s in status.stages.values() if (a := s.last_attempt)
        )
        if status.finished_at or running:
            return not running
        return (
            self.cluster.stopping
            or self.manifest.spec.suspend
            or is_until_reached(status, settings.until)
        )

    def _handle_signals(self) -> None:
        """Stop as an eviction does at the first Ctrl-C, SIGTERM or SIGHUP; kill at the second."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop)

    def _stop(self) -> None:
        if self.cluster.stopping:
            for job in list(self.cluster.runners):
                self.cluster.kill(job, "killed by the user (second Ctrl-C)")
        self.cluster.stopping = True


def is_until_reached(status: PipelineStatus, until: str | None) -> bool:
    """Return whether all stages up to this one have succeeded or were skipped; False without a stage."""
    if until is None:
        return False
    names = [stage.name for stage in STAGES]
    done = {StageState.SUCCEEDED, StageState.SKIPPED}
    included = names[: names.index(until) + 1]
    return all(name in status.stages and status.stages[name].state in done for name in included)


def with_spec(pipeline: Pipeline, manifest: Manifest) -> Pipeline:
    """Return the pipeline as it would be if the manifest were applied now."""
    generation = pipeline.generation + (pipeline.spec != manifest.spec)
    return replace(
        pipeline, spec=manifest.spec, generation=generation, annotations=manifest.annotations
    )


def _targets(spec: PipelineSpec) -> list[str]:
    return [target.uri for target in spec.push.targets] if spec.push else []
