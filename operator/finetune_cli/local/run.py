"""A local run: its work folder, and the loop that reconciles the pipeline until it is finished."""

import asyncio
import contextlib
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from finetune_cli.checks.preview import ask_trainer
from finetune_cli.checks.sources import check_manifest
from finetune_cli.diagnostics import (
    Diagnostic,
    InvalidManifest,
    UsageError,
    sort_diagnostics,
)
from finetune_cli.local.fault_injection import Fault, FaultInjector
from finetune_cli.local.work_folder import WorkFolderInUse, locked
from finetune_cli.manifest.fields import has_own_program
from finetune_cli.manifest.manifest import Manifest
from finetune_cli.outcome import is_until_reached, is_up_to_date
from finetune_cli.runs import MANIFEST, UNTIL, remember
from finetune_operator.api.group import RETRY_ANNOTATION
from finetune_operator.api.spec import PipelineSpec
from finetune_operator.api.status import PipelineStatus
from finetune_operator.core.adoption import is_from_other_version, with_adopted
from finetune_operator.core.assess import assess
from finetune_operator.core.assessment import StageAssessment
from finetune_operator.core.events import Event
from finetune_operator.core.job_template import referenced_claims
from finetune_operator.core.observation import Observation
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.core.settings import Settings
from finetune_operator.errors import ClusterError, Conflict
from finetune_operator.local.cluster import Folders, LocalCluster
from finetune_operator.reconcile import reconcile
from finetune_trainer.contract import Environment, PrepareConfig
from finetune_trainer.contract.environment import GIT_SHA, InvalidLocation
from finetune_trainer.contract.preview import PreviewReport, PreviewRequest

REFRESH_SECONDS = 0.5
"""Longest time between two reconciles, and so between two updates of the display."""
# A full disk or a lost mount may be repaired while the stage goes on.
WORKDIR_RETRY_SECONDS = 60.0
"""How long reads and writes of the work folder may fail before the run is given up."""

Show = Callable[[PipelineStatus], None]


def local_settings(until: str | None = None) -> Settings:
    """Return the operator's settings on this machine, which has no kinds of nodes, and a command that explains."""
    return Settings(until=until, placement_defaults=None, troubleshooting_url="")


