"""Why an attempt's process has not started or cannot end, and how to fix it: pure."""

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta

from finetune_operator.api.conditions import Reason
from finetune_operator.core.observation import Blocker
from finetune_operator.kubernetes.translate.attempt_pods import AttemptPods
from finetune_operator.kubernetes.translate.object import Object
from finetune_operator.kubernetes.translate.pod import ObservedPod, time_of
from finetune_operator.kubernetes.translate.sidecars import sidecar_blocker
from finetune_operator.kubernetes.translate.start_errors import (
    container_not_started,
    pod_not_created,
    pod_not_started,
)

# A reachable kubelet has removed the pod by then.
NODE_LOST_AFTER = timedelta(seconds=60)
"""Time past a pod's grace period after which its node counts as lost."""
# Under much load each of them may take a minute.
ATTENDED_WITHIN = timedelta(minutes=2)
"""Time in which a scheduler has looked at a pod, and the controllers have created the pods of a Job or deleted it."""
ABSENT_CLAIM = re.compile(r'persistentvolumeclaim "([^"]+)" not found')
_IMAGE_ERRORS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "RegistryUnavailable",
    }
)
# Older schedulers say volume node affinity conflict, newer ones PersistentVolume's node affinity.
ZONAL = re.compile(r"volume node affinity conflict|PersistentVolume's node affinity")
ZONE_FIX = (
    "an earlier stage has bound the volume in another zone than the nodes that have room: set "
    "topology.kubernetes.io/zone in podDefaults.nodeSelector to this stage's zone, back up what you need, and delete "
    "the claim; all stages then run again"
)
STARTING = frozenset({"ContainerCreating", "PodInitializing", "", None})
"""Reasons of a container that waits for nothing special."""
TEMPORARY = frozenset(
    {Reason.PROGRESSING, Reason.WAITING_FOR_CAPACITY, Reason.WAITING_FOR_QUOTA}
)
"""Reasons that may pass without people."""


def worst_blocker(
    job: str, pods: AttemptPods, warnings: Mapping[str, str], now: datetime
) -> Blocker | None:
    """Return the blocker of the attempt: of several pods, first a blocker that needs people."""
    if pods.count == 1:
        if not pods.pods:
            return diagnose(None, warnings.get(job, ""), now)
        pod = pods.pods[0]
        return diagnose(pod, warnings.get(pod.name, ""), now)
    blockers = list(_blockers(job, pods, warnings, now))
    for blocker in blockers:
        if blocker.reason not in TEMPORARY:
            return blocker
    if not blockers:
        return None
    return blockers[0]


def _blockers(
    job: str, pods: AttemptPods, warnings: Mapping[str, str], now: datetime
) -> Iterator[Blocker]:
    for pod in pods.pods:
        if pod.finished:
            continue
        blocker = diagnose(pod, warnings.get(pod.name, ""), now)
        if blocker is None:
            continue
        share = ""
        without_node = len(pods.unplaced) + pods.absent
        if blocker.reason is Reason.WAITING_FOR_CAPACITY and without_node:
            share = f"{without_node} of {pods.count} pods have no node; "
        yield Blocker(blocker.reason, f"{share}pod {pod.index}: {blocker.message}")
    if not pods.absent:
        return
    blocker = diagnose(None, warnings.get(job, ""), now)
    if blocker:
        share = f"{pods.absent} of {pods.count} pods do not exist"
        yield Blocker(blocker.reason, f"{share}: {blocker.message}")


def diagnose(pod: ObservedPod | None, warning: str, now: datetime) -> Blocker | None:
    """Return the first blocker of the pod; `warning` is the newest Warning event of the Job or its pod."""
    if pod is None:
        if not warning:
            return None
        return pod_not_created(warning)
    return (
        _node_lost(pod, now)
        or _unscheduled(pod)
        or _without_scheduler(pod, now)
        or sidecar_blocker(pod, now)
        or _not_started(pod, warning)
    )


def lost_since(pod: ObservedPod, now: datetime) -> datetime | None:
    """Return the time since which the node of a pod counts as lost, by the operator's clock; None if it does not."""
    if pod.finished or pod.grace_ended_at is None:
        return None
    since = pod.grace_ended_at + NODE_LOST_AFTER
    return since if since <= now else None


def first_lost_since(pods: Iterable[ObservedPod], now: datetime) -> datetime | None:
    """Return the time since which the node of the first of these pods counts as lost; None if no node does."""
    times = [lost_since(pod, now) for pod in pods]
    return min((time for time in times if time), default=None)


def _node_lost(pod: ObservedPod, now: datetime) -> Blocker | None:
    if lost_since(pod, now) is None:
        return None
    command = f"`kubectl delete pod {pod.name} --force`"
    if pod.job:
        # Before its pod, which the Job's controller keeps until it has ended or the Job is being deleted.
        command = f"`kubectl delete job {pod.job}` and then {command}"
    return Blocker(
        Reason.NODE_LOST,
        f"node {pod.node} does not answer, so pod {pod.name} may still be running: delete the Node object, as a "
        f"cloud provider does when the machine is gone; or, if the machine is certainly off, run {command}",
    )


