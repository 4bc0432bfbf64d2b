"""A pod in the cache, as a trimmed object: who it belongs to, and which of its changes matter: pure."""

from datetime import datetime

from finetune_operator.core.metadata import SERVER
from finetune_operator.kubernetes.cache.store import NamespacedName
from finetune_operator.kubernetes.cache.trim import JOB_NAME
from finetune_operator.kubernetes.translate.diagnose import STARTING
from finetune_operator.kubernetes.translate.object import Object
from finetune_operator.kubernetes.translate.pod import (
    DELETION_SEEN_AT,
    END_SEEN_AT,
    ObservedPod,
)
from finetune_operator.kubernetes.translate.sidecars import sidecar_blocker


def pod_of(raw: Object) -> ObservedPod:
    """Return the pod of a trimmed object; its field `gone` says that the pod was deleted."""
    return ObservedPod(raw, bool(raw.get("gone")))


def job_of(raw: Object) -> list[NamespacedName]:
    """Return the name of the pod's Job; an empty list for the pod of a server."""
    job = raw["metadata"]["labels"].get(JOB_NAME)
    if not job:
        return []
    return [(raw["metadata"]["namespace"], job)]


def server_of(raw: Object) -> list[NamespacedName]:
    """Return the name of the pod's Deployment; an empty list for the pod of a Job."""
    server = raw["metadata"]["labels"].get(SERVER)
    if not server:
        return []
    return [(raw["metadata"]["namespace"], server)]


def controller_of(raw: Object) -> Object:
    """Return the owner reference of the controller that created the pod; empty for a pod without a controller."""
    for reference in raw["metadata"].get("ownerReferences") or []:
        if reference.get("controller"):
            owner: Object = reference
            return owner
    return {}


def is_of_attempt(raw: Object) -> bool:
    """Return whether the controller of an attempt's Job or Deployment created the pod.

    A label alone proves nothing: any user of the namespace can set it.
    """
    labels = raw["metadata"]["labels"]
    return _is_created_by_job(raw, labels.get(JOB_NAME)) or _is_created_by_replica_set(
        raw, labels.get(SERVER)
    )


def _is_created_by_job(raw: Object, name: str | None) -> bool:
    return bool(name) and _controller_name(raw, "Job") == name


def _is_created_by_replica_set(raw: Object, deployment: str | None) -> bool:
    # A Deployment adds a hash to its own name for each of its ReplicaSets.
    return bool(deployment) and _controller_name(raw, "ReplicaSet").startswith(
        f"{deployment}-"
    )


def _controller_name(raw: Object, kind: str) -> str:
    for reference in raw["metadata"].get("ownerReferences") or []:
        if reference.get("controller") and reference["kind"] == kind:
            return str(reference["name"])
    return ""


def merge_pod(known: Object | None, received: Object, now: datetime) -> Object:
    """Return the received pod with what only the known pod has: its end, and the operator's times of what it saw."""
    pod = _with_deletion_time(known, _with_known_end(known, received), now)
    return _with_end_time(known, pod, now)


def _with_known_end(known: Object | None, received: Object) -> Object:
    """Return the received pod, or the known pod if only the known pod has its end.

    A container of an attempt does not restart, so a version without its end is older.
    """
    if known is None or known["metadata"]["uid"] != received["metadata"]["uid"]:
        return received
    has_lost_end = (
        pod_of(known).exit_code is not None and pod_of(received).exit_code is None
    )
    if not has_lost_end:
        return received
    if received.get("gone"):
        return {**known, "gone": True}
    return known


def _with_deletion_time(known: Object | None, pod: Object, now: datetime) -> Object:
    """Return the pod with the operator's time at which it first saw this deletion, if the pod is being deleted."""
    deletion = pod["metadata"].get("deletionTimestamp")
    if deletion is None:
        return pod
    seen = now
    # Another deletion of the same pod may have a shorter grace period, which begins anew.
    if known and _deletion_of(known) == _deletion_of(pod):
        seen = known[DELETION_SEEN_AT]
    return {**pod, DELETION_SEEN_AT: seen}


def _with_end_time(known: Object | None, pod: Object, now: datetime) -> Object:
    """Return the pod with the operator's time at which it first saw that the process had ended, but not the pod."""
    observed = pod_of(pod)
    if observed.exit_code is None or observed.finished:
        return pod
    seen = now
    if known and known["metadata"]["uid"] == observed.uid:
        seen = known.get(END_SEEN_AT, now)
    return {**pod, END_SEEN_AT: seen}


def _deletion_of(raw: Object) -> tuple[str, str | None]:
    """Return what tells one deletion of a pod from another: its uid and the time that the API server has set."""
    meta = raw["metadata"]
    return meta["uid"], meta.get("deletionTimestamp")


def urgent_facts(raw: Object | None) -> tuple[object, ...]:
    """Return the facts about a pod that change what the operator does, or what it must report at once."""
    pod = pod_of(raw or {"metadata": {}, "spec": {}, "status": {}})
    scheduled = pod.condition("PodScheduled")
    unschedulable = (
        scheduled.get("message") if scheduled.get("status") == "False" else None
    )
    # A container that is only being created waits for nothing that a user could change.
    waiting = pod.waiting
    obstacle = waiting if waiting.get("reason") not in STARTING else None
    # Readiness and restarts matter for servers only.
    is_server = bool(raw and SERVER in raw["metadata"]["labels"])
    return (
        pod.finished,
        pod.exit_code,
        pod.disruption,
        pod.deleted_at is not None,
        pod.termination_text,
        unschedulable,
        obstacle,
        (pod.ready, pod.restarts) if is_server else None,
        sidecar_blocker(pod),
    )


def age_order(raw: Object) -> tuple[str, str]:
    """Return the sort key of a pod, the oldest first; pods of the same second are in the order of their names."""
    return str(raw["metadata"].get("creationTimestamp") or ""), raw["metadata"]["name"]
