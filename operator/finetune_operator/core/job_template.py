"""The Job of one attempt, in words that a cluster and a laptop both understand."""

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
"""-P: what lies in the working folder is not importable, so that no file there takes a library's place."""
CLAIM_URI = re.compile(r"pvc://([a-z0-9][a-z0-9.-]*)(/\S*)?")
"""A whole URI; a prompt or an argument may begin like one and be none."""


@dataclass(frozen=True)
class JobTemplate:
    """One attempt; a value, so that making it twice makes the same."""

    name: str
    labels: dict[str, str]
    stage: str
    attempt: int
    identity: str
    image: str
    command: tuple[str, ...]
    args: tuple[str, ...]
    """The user's, which are the end of the command too."""
    env: dict[str, str]
    """The user's variables and the stage's config; where things are mounted is the cluster's to add."""
    claims: tuple[str, ...]
    """Claims besides the workspace that the config names."""
    resources: Resources
    placement: PodPlacement
    affinity: dict[str, Any]
    secrets: tuple[str, ...]
    """Secrets whose keys become environment variables."""
    service_account: str | None
    priority_class: str | None
    grace: timedelta
    serving: Serving | None
    """What goes on running after the attempt, where the cluster can keep it."""
    trainer_image: str
    """Of the trainer, also where the stage runs another image."""


def job_template(
    pipeline: Pipeline, spec: StageSpec, config: StageConfig, attempt: int, settings: Settings
) -> JobTemplate:
    """Write the Job of a stage's attempt."""
    text = config.model_dump_json(by_alias=True, exclude_none=True)
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
        env={**spec.env, names.CONFIG: text},
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
    """Ask the stage's capacity class where its pod may run."""
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
    """Name every claim that a pvc:// URI of the config speaks of."""
    return tuple(sorted({found[1] for text in config.strings() if (found := CLAIM_URI.fullmatch(text))}))