def _unscheduled(pod: ObservedPod) -> Blocker | None:
    scheduled = pod.condition("PodScheduled")
    if scheduled.get("status") != "False":
        return None
    message = str(scheduled.get("message") or "no node accepts the pod")
    if pod.is_gated:
        fix = "another controller, such as a queue, holds the pod back: it starts when its scheduling gates are removed"
        return Blocker(Reason.WAITING_FOR_QUOTA, f"{message}; {fix}")
    # The scheduler's words: persistentvolumeclaim … not found, unbound PersistentVolumeClaims,
    # PersistentVolume's affinity.
    lacking = sorted(set(re.findall(r"Insufficient ([\w.-]+/[\w-]+)", message)))
    if ZONAL.search(message):
        # Nodes in the volume's zone may get room, and another node class may have some.
        reason = Reason.WAITING_FOR_CAPACITY if lacking else Reason.VOLUME_NOT_READY
        return Blocker(reason, f"{message}; {ZONE_FIX}")
    if "ersistent" in message:
        return Blocker(Reason.VOLUME_NOT_READY, f"{message}; {_claim_fix(message)}")
    if not lacking:
        return Blocker(Reason.WAITING_FOR_CAPACITY, message)
    fix = f"no node has {' or '.join(lacking)} available: wait for other pods, or check that its device plugin runs"
    return Blocker(Reason.WAITING_FOR_CAPACITY, f"{message}; {fix}")


def held_deletion(job: Object, pods: AttemptPods, now: datetime) -> Blocker | None:
    """Return that a Job does not go although no process of it is left; None for a Job that is not being deleted."""
    deleted_at = time_of(job["metadata"].get("deletionTimestamp"))
    if deleted_at is None or pods.live or now < deleted_at + ATTENDED_WITHIN:
        return None
    name = job["metadata"]["name"]
    fix = "the controller that has set the finalizer, such as a queue's, must run, or remove the finalizer yourself"
    message = f"a finalizer of the Job {name}, or of an object that it owns, keeps it from being deleted: {fix}"
    return Blocker(Reason.DEPENDENCY_NOT_READY, message)


def without_pods(
    job: Object, pods: AttemptPods, resumed_at: datetime | None, now: datetime
) -> Blocker | None:
    """Return that no controller creates the pods of a Job, and says why; `resumed_at` is the end of a suspension."""
    meta = job["metadata"]
    since = resumed_at or time_of(meta.get("creationTimestamp"))
    if pods.pods or meta.get("deletionTimestamp") or since is None:
        return None
    if now < since + ATTENDED_WITHIN:
        return None
    fix = "ask the platform team whether the Job controller runs"
    message = f"no controller has created a pod of the Job {meta['name']}: {fix}"
    return Blocker(Reason.DEPENDENCY_NOT_READY, message)


def _claim_fix(message: str) -> str:
    absent = ABSENT_CLAIM.search(message)
    if absent:
        return f"create the claim {absent[1]} in this namespace, or correct the pvc:// URI or the volume that names it"
    return "run `kubectl describe pvc`: its StorageClass must exist and provision, and its zone must have nodes"


def _without_scheduler(pod: ObservedPod, now: datetime) -> Blocker | None:
    """Return that no scheduler takes the pod: every scheduler writes a condition about a pod that it has looked at."""
    if pod.node or pod.finished or pod.condition("PodScheduled"):
        return None
    if pod.created_at is None or now < pod.created_at + ATTENDED_WITHIN:
        return None
    fix = "correct the stage's schedulerName, or ask the platform team to start this scheduler"
    return Blocker(
        Reason.DEPENDENCY_NOT_READY,
        f"the scheduler {pod.scheduler} has not looked at the pod {pod.name}: {fix}",
    )


def _not_started(pod: ObservedPod, warning: str) -> Blocker | None:
    if pod.finished or pod.started_at:
        return None
    reason = str(pod.waiting.get("reason") or "")
    message = str(pod.waiting.get("message") or "")
    if reason in _IMAGE_ERRORS:
        fix = (
            "check the stage's image, that the nodes can reach its registry and are allowed to pull it, and that the "
            "Secrets of imagePullSecrets exist in this namespace"
        )
        return Blocker(
            Reason.IMAGE_PULL_FAILED, f"{message or warning or reason}; {fix}"
        )
    if reason not in STARTING:
        return container_not_started(reason, message)
    # With an address, the pod's volumes and its sandbox are ready: an event about them is over.
    if pod.address or not warning:
        return None
    return pod_not_started(warning, pod.node)
