"""Build the Job of an attempt, which the Pod Security level restricted admits: pure."""

import math
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from pydantic import BaseModel

from finetune_operator.api.group import GROUP
from finetune_operator.api.stages.pod import Resources
from finetune_operator.api.stages.train import Train
from finetune_operator.core.job_template import JobTemplate
from finetune_operator.core.metadata import (
    ATTEMPT,
    COMPLETION_INDEX,
    PIPELINE,
    STAGE,
    STAGE_CONTAINER,
    headless_service_name,
)
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.kubernetes.resources.affinity import (
    affinity_avoiding,
    affinity_without,
)
from finetune_operator.kubernetes.resources.claim import claim_name
from finetune_operator.kubernetes.resources.owner_references import owner_references
from finetune_operator.kubernetes.translate.object import Object
from finetune_trainer.contract import environment as variables
from finetune_trainer.exit_codes import PERMANENT_EXIT_CODES

# A label holds only 63 characters.
PIPELINE_NAME = f"{GROUP}/pipeline-name"
"""Annotation: the whole name."""
WORKSPACE = PurePosixPath("/workspace")
CLAIMS = PurePosixPath("/claims")
TERMINATION_LOG = "/dev/termination-log"
METRICS_PORT = 8080
"""Port of /metrics and /progress, unless the stage's env sets another port; 0: no port."""
# A port has 16 bits; Kubernetes refuses a larger number.
MAX_PORT = 1 << 16
SHARED_MEMORY = "/dev/shm"  # noqa: S108  inside the pod
# Neither root nor an existing account. Volumes are group-writable through fsGroup.
USER = 65532
"""uid and gid of all containers."""
# The default of Kubernetes is five minutes, in which a GPU would stand still.
UNREACHABLE_SECONDS = 30
"""Time after which a pod is evicted from an unreachable node."""
RESTRICTED_SECURITY_CONTEXT: Object = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def build_job(pipeline: Pipeline, template: JobTemplate, notices: str = "") -> Object:
    """Build the Job of one attempt; a disruption of a pod fails it at once and leaves its evidence in a condition.

    `notices` is the cloud whose metadata endpoint a training process watches; empty: no endpoint is watched.
    """
    annotations = template.pod.annotations | {PIPELINE_NAME: pipeline.key.name}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": template.name,
            "namespace": pipeline.key.namespace,
            "labels": template.labels,
            "annotations": annotations,
            "ownerReferences": owner_references(pipeline),
        },
        "spec": {
            # The operator decides about each new attempt: a Job never starts its pod again.
            "backoffLimit": 0,
            **_completion(template),
            # Kubernetes allows no other value beside a podFailurePolicy.
            "podReplacementPolicy": "Failed",
            # The Job's condition names the rule that matched, and outlives the pod.
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onPodConditions": [
                            {"type": "DisruptionTarget", "status": "True"}
                        ],
                    },
                    {
                        "action": "FailJob",
                        "onExitCodes": {
                            "containerName": STAGE_CONTAINER,
                            "operator": "In",
                            "values": [*PERMANENT_EXIT_CODES],
                        },
                    },
                ]
            },
            "template": {
                "metadata": {
                    "labels": template.labels,
                    "annotations": template.placement.annotations | annotations,
                },
                "spec": pod_spec(pipeline, template, notices),
            },
        },
    }


def _completion(template: JobTemplate) -> Object:
    """Build the number of pods. If the first of several pods succeeds, the Job does, and the other pods end."""
    count = {"completions": template.pods, "parallelism": template.pods}
    if template.pods == 1:
        return count
    return {
        **count,
        "completionMode": "Indexed",
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
    }


def pod_spec(pipeline: Pipeline, template: JobTemplate, notices: str) -> Object:
    """Build the spec of the attempt's pod."""
    # The headless Service gives each pod of several a host name by which the others find it.
    service = headless_service_name(pipeline.key.name, template.stage)
    return {
        "restartPolicy": "Never",
        **common_pod_spec(template),
        **({"subdomain": service} if template.pods > 1 else {}),
        "containers": [_container(pipeline, template, notices)],
        "volumes": _volumes(pipeline, template),
    }


