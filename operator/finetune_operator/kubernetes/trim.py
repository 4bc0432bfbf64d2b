"""What the operator reads of an object, and nothing else: pure.

The cache stores only this, and a change of anything else wakes no pipeline.
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
from finetune_trainer.contract.environment import METRICS_PORT

Object = dict[str, Any]
JOB_NAME = "batch.kubernetes.io/job-name"
_LABELS = (SERVER, STAGE, IDENTITY, JOB_NAME, COMPLETION_INDEX)
_METADATA = ("name", "namespace", "uid", "creationTimestamp", "deletionTimestamp")
_TERMINATED = ("exitCode", "reason", "message", "startedAt", "finishedAt")
_JOB_CONDITIONS = frozenset({"Complete", "Failed"})
_POD_CONDITIONS = frozenset({"PodScheduled", "Ready", "DisruptionTarget"})
_CONDITION = ("type", "status", "reason", "message", "lastTransitionTime")


def trim_job(found: Object) -> Object:
    """Return a Job's owner, claims, number of pods, and the conditions that show that it has ended."""
    ended = (one for one in _conditions(found, _JOB_CONDITIONS) if one["status"] == "True")
    spec = found.get("spec") or {}
    template = spec.get("template") or {}
    return {
        "metadata": trim_metadata(found),
        "claims": claims_of(template.get("spec") or {}),
        "spec": _pick(spec, ("completions",)),
        "status": {"conditions": list(ended)},
    }


def trim_pod(found: Object) -> Object:
    """Return how a pod starts, runs and ends, its memory limit, and where its progress is read."""
    spec, status = found.get("spec") or {}, found.get("status") or {}
    states = {
        kind: [_container_status(one) for one in status.get(kind) or []]
        for kind in ("containerStatuses", "initContainerStatuses")
    }
    return {
        "metadata": trim_metadata(found),
        "claims": claims_of(spec),
        "spec": {"nodeName": spec.get("nodeName") or "", "containers": _stage_container(spec)},
        "status": {
            **_pick(status, ("phase", "podIP", "reason", "message")),
            **states,
            "conditions": _conditions(found, _POD_CONDITIONS),
        },
    }


def trim_deployment(found: Object) -> Object:
    """Return whether a server's Deployment has ready pods, and why it cannot create them."""
    status = found.get("status") or {}
    return {
        "metadata": trim_metadata(found),
        "spec": {"replicas": (found.get("spec") or {}).get("replicas", 1)},
        "status": {
            "readyReplicas": status.get("readyReplicas") or 0,
            "conditions": _conditions(found, frozenset({"ReplicaFailure"})),
        },
    }


def trim_service(found: Object) -> Object:
    """Return a Service's owner and selector."""
    return {
        "metadata": trim_metadata(found),
        "spec": {"selector": (found.get("spec") or {}).get("selector") or {}},
    }


def trim_claim(found: Object) -> Object:
    """Return a claim's owners, size, class and access modes."""
    spec = _pick(found.get("spec") or {}, ("accessModes", "storageClassName", "resources"))
    return {"metadata": trim_metadata(found), "spec": spec}


def trim_metadata(found: Object) -> Object:
    """Return the metadata that the operator reads; ownerReferences whole, because a patch replaces all of them."""
    meta = found["metadata"]
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
    volumes = (one.get("persistentVolumeClaim") or {} for one in pod_spec.get("volumes") or [])
    return sorted(
        str(one["claimName"]) for one in volumes if "claimName" in one and not one.get("readOnly")
    )


def _stage_container(spec: Object) -> list[Object]:
    containers = (one for one in spec.get("containers") or [] if one.get("name") == STAGE_CONTAINER)
    return [
        {
            "name": STAGE_CONTAINER,
            "env": [_pick(v, ("name", "value")) for v in one.get("env") or [] if _is_port(v)],
            "resources": {
                "limits": _pick((one.get("resources") or {}).get("limits") or {}, ("memory",))
            },
        }
        for one in containers
    ]


def _is_port(variable: Object) -> bool:
    return bool(variable.get("name") == METRICS_PORT)


def _container_status(one: Object) -> Object:
    return {
        **_pick(one, ("name", "restartCount")),
        "state": _container_state(one.get("state") or {}),
        "lastState": _container_state(one.get("lastState") or {}),
    }


def _container_state(state: Object) -> Object:
    fields = {
        "waiting": ("reason", "message"),
        "running": ("startedAt",),
        "terminated": _TERMINATED,
    }
    return {kind: _pick(state[kind], names) for kind, names in fields.items() if state.get(kind)}


def _conditions(found: Object, kinds: frozenset[str]) -> list[Object]:
    conditions = (found.get("status") or {}).get("conditions") or []
    return [_pick(one, _CONDITION) for one in conditions if one.get("type") in kinds]


def _pick(found: Mapping[str, Any], names: Iterable[str]) -> Object:
    return {name: found[name] for name in names if name in found}
