"""Reduce objects to the fields that the operator reads: pure.

The cache stores only these fields, and a change of any other field wakes no pipeline.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from finetune_operator.api.group import GROUP
from finetune_operator.core.metadata import (
    COMPLETION_INDEX,
    IDENTITY,
    SERVER,
    STAGE,
    STAGE_CONTAINER,
)
from finetune_operator.kubernetes.translate.object import Object
from finetune_operator.kubernetes.translate.suspension import CONDITION
from finetune_trainer.contract.environment import METRICS_PORT

JOB_NAME = "batch.kubernetes.io/job-name"
_LABELS = (SERVER, STAGE, IDENTITY, JOB_NAME, COMPLETION_INDEX)
_DELETION = ("deletionTimestamp", "deletionGracePeriodSeconds")
_METADATA = ("name", "namespace", "uid", "creationTimestamp", *_DELETION)
_TERMINATED = ("exitCode", "reason", "message", "startedAt", "finishedAt")
_END_CONDITIONS = frozenset({"Complete", "Failed"})
_POD_CONDITIONS = frozenset({"PodScheduled", "Ready", "DisruptionTarget"})
_CONDITION = ("type", "status", "reason", "message", "lastTransitionTime")


def trim_job(job: Object) -> Object:
    """Return a Job's owner, claims, number of pods, and the conditions of its end and of its suspension."""
    conditions = _conditions(job, _END_CONDITIONS | {CONDITION})
    spec = job.get("spec") or {}
    template = spec.get("template") or {}
    return {
        "metadata": trim_metadata(job),
        "claims": claims_of(template.get("spec") or {}),
        "spec": _pick(spec, ("completions", "suspend")),
        "status": {
            "conditions": [
                condition
                for condition in conditions
                if condition["status"] == "True" or condition["type"] == CONDITION
            ]
        },
    }


def trim_pod(pod: Object) -> Object:
    """Return the state of a pod, its node, its memory limit, and the address of its progress."""
    spec = pod.get("spec") or {}
    status = pod.get("status") or {}
    states = {
        kind: [_container_status(container) for container in status.get(kind) or []]
        for kind in ("containerStatuses", "initContainerStatuses")
    }
    return {
        "metadata": trim_metadata(pod),
        "claims": claims_of(spec),
        "spec": {
            "nodeName": spec.get("nodeName") or "",
            **_pick(spec, ("schedulerName",)),
            "containers": _stage_container(spec),
        },
        "status": {
            **_pick(status, ("phase", "podIP", "reason", "message")),
            **states,
            "conditions": _conditions(pod, _POD_CONDITIONS),
        },
    }


def trim_deployment(deployment: Object) -> Object:
    """Return whether a server's Deployment has ready pods, and why it cannot create them."""
    status = deployment.get("status") or {}
    return {
        "metadata": trim_metadata(deployment),
        # The API server's default.
        "spec": {"replicas": (deployment.get("spec") or {}).get("replicas", 1)},
        "status": {
            # Absent while it is 0.
            "readyReplicas": status.get("readyReplicas") or 0,
            "replicas": status.get("replicas") or 0,
            "conditions": _conditions(deployment, frozenset({"ReplicaFailure"})),
        },
    }


def trim_service(service: Object) -> Object:
    """Return a Service's owner and selector."""
    return {
        "metadata": trim_metadata(service),
        "spec": {"selector": (service.get("spec") or {}).get("selector") or {}},
    }


def trim_claim(claim: Object) -> Object:
    """Return a claim's owners, size, class, access modes and phase."""
    spec = _pick(
        claim.get("spec") or {}, ("accessModes", "storageClassName", "resources")
    )
    status = _pick(claim.get("status") or {}, ("phase",))
    return {"metadata": trim_metadata(claim), "spec": spec, "status": status}


def trim_metadata(raw: Object) -> Object:
    """Return the metadata that the operator reads; all ownerReferences, because a patch replaces all of them."""
    meta = raw["metadata"]
    # Others may be large: kubectl keeps a copy of the whole object in one.
    own = {
        name: value
        for name, value in (meta.get("annotations") or {}).items()
        if name.startswith(f"{GROUP}/")
    }
    labels = _pick(meta.get("labels") or {}, _LABELS)
    return {
        **_pick(meta, _METADATA),
        "labels": labels,
        "annotations": own,
        "ownerReferences": meta.get("ownerReferences") or [],
    }


def claims_of(pod_spec: Object) -> list[str]:
    """Return the claims that a pod mounts for writing."""
    volumes = pod_spec.get("volumes") or []
    # A volume that is mounted read-only has no writer, and keeps no pipeline waiting.
    mounts = [volume.get("persistentVolumeClaim") or {} for volume in volumes]
    return sorted(
        str(mount["claimName"])
        for mount in mounts
        if "claimName" in mount and not mount.get("readOnly")
    )


def _stage_container(spec: Object) -> list[Object]:
    trimmed: list[Object] = []
    for container in spec.get("containers") or []:
        # Other containers say nothing about the attempt.
        if container.get("name") != STAGE_CONTAINER:
            continue
        limits = (container.get("resources") or {}).get("limits") or {}
        environment = [
            _pick(variable, ("name", "value"))
            for variable in container.get("env") or []
            if variable.get("name") == METRICS_PORT
        ]
        trimmed.append(
            {
                "name": STAGE_CONTAINER,
                "env": environment,
                "resources": {"limits": _pick(limits, ("memory", "ephemeral-storage"))},
            }
        )
    return trimmed


def _container_status(status: Object) -> Object:
    return {
        **_pick(status, ("name", "restartCount", "started")),
        "state": _container_state(status.get("state") or {}),
        "lastState": _container_state(status.get("lastState") or {}),
    }


def _container_state(state: Object) -> Object:
    fields = {
        "waiting": ("reason", "message"),
        "running": ("startedAt",),
        "terminated": _TERMINATED,
    }
    return {
        kind: _pick(state[kind], names)
        for kind, names in fields.items()
        if state.get(kind)
    }


def _conditions(raw: Object, kinds: frozenset[str]) -> list[Object]:
    conditions = (raw.get("status") or {}).get("conditions") or []
    return [
        _pick(condition, _CONDITION)
        for condition in conditions
        if condition.get("type") in kinds
    ]


def _pick(fields: Mapping[str, Any], names: Iterable[str]) -> Object:
    return {name: fields[name] for name in names if name in fields}
