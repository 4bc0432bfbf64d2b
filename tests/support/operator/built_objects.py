"""All objects that the operator would create for a manifest, built by its own pure functions."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from finetune_operator.api.spec import STAGES, PipelineSpec
from finetune_operator.api.stages.base import ConfigContext, StageSpec
from finetune_operator.api.status import AttemptStatus, StageStatus
from finetune_operator.core.capacity.choice import CapacityChoice
from finetune_operator.core.job_template import JobTemplate, job_template
from finetune_operator.core.metadata import SERVER, job_name
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.core.settings import Settings
from finetune_operator.kubernetes.resources.claim import build_claim
from finetune_operator.kubernetes.resources.headless_service import (
    build_headless_service,
)
from finetune_operator.kubernetes.resources.job import build_job
from finetune_operator.kubernetes.resources.server import (
    build_deployment,
    build_service,
)

Object = dict[str, Any]
ROOT = Path(__file__).parents[3]
MANIFESTS = (
    *sorted((ROOT / "examples").glob("*/pipeline.yaml")),
    ROOT / "tests" / "data" / "everything.yaml",
)
UID = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"
IDENTITY = "0123456789abcdef"
START = datetime(2030, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class BuiltObjects:
    """The objects of a pipeline."""

    claim: Object
    jobs: dict[str, Object]
    deployment: Object | None
    service: Object | None
    headless_service: Object | None = None
    """The Service of a stage with several pods."""

    @property
    def workloads(self) -> dict[str, Object]:
        """Return the Jobs and the Deployment by stage."""
        return {**self.jobs, **({"deploy": self.deployment} if self.deployment else {})}

    def __iter__(self) -> Iterator[Object]:
        yield self.claim
        yield from self.workloads.values()
        for service in (self.service, self.headless_service):
            if service:
                yield service


def built_objects(
    manifest: Object, namespace: str, settings: Settings | None = None
) -> BuiltObjects:
    """Return the objects of a manifest: the claim, each stage's Job or Deployment, the Services.

    Raises ValidationError or Blocked if the operator would refuse the manifest.
    """
    spec = PipelineSpec.model_validate(manifest["spec"])
    pipeline = Pipeline(Key(namespace, manifest["metadata"]["name"]), UID, 1, spec)
    templates = {
        name: _template(pipeline, name, settings or Settings())
        for name in spec.stages()
    }
    claim = _as_json(build_claim(pipeline))
    jobs: dict[str, Object] = {}
    deployment = service = headless = None
    for name, template in templates.items():
        if template.serving is None:
            jobs[name] = _as_json(build_job(pipeline, template))
        else:
            deployment = _as_json(
                build_deployment(pipeline, template, template.serving)
            )
            service = _as_json(build_service(pipeline, template.stage, template.name))
        if template.pods > 1:
            headless = _as_json(build_headless_service(pipeline, name))
    return BuiltObjects(claim, jobs, deployment, service, headless)


def _as_json(built: Object) -> Object:
    """Return the object as the API server receives it, without parts that two objects share."""
    received: Object = json.loads(json.dumps(built))
    return received


def _template(pipeline: Pipeline, stage: str, settings: Settings) -> JobTemplate:
    spec = pipeline.spec
    context = ConfigContext(
        pipeline=str(pipeline.key),
        seed=spec.seed,
        model=spec.model,
        datasets=spec.datasets,
        validation=spec.validation,
        specs=spec.stages(),
        identities=dict.fromkeys(spec.stages(), IDENTITY),
        statuses={name: StageStatus() for name in spec.stages()},
    )
    stage_spec = spec.stage(stage)
    assert stage_spec
    config = stage_spec.config(context).model_copy(update={"identity": IDENTITY})
    return job_template(
        pipeline, stage_spec, config, _attempt(pipeline, stage_spec, settings), settings
    )


def _attempt(pipeline: Pipeline, spec: StageSpec, settings: Settings) -> AttemptStatus:
    """Return the stage's first attempt, placed as the operator places it."""
    name = job_name(pipeline.key.name, pipeline.uid, spec.name, 1, spec.pods)
    attempt = AttemptStatus(number=1, job=name, identity=IDENTITY, execution="")
    defaults = settings.placement_defaults
    if defaults is None:
        return attempt
    statuses = {kind.name: StageStatus() for kind in STAGES}
    return CapacityChoice(pipeline.spec, spec, statuses, defaults, START).place(attempt)


def load_manifest(path: Path) -> Object:
    """Return the manifest in a file."""
    manifest: Object = yaml.safe_load(path.read_text())
    return manifest


def rename(manifest: Object, name: str) -> None:
    """Write a name into an object, and into a Deployment's pods that name no other server."""
    before = manifest["metadata"]["name"]
    manifest["metadata"]["name"] = name
    if manifest["kind"] != "Deployment":
        return
    pods = manifest["spec"]["template"]["metadata"]["labels"]
    for labels in (pods, manifest["spec"]["selector"]["matchLabels"]):
        if labels[SERVER] == before:
            labels[SERVER] = name