def common_pod_spec(template: JobTemplate) -> Object:
    """Build the part of the spec that pods of Jobs and of servers have in common."""
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(template.grace.total_seconds()),
        "securityContext": security_context(sets_user=template.sets_user),
        "nodeSelector": template.placement.node_selector,
        "tolerations": [
            *(_as_json(toleration) for toleration in template.placement.tolerations),
            *_unreachable_tolerations(),
        ],
        **_without_empty(
            affinity=affinity_avoiding(
                template.avoided_nodes,
                affinity_without(
                    template.placement.excluded_labels, template.pod.affinity
                ),
            ),
            topologySpreadConstraints=_spread(template),
            serviceAccountName=template.pod.service_account_name,
            priorityClassName=template.pod.priority_class_name,
            schedulerName=template.pod.scheduler_name,
            runtimeClassName=template.pod.runtime_class_name,
            imagePullSecrets=[
                _as_json(secret) for secret in template.pod.image_pull_secrets
            ],
        ),
    }


def _spread(template: JobTemplate) -> list[Object]:
    """Return the user's constraints for the pods of the attempt: without a selector they would count no pod."""
    own = {name: template.labels[name] for name in (PIPELINE, STAGE, ATTEMPT)}
    return [
        {**_as_json(constraint), "labelSelector": {"matchLabels": own}}
        for constraint in template.pod.topology_spread_constraints
    ]


