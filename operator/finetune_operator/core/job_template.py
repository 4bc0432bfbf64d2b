"""The Job of one attempt, independent of whether Kubernetes or a local process runs it."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from finetune_operator.api.placement import ON_DEMAND, PlacementDefaults
from finetune_operator.api.stages.base import Serving, StageSpec
from finetune_operator.api.stages.pod import Pod
from finetune_operator.api.status import AttemptStatus
from finetune_operator.core.attempts.suspect_nodes import NO_NODES, AvoidedNodes
from finetune_operator.core.capacity.nodes import PodPlacement, pod_placement
from finetune_operator.core.metadata import job_labels
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.core.settings import Settings
from finetune_trainer.contract import Pruning, StageConfig
from finetune_trainer.contract.environment import CONFIG

TRAINER = ("python", "-P", "-m", "finetune_trainer")
"""-P keeps the working directory out of sys.path, so that no file there shadows a library."""
REQUIRED_AFFINITY = "requiredDuringSchedulingIgnoredDuringExecution"
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
    """The user's literal variables and the stage's config. The cluster adds the others and those for mount paths."""
    claims: tuple[str, ...]
    """Claims that the config references, besides the workspace."""
    written_claims: tuple[str, ...]
    """The claims that the stage writes to. The other claims are mounted read-only."""
    pods: int
    """Pods of the attempt."""
    pod: Pod
    """The user's pod. Image, command, args, labels and placement above and below are made from it."""
    placement: PodPlacement
    sets_user: bool
    """Whether the pod names its user and groups."""
    grace: timedelta
    """Time from SIGTERM to SIGKILL."""
    max_silence_seconds: int
    """Time without a sign of work after which the process ends itself; 0: never."""
    shares_memory: bool
    """Whether the pod has a volume of memory at /dev/shm."""
    serving: Serving | None
    """The server that keeps running after the attempt, on a cluster. None: the stage has none."""
    verifier_image: str
    """Image of the trainer that verifies the model before a server starts, even if the server runs another image."""
    avoided_nodes: AvoidedNodes = NO_NODES
    """Nodes on which earlier attempts have ended again and again."""
    pruning: Pruning | None = None
    """Which results the process leaves in the workspace. None: all."""


ZONE_LABELS = ("topology.kubernetes.io/region", "topology.kubernetes.io/zone")
"""Labels of nodes that say where a volume can be mounted."""


def job_template(
    pipeline: Pipeline,
    spec: StageSpec,
    config: StageConfig,
    attempt: AttemptStatus,
    settings: Settings,
) -> JobTemplate:
    """Return the Job of an attempt of the stage, on the nodes that are recorded for it.

    The defaults of the settings lie below the stage's pod here and not in the spec, so that no hash contains them.
    """
    spec = spec.over(settings.defaults.pod_defaults)
    if not spec.runs_server:
        spec = spec.over(settings.job_defaults)
    config_json = config.model_dump_json(by_alias=True, exclude_none=True)
    serving = spec.serving(config)
    pod = spec.pod
    own_labels = job_labels(
        pipeline.key.name, spec.name, attempt.number, config.identity
    )
    engine = serving.engine if serving else None
    image = pod.image or settings.image_of(engine, pod)
    command: tuple[str, ...] = (*TRAINER, spec.name)
    if pod.command:
        command = (*pod.command, *pod.args)
    # The node of a server with the trainer's own image has that image already.
    verifier_image = (
        image if image == settings.trainer_image else settings.trainer_cpu_image
    )
    return JobTemplate(
        name=attempt.job,
        labels=pod.labels | own_labels,
        stage=spec.name,
        attempt=attempt.number,
        identity=config.identity,
        image=image,
        command=command,
        args=pod.args,
        # The config is last, so that the user's variables cannot replace it.
        env={**pod.literal_env(), CONFIG: config_json},
        claims=referenced_claims(config),
        written_claims=claims_of(config.written_uris()),
        pods=spec.pods,
        pod=pod,
        placement=_in_zone_of_later_stages(
            pipeline, _placement(spec, attempt, settings), spec, settings
        ),
        sets_user=settings.sets_user,
        grace=_grace(pod, settings),
        max_silence_seconds=spec.max_silence_seconds,
        shares_memory=spec.shares_memory,
        serving=serving,
        verifier_image=verifier_image,
    )


def _grace(pod: Pod, settings: Settings) -> timedelta:
    if pod.termination_grace_period_seconds is None:
        return settings.grace_period
    return timedelta(seconds=pod.termination_grace_period_seconds)


def _placement(
    spec: StageSpec, attempt: AttemptStatus, settings: Settings
) -> PodPlacement:
    if settings.placement_defaults is None:
        return PodPlacement()
    capacity = attempt.capacity or ON_DEMAND
    return pod_placement(
        spec, capacity, attempt.node_class or "", settings.placement_defaults
    )


def _in_zone_of_later_stages(
    pipeline: Pipeline, placement: PodPlacement, spec: StageSpec, settings: Settings
) -> PodPlacement:
    """Return the placement of the first stage in the zone that a later stage asks for.

    Its pod is the first with the volume, and binds it in its own zone.
    """
    if settings.placement_defaults is None or spec.needs:
        return placement
    for stage in pipeline.spec.stages().values():
        later = stage.over(settings.defaults.pod_defaults)
        zone = _zone_of(later, settings.placement_defaults)
        # A server has no volume of the pipeline.
        if zone and later.needs and not later.runs_server:
            selector = {**zone, **placement.node_selector}
            return replace(placement, node_selector=selector)
    return placement


def _zone_of(spec: StageSpec, defaults: PlacementDefaults) -> dict[str, str]:
    """Return the label of the zone that a stage asks for: by its pod's selector or affinity, or by its pool."""
    selector = pod_placement(spec, spec.placement.capacity, "", defaults).node_selector
    labels = {**_required_labels(spec.pod.affinity), **selector}
    return {label: value for label, value in labels.items() if label in ZONE_LABELS}


def _required_labels(affinity: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels of which an affinity requires a single value."""
    required = (affinity.get("nodeAffinity") or {}).get(REQUIRED_AFFINITY) or {}
    terms = required.get("nodeSelectorTerms") or []
    # Of several terms, any may hold.
    if len(terms) != 1:
        return {}
    return {
        expression["key"]: expression["values"][0]
        for expression in terms[0].get("matchExpressions") or []
        if expression.get("operator") == "In" and len(expression["values"]) == 1
    }


def referenced_claims(config: StageConfig) -> tuple[str, ...]:
    """Return the names of all claims in pvc:// URIs of the config, sorted."""
    return claims_of(config.strings())


def claims_of(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the claims that the texts name as pvc:// URIs, sorted."""
    matches = [CLAIM_URI.fullmatch(text) for text in texts]
    return tuple(sorted({match[1] for match in matches if match}))