@dataclass(frozen=True)
class LocalRun:
    """One manifest and its work folder."""

    manifest: Manifest
    cluster: LocalCluster

    @classmethod
    def create(
        cls,
        manifest: Manifest,
        workdir: Path,
        on_event: Callable[[Event], None] = lambda _: None,
        commit: str | None = None,
    ) -> "LocalRun":
        """Create a run in a work folder; writes nothing yet. `commit` is the manifest's, for the model card."""
        folders = Folders.under(workdir, manifest.path.parent.resolve())
        variables = {}
        if commit:
            variables[GIT_SHA] = commit
        return cls(manifest, LocalCluster(folders, on_event, variables=variables))

    @classmethod
    @contextlib.contextmanager
    def read_only(
        cls, manifest: Manifest, workdir: Path, claims: Mapping[str, Path]
    ) -> Iterator["LocalRun"]:
        """Create a run that writes nothing to its work folder; `claims` are those given now."""
        with tempfile.TemporaryDirectory() as links:
            folders = Folders(workdir, manifest.path.parent.resolve(), Path(links))
            cluster = LocalCluster(folders, lambda _: None, save_digests=False)
            local_run = cls(manifest, cluster)
            local_run.link_claims(claims)
            yield local_run

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
        links = (self.workdir / "claims").glob("*")
        earlier = {link.name: link.resolve() for link in links if link.is_dir()}
        self.cluster.folders.link_claims({**earlier, **given})

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the work folder; raise UsageError if another run holds the lock."""
        self.workdir.parent.mkdir(parents=True, exist_ok=True)
        # Private: spec.env may hold a token, and job.json contains its values.
        self.workdir.mkdir(mode=0o700, exist_ok=True)
        try:
            with locked(self.workdir):
                yield
        except WorkFolderInUse:
            raise UsageError(
                f"another finetune run uses {self.workdir}; wait for it to end, or use another --workdir"
            ) from None

    def prepare(
        self, claims: Mapping[str, Path], until: str | None, *, retry: bool
    ) -> list[str]:
        """Check what the run needs, store its manifest, and return the sources that were not looked at."""
        self.cluster.folders.link_claims(claims)
        # All checks come before the manifest is applied: an invalid one leaves the earlier run as it is.
        not_looked_at = self.check()
        token = None
        if retry:
            token = datetime.now(UTC).isoformat()  # noqa: TID251  an edge
        self.apply_manifest(token, until)
        return not_looked_at

    def apply_manifest(
        self, retry: str | None = None, until: str | None = None
    ) -> Pipeline:
        """Store the manifest in pipeline.json, as `kubectl apply` does; raise ClusterError if that fails.

        Its path and the last stage that the user asks for are stored beside it, so that later commands need only the
        run's name.
        """
        annotations = dict(self.manifest.annotations)
        if retry:
            annotations[RETRY_ANNOTATION] = retry
        # Before the manifest: what has changed after that is an edit.
        self._adopt_other_version()
        self._keep_edited_generation(annotations)
        applied = self.cluster.pipeline_file.apply(
            self.key, self.manifest.spec, annotations
        )
        recorded = self.workdir / MANIFEST
        recorded.unlink(missing_ok=True)
        # A pipeline that was made in Python is in no file.
        if self.manifest.path.is_file():
            recorded.write_text(str(self.manifest.path.absolute()), "utf-8")
        (self.workdir / UNTIL).write_text(until or "", "utf-8")
        remember(self.workdir)
        return applied

    def _keep_edited_generation(self, annotations: dict[str, str]) -> None:
        """Keep what was measured of the stored manifest, if this manifest is another."""
        file = self.cluster.pipeline_file
        before = file.read()
        edited = file.edited(self.manifest.spec, annotations)
        if before is None or edited is None or before.key != self.key:
            return
        # A generation that no run has begun has the results of the generation before it.
        is_observed = before.status.observed_generation == before.generation
        if is_observed and edited.generation != before.generation:
            self.cluster.keep_generation()

    def _adopt_other_version(self) -> None:
        """Record this version's hashes of the stages that another version has run."""
        pipeline = self.cluster.pipeline_file.read()
        if pipeline is None or not is_from_other_version(pipeline):
            return
        observed = asyncio.run(self.cluster.observe(pipeline))
        now = datetime.now(UTC)  # noqa: TID251  an edge
        stages = assess(pipeline, observed, now).stages
        statuses = {name: stage.status for name, stage in stages.items()}
        adopted = with_adopted(pipeline, statuses)
        self.cluster.pipeline_file.write_status(pipeline, adopted.status)

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
        file = self.manifest.path
        diagnostics = []
        for claim in sorted(self._referenced_claims()):
            if not (self.cluster.folders.claims / claim).is_dir():
                message = f"claim {claim} has no folder on this machine; add --claim {claim}=FOLDER"
                diagnostics.append(
                    Diagnostic(file, self.manifest.line, "spec", message)
                )
        if diagnostics:
            raise InvalidManifest(diagnostics)

    def check_written_folders(self) -> None:
        """Raise UsageError if the run would write into a folder that it reads: each write would change the digest."""
        written = self._written_folders()
        for uri in self.manifest.spec.source_uris():
            try:
                source = self.environment.locate(uri).resolve()
            except InvalidLocation:
                # check_manifest reports it.
                continue
            if not source.is_dir():
                continue
            for name, folder in written.items():
                if folder.resolve().is_relative_to(source):
                    raise UsageError(
                        f"{uri} is a source, but contains {name}, {folder}; choose a folder outside it"
                    )

    def _written_folders(self) -> dict[str, Path]:
        """Return the folders that the run writes to, by their names in messages."""
        environment = self.environment
        written = {
            "the work folder": self.workdir,
            "the workspace": environment.workspace,
        }
        for uri in _targets(self.manifest.spec):
            # check_manifest reports a target without a location.
            with contextlib.suppress(InvalidLocation):
                written[f"push.targets {uri}"] = environment.locate(uri)
        return written

    def preview(self, **options: Any) -> PreviewReport | None:
        """Return what prepare would make of the data; None if it runs another program, or without the trainer.

        `options` are fields of the request.
        """
        config = self._stages()["prepare"].config
        stage = self.manifest.spec.stages()["prepare"]
        if not isinstance(config, PrepareConfig) or has_own_program(stage):
            return None
        variables = stage.pod.literal_env()
        request = PreviewRequest(config=config, **options)
        return ask_trainer(variables, self.environment, request)

    def _stages(self) -> Mapping[str, StageAssessment]:
        pipeline = Pipeline(self.key, "", 1, self.manifest.spec)
        return assess(pipeline, Observation(), datetime.now(UTC)).stages  # noqa: TID251  an edge

    def _referenced_claims(self) -> set[str]:
        claims: set[str] = set()
        for stage in self._stages().values():
            if stage.config:
                claims.update(referenced_claims(stage.config))
        existing = self.manifest.spec.workspace.existing_claim
        if existing:
            claims.add(existing)
        return claims

    def status(self) -> PipelineStatus:
        """Return the last status that was written; an empty status before the first."""
        pipeline = self.cluster.pipeline_file.read()
        if pipeline is None:
            return PipelineStatus()
        return pipeline.status

    async def run(
        self, settings: Settings, faults: Sequence[Fault], show: Show
    ) -> PipelineStatus:
        """Reconcile until the pipeline is finished, the stage `until` is done, or the user presses Ctrl-C."""
        self._handle_signals()
        injector = FaultInjector(self.cluster, faults)
        injecting = asyncio.create_task(injector.watch())
        try:
            while True:
                delay = await self._reconcile_once(settings)
                pipeline = self.cluster.pipeline_file.read()
                if pipeline is None:
                    raise ClusterError(
                        f"{self.workdir} holds no run any more: its files were removed"
                    )
                status = pipeline.status
                show(status)
                if self._is_finished(pipeline, settings):
                    injector.report_missed()
                    return status
                await self.cluster.wait(delay)
        finally:
            injecting.cancel()

    async def _reconcile_once(self, settings: Settings) -> float:
        """Reconcile once and return the seconds until the next time; retry for a while if the work folder fails."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + WORKDIR_RETRY_SECONDS
        reported = ""
        while True:
            try:
                now = datetime.now(UTC)  # noqa: TID251  an edge
                result = await reconcile(self.key, self.cluster, settings, now)
            except Conflict:
                # Another command has sent a request: it is read at once.
                continue
            except ClusterError as error:
                if loop.time() > deadline or self.cluster.stopping:
                    raise
                # Each error once, although it is retried twice a second.
                if str(error) != reported:
                    reported = str(error)
                    self.cluster.on_event(
                        Event("Warning", "WorkFolder", f"{reported}; retrying")
                    )
                await asyncio.sleep(REFRESH_SECONDS)
            else:
                if result.requeue_after is None:
                    return REFRESH_SECONDS
                return min(REFRESH_SECONDS, result.requeue_after.total_seconds())

    def _is_finished(self, pipeline: Pipeline, settings: Settings) -> bool:
        status = pipeline.status
        # A process that still runs is waited for, also after Ctrl-C: it saves its work.
        if status.running_attempts():
            return False
        if self.cluster.stopping:
            return True
        # Another process may have sent a request since the status was written.
        if not is_up_to_date(pipeline):
            return False
        if status.finished_at or pipeline.spec.suspend:
            return True
        return is_until_reached(status, settings.until)

    def _handle_signals(self) -> None:
        """Stop as an eviction does at the first Ctrl-C, SIGTERM or SIGHUP; kill at the second."""
        # Python handles signals in its main thread only: a caller in another thread stops the run itself.
        if threading.current_thread() is not threading.main_thread():
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.stop)

    def stop(self) -> None:
        """Stop the running stage as an eviction does; kill it if this is the second request."""
        if self.cluster.stopping:
            for job in list(self.cluster.runners):
                self.cluster.kill(job, "killed by the user (second Ctrl-C)")
        self.cluster.stopping = True


def _targets(spec: PipelineSpec) -> list[str]:
    if spec.push is None:
        return []
    return [target.uri for target in spec.push.targets]
