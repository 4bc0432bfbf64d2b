"""The Job of one attempt, independent of whether Kubernetes or a local process runs it."""

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from finetune_operator.api.stages.base import Resources, Serving, StageSpec
from finetune_operator.core.metadata import job_labels, job_name
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.core.placement import PlacementRequest, PodPlacement, compose_placement
from finetune_operator.core.settings import Settings
from finetune_trainer.contract import StageConfig
from finetune_trainer.contract import environment as names

TRAINER = ("python", "-P", "-m", "finetune_trainer")
"""-P keeps the working directory out of sys.path, so that no file there shadows a library."""
CLAIM_URI = re.compile(r"pvc://([a-z0-9][a-z0-9.-]*)(/\S*)?")
"""Matches whole strings only, because a prompt or an argument may begin like a URI."""


@dataclass(frozen=True)
class JobTemplate:
    """The Job of one attempt. It is a pure value: the same inputs always produce the same Job."""

    name: str
    labels: dict[str, str]
    stage: str
    attempt: int
    identity: str
    image: str
    command: tuple[str, ...]
    args: tuple[str, ...]
    """The user's arguments. `command` already ends with them if the user replaced the program."""
    env: dict[str, str]
    """The user's variables and the stage's config. The cluster adds the variables for mount paths."""
    claims: tuple[str, ...]
    """Claims that the config references, besides the workspace."""
    resources: Resources
    placement: PodPlacement
    affinity: dict[str, Any]
    secrets: tuple[str, ...]
    """Secrets whose keys become environment variables."""
    service_account: str | None
    priority_class: str | None
    grace: timedelta
    """Time from SIGTERM to SIGKILL."""
    serving: Serving | None
    """The server that keeps running after the attempt, on a cluster. None: the stage has none."""
    trainer_image: str
    """Image of the trainer, even if the stage runs another image."""


def job_template(
    pipeline: Pipeline, spec: StageSpec, config: StageConfig, attempt: int, settings: Settings
) -> JobTemplate:
    """Return the Job of an attempt of the stage."""
    config_json = config.model_dump_json(by_alias=True, exclude_none=True)
    serving = spec.serving(config)
    return JobTemplate(
        name=job_name(pipeline.key.name, pipeline.uid, spec.name, attempt),
        labels=job_labels(pipeline.key.name, spec.name, attempt, config.identity),
        stage=spec.name,
        attempt=attempt,
        identity=config.identity,
        image=spec.image or settings.image_of(serving.engine if serving else None),
        command=(*spec.command, *spec.args) if spec.command else (*TRAINER, spec.name),
        args=spec.args,
        env={**spec.env, names.CONFIG: config_json},  # last, so that the user's variables cannot replace it
        claims=referenced_claims(config),
        resources=spec.resources,
        placement=pod_placement(spec, settings),
        affinity=spec.placement.affinity,
        secrets=spec.secret_refs,
        service_account=spec.service_account_name,
        priority_class=spec.priority_class_name,
        grace=settings.grace_period,
        serving=serving,
        trainer_image=settings.trainer_image,
    )


def pod_placement(spec: StageSpec, settings: Settings) -> PodPlacement:
    """Return the placement of the stage's pod."""
    request = PlacementRequest(
        capacity=spec.placement.capacity,
        pool=spec.pool,
        gpu=spec.resources.gpu is not None,
        defaults=settings.placement_defaults,
        node_selector=spec.placement.node_selector,
        tolerations=spec.placement.tolerations,
    )
    return compose_placement(request)


def referenced_claims(config: StageConfig) -> tuple[str, ...]:
    """Return the names of all claims in pvc:// URIs of the config, sorted."""
    return tuple(sorted({found[1] for text in config.strings() if (found := CLAIM_URI.fullmatch(text))}))
