"""Why an attempt's process has not started or cannot end, and how to mend it: pure."""

import re
from datetime import datetime, timedelta

from finetune_operator.api.conditions import Reason
from finetune_operator.core.observation import Blocker
from finetune_operator.kubernetes.translate.pod import Pod

NODE_LOST_AFTER = timedelta(seconds=60)
"""Beyond its grace period, a pod whose node answers is gone."""
_IMAGE_ERRORS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
)
_STARTING = frozenset({"ContainerCreating", "PodInitializing", ""})


def diagnose(pod: Pod | None, warning: str, now: datetime) -> Blocker | None:
    """Name the first thing that holds it up; `warning` is the newest that was said about the Job or its pod."""
    if pod is None:
        return _pod_not_created(warning) if warning else None
    return _node_lost(pod, now) or _unscheduled(pod) or _not_started(pod, warning)


def _pod_not_created(warning: str) -> Blocker:
    """Translate what the Job controller could not do."""
    if "exceeded quota" in warning:
        return Blocker(Reason.WAITING_FOR_QUOTA, f"{warning}; it starts when others have finished or the quota grows")
    if "PodSecurity" in warning:
        return Blocker(Reason.POD_REFUSED, f"{warning}; the namespace's policy allows less than the stage needs")
    if re.search(r"serviceaccount .* not found", warning):
        return Blocker(Reason.DEPENDENCY_NOT_READY, f"{warning}; create it, or take serviceAccountName out")
    if "PriorityClass" in warning:
        return Blocker(Reason.DEPENDENCY_NOT_READY, f"{warning}; create it, or take priorityClassName out")
    return Blocker(Reason.POD_REFUSED, warning)


def _node_lost(pod: Pod, now: datetime) -> Blocker | None:
    if pod.gone or pod.deleted_at is None or now < pod.deleted_at + NODE_LOST_AFTER:
        return None
    return Blocker(
        Reason.NODE_LOST,
        f"its node {pod.node} does not answer, so nobody knows whether it still runs: delete the Node object, as a "
        f"cloud does with a machine that is gone, or, if it is surely off, `kubectl delete pod {pod.name} --force`",
    )


def _unscheduled(pod: Pod) -> Blocker | None:
    scheduled = pod.condition("PodScheduled")
    if scheduled.get("status") != "False":
        return None
    said = str(scheduled.get("message") or "no node takes it")
    if (
        "ersistent" in said
    ):  # persistentvolumeclaim … not found; unbound PersistentVolumeClaims; PersistentVolume's affinity
        mend = "look at `kubectl describe pvc`: its class must exist and provision, and its zone must have nodes"
        return Blocker(Reason.VOLUME_NOT_READY, f"{said}; {mend}")
    lacking = sorted(set(re.findall(r"Insufficient ([\w.-]+/[\w-]+)", said)))
    mend = f"; no node has {' or '.join(lacking)} to spare: is its device plugin running?" if lacking else ""
    return Blocker(Reason.WAITING_FOR_CAPACITY, said + mend)


def _not_started(pod: Pod, warning: str) -> Blocker | None:
    if pod.finished or pod.started_at:
        return None
    reason, message = str(pod.waiting.get("reason") or ""), str(pod.waiting.get("message") or "")
    if reason in _IMAGE_ERRORS:
        mend = "check the stage's image, and that its registry can be reached and lets the nodes in"
        return Blocker(Reason.IMAGE_PULL_FAILED, f"{message or warning or reason}; {mend}")
    if reason == "CreateContainerConfigError" and "secret" in message:
        return Blocker(Reason.SECRET_NOT_FOUND, f"{message}; create it in this namespace, or take it out of secretRefs")
    if reason not in _STARTING:
        return Blocker(Reason.CONTAINER_NOT_STARTED, f"{reason}: {message}".rstrip(": "))
    if re.search("(?i)volume|mount", warning):
        return Blocker(Reason.VOLUME_NOT_READY, warning)
    return None