def security_context(*, sets_user: bool) -> Object:
    """Return the pod's security context that the Pod Security level restricted requires.

    OpenShift's restricted-v2 admits no user but a user of the namespace's range, which it sets itself.
    """
    user: Object = {}
    if sets_user:
        user = {"runAsUser": USER, "runAsGroup": USER, "fsGroup": USER}
    return {
        "runAsNonRoot": True,
        **user,
        # Always would walk over all checkpoints at each start.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _container(pipeline: Pipeline, template: JobTemplate, notices: str) -> Object:
    defaults = {"PYTHONUNBUFFERED": "1", variables.METRICS_PORT: str(METRICS_PORT)}
    own = {
        **_path_variables(),
        variables.PIPELINE_UID: pipeline.uid,
        variables.ATTEMPT: str(template.attempt),
        variables.MAX_SILENCE_SECONDS: str(template.max_silence_seconds),
    }
    if notices and template.stage == Train.name:
        own[variables.INTERRUPTION_NOTICES] = notices
    gpus = template.pod.resources.accelerators
    if gpus:
        # Without it the trainer would silently use the CPU if the GPU cannot be used.
        own[variables.GPUS] = str(gpus)
    if template.pruning:
        own |= template.pruning.variables()
    if template.pods > 1:
        service = headless_service_name(pipeline.key.name, template.stage)
        own[variables.MASTER_ADDRESS] = f"{template.name}-0.{service}"
    mounts: list[Object] = [
        {"name": "workspace", "mountPath": str(WORKSPACE)},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
        *shared_memory_mounts(template),
        *user_mounts(template),
    ]
    mounts += [
        {"name": _volume_of(claim, pipeline, number), "mountPath": str(CLAIMS / claim)}
        | _read_only(claim, pipeline, template)
        for number, claim in enumerate(template.claims)
    ]
    return {
        "name": STAGE_CONTAINER,
        **image_of(template),
        "command": [escape_expansion(word) for word in template.command],
        **_with_node_rank(template, environment_of(template, defaults, own)),
        "ports": _ports(template),
        "resources": resources_of(template.pod.resources),
        "securityContext": RESTRICTED_SECURITY_CONTEXT,
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "File",
        "volumeMounts": mounts,
    }


def _with_node_rank(template: JobTemplate, environment: Object) -> Object:
    """Return the environment with the pod's index, which only Kubernetes knows."""
    if template.pods == 1:
        return environment
    index = {"fieldRef": {"fieldPath": f"metadata.annotations['{COMPLETION_INDEX}']"}}
    return {
        **environment,
        "env": [*environment["env"], {"name": variables.NODE_RANK, "valueFrom": index}],
    }


def shared_memory_volumes(template: JobTemplate) -> list[Object]:
    """Return the volume for /dev/shm; none for a pod whose processes exchange nothing there.

    Data loaders and NCCL exchange tensors there, and a container runtime gives it 64 MiB only. Without a limit it is as
    large as the pod's memory. The content counts against the memory limit of the container.
    """
    if not template.shares_memory:
        return []
    source: Object = {"medium": "Memory"}
    if template.pod.shared_memory:
        source["sizeLimit"] = template.pod.shared_memory
    return [{"name": "shm", "emptyDir": source}]


def shared_memory_mounts(template: JobTemplate) -> list[Object]:
    """Return the mount of that volume."""
    return [
        {"name": volume["name"], "mountPath": SHARED_MEMORY}
        for volume in shared_memory_volumes(template)
    ]


def user_volumes(template: JobTemplate) -> list[Object]:
    """Return the volumes that the user adds."""
    return [_as_json(volume) for volume in template.pod.volumes]


def user_mounts(template: JobTemplate) -> list[Object]:
    """Return the mounts of these volumes."""
    return [
        {**_as_json(mount), "readOnly": True} for mount in template.pod.volume_mounts
    ]


def _ports(template: JobTemplate) -> list[Object]:
    """Return the port of /metrics, which Prometheus finds by its name; none if the environment has no number."""
    for variable in template.pod.env:
        # The kubelet resolves a reference: the operator does not know the value.
        if variable.name == variables.METRICS_PORT and variable.value_from:
            return []
    text = template.env.get(variables.METRICS_PORT, str(METRICS_PORT))
    # isdigit alone accepts characters such as ², which int refuses.
    if not (text.isascii() and text.isdigit()):
        return []
    number = int(text)
    if not 0 < number < MAX_PORT:
        return []
    return [{"name": "metrics", "containerPort": number}]


def image_of(template: JobTemplate) -> Object:
    """Build the fields of the stage's image."""
    return {
        "image": template.image,
        **_without_empty(imagePullPolicy=template.pod.image_pull_policy),
    }


def environment_of(
    template: JobTemplate, defaults: Mapping[str, str], own: Mapping[str, str]
) -> Object:
    """Build env and envFrom: the user's variables replace `defaults`, and `own` replaces the user's."""
    values = {**defaults, **template.env, **own}
    references = {
        variable.name: _as_json(variable)
        for variable in template.pod.env
        if variable.value_from and variable.name not in own
    }
    literal = {
        name: {"name": name, "value": escape_expansion(value)}
        for name, value in values.items()
    }
    return {
        "env": [entry for _, entry in sorted((literal | references).items())],
        "envFrom": [_as_json(source) for source in template.pod.env_from],
    }


def escape_expansion(text: str) -> str:
    """Escape $, so that a manifest means the same in a local run: the kubelet expands $(NAME) and reads $$ as $."""
    return text.replace("$", "$$")


def _path_variables() -> dict[str, str]:
    return {
        variables.WORKSPACE: str(WORKSPACE),
        variables.CLAIMS: str(CLAIMS),
        variables.TERMINATION_LOG: TERMINATION_LOG,
    }


def _volume_of(claim: str, pipeline: Pipeline, number: int) -> str:
    # A claim is one volume of a pod, even if it is mounted twice.
    if claim == claim_name(pipeline):
        return "workspace"
    return f"claim-{number}"


def _volumes(pipeline: Pipeline, template: JobTemplate) -> list[Object]:
    claims = {"workspace": claim_name(pipeline)}
    claims |= {
        _volume_of(claim, pipeline, number): claim
        for number, claim in enumerate(template.claims)
    }
    volumes: list[Object] = [
        {
            "name": volume,
            "persistentVolumeClaim": {"claimName": claim}
            | _read_only(claim, pipeline, template),
        }
        for volume, claim in claims.items()
    ]
    shared_memory = shared_memory_volumes(template)
    return [
        *volumes,
        {"name": "tmp", "emptyDir": {}},
        *shared_memory,
        *user_volumes(template),
    ]


def _read_only(claim: str, pipeline: Pipeline, template: JobTemplate) -> Object:
    """Return readOnly for a claim that the stage does not write to.

    A read-only volume also keeps its owners and permissions: the kubelet applies fsGroup to all others.
    """
    written = claim == claim_name(pipeline) or claim in template.written_claims
    if written:
        return {}
    return {"readOnly": True}


def resources_of(resources: Resources) -> Object:
    """Build a container's resources."""
    return _without_empty(requests=resources.requests, limits=resources.limits)


def _as_json(model: BaseModel) -> Object:
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)


def _unreachable_tolerations() -> list[Object]:
    return [
        {
            "key": f"node.kubernetes.io/{condition}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": UNREACHABLE_SECONDS,
        }
        for condition in ("not-ready", "unreachable")
    ]


def _without_empty(**fields: Any) -> Object:
    return {name: value for name, value in fields.items() if value}
