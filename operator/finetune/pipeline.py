"""A pipeline: the manifest as an object, from which it is checked, planned, run here or applied to a cluster."""

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict, Unpack

from pydantic import TypeAdapter
from typing_extensions import override

from finetune.local_run import start
from finetune.run import PipelineRun
from finetune.threads import in_thread
from finetune_cli.arguments import claims, client_module, workdir_for
from finetune_cli.commands import plan as planning
from finetune_cli.commands import preview as previewing
from finetune_cli.commands.run import manifest_commit
from finetune_cli.commands.validate import check_sources
from finetune_cli.diagnostics import InvalidManifest
from finetune_cli.local.run import LocalRun
from finetune_cli.manifest.manifest import ReadResult, read_all, read_text
from finetune_cli.manifest.overrides import parse_overrides
from finetune_cli.manifest.yaml import writer as yaml_writer
from finetune_cli.output.forecast_lines import PlanReport
from finetune_operator.api.spec import PipelineSpec
from finetune_trainer.contract.preview import PreviewReport

CLUSTER = "finetune.cluster_run"
"""Module of the SDK that needs the Kubernetes client."""


class WorkPlace(TypedDict, total=False):
    """Where a pipeline runs on this machine, as --workdir and --claim say it."""

    workdir: Path | str | None
    claims: Mapping[str, Path | str]
    """Claim -> the folder that replaces pvc://CLAIM here; later runs in the work folder remember it."""


class Pipeline:
    """A valid manifest. Paths in it are relative to its file; without a file, to the current folder."""

    def __init__(
        self,
        name: str,
        spec: PipelineSpec | Mapping[str, Any],
        *,
        namespace: str | None = None,
    ) -> None:
        """Create the pipeline; raises InvalidManifest with all errors, by the lines of its YAML."""
        # Only what was set, as in a manifest by hand: defaults stay the defaults of who reads it.
        fields = TypeAdapter(Any).dump_python(
            spec, mode="json", by_alias=True, exclude_unset=True, exclude_none=True
        )
        metadata = {"name": name}
        if namespace:
            metadata["namespace"] = namespace
        text = yaml_writer.to_yaml(metadata, fields)
        self._accept(read_text(Path(f"Pipeline({name})"), text))

    @classmethod
    def from_yaml(
        cls, source: Path | str, *, overrides: Iterable[str] = ()
    ) -> "Pipeline":
        """Read a manifest from a file, or from a text of several lines; raises InvalidManifest or UsageError.

        `overrides` set fields as --set does, such as train.epochs=1 and metadata.name=short.
        """
        changes = parse_overrides(overrides)
        if isinstance(source, str) and "\n" in source:
            result = read_text(Path("Pipeline"), source, changes)
        else:
            result = read_all(Path(source), changes)
        pipeline = cls.__new__(cls)
        pipeline._accept(result)  # noqa: SLF001  its own
        return pipeline

    def _accept(self, result: ReadResult) -> None:
        self.manifest = result.only()
        self._warnings = result.warnings

    @property
    def name(self) -> str:
        """The name of the pipeline."""
        return self.manifest.name

    @property
    def spec(self) -> PipelineSpec:
        """The spec, with its defaults."""
        return self.manifest.spec

    def to_yaml(self, file: Path | str | None = None) -> str:
        """Return the manifest as YAML; with `file`, also write it there."""
        body = self.manifest.body
        text = yaml_writer.to_yaml(body["metadata"], body["spec"])
        if file:
            Path(file).write_text(text, "utf-8")
        return text

    def validate(self, **place: Unpack[WorkPlace]) -> list[str]:
        """Look at all sources, as `finetune validate --check` does, and return its notes; raises InvalidManifest."""
        result = ReadResult([self.manifest])
        workdir, folders = self._place(place)
        notes = check_sources(result, workdir, folders)
        if result.diagnostics:
            raise InvalidManifest(result.diagnostics)
        return [*notes, *map(str, self._warnings)]

    def plan(
        self,
        *,
        context: str | None = None,
        namespace: str | None = None,
        **place: Unpack[WorkPlace],
    ) -> PlanReport:
        """Return what `run` would do, or with a context or a namespace what `apply` would do; writes nothing."""
        if context or namespace:
            there = client_module(CLUSTER)
            report: PlanReport = there.plan(self.manifest, context, namespace)
            return report
        workdir, folders = self._place(place)
        return in_thread(lambda: planning.plan(self.manifest, workdir, folders))

    def preview(self, examples: int = 3, **place: Unpack[WorkPlace]) -> PreviewReport:
        """Return the first records as the model will see them, and the counts of all; raises UsageError."""
        workdir, folders = self._place(place)
        return previewing.preview(self.manifest, workdir, folders, examples)

    def run(
        self,
        *,
        until: str | None = None,
        retry: bool = False,
        **place: Unpack[WorkPlace],
    ) -> PipelineRun:
        """Run the pipeline on this machine, or continue it, and return when all checks have passed.

        The run belongs to this process: if the process ends, the stage is stopped as an eviction would stop it.
        """
        workdir, folders = self._place(place)
        commit = manifest_commit(self.manifest)
        local_run = LocalRun.create(self.manifest, workdir, commit=commit)
        return start(local_run, folders, until, retry=retry)

    async def run_async(self, **options: Any) -> PipelineRun:
        """Run as `run` does, with its options; if the checks are cancelled, no stage is left running."""
        starting = asyncio.create_task(asyncio.to_thread(self.run, **options))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            run = await starting
            await asyncio.to_thread(run.stop)
            raise

    def apply(
        self, *, context: str | None = None, namespace: str | None = None
    ) -> PipelineRun:
        """Apply the manifest to a cluster, as `kubectl apply` does, and return at once."""
        there = client_module(CLUSTER)
        run: PipelineRun = there.apply(self.manifest, context, namespace)
        return run

    def _place(self, place: WorkPlace) -> tuple[Path, dict[str, Path]]:
        given = place.get("workdir")
        workdir = workdir_for(self.manifest, Path(given) if given else None)
        folders = place.get("claims", {})
        return workdir, claims(f"{name}={path}" for name, path in folders.items())

    @override
    def __repr__(self) -> str:
        return f"<Pipeline {self.name}>"
