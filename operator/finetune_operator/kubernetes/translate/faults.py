"""The end of a pod by the kubelet, or before its process started, with a reason of its own: pure."""

import re

from finetune_operator.api.conditions import Reason
from finetune_operator.core.attempts.endings import doubled
from finetune_operator.core.metadata import STAGE_CONTAINER
from finetune_operator.core.observation import PodFault
from finetune_operator.kubernetes.translate.object import Object, condition_of
from finetune_operator.kubernetes.translate.pod import ObservedPod
from finetune_operator.kubernetes.translate.sidecars import describe_failure

# The words of the kubelet's eviction manager. An eviction has no code for its cause.
POD_STORAGE = re.compile(
    r"ephemeral local storage usage exceeds the total limit of containers (\d\w*)"
)
CONTAINER_STORAGE = re.compile(
    r'Container (\S+) exceeded its local ephemeral storage limit(?: "(\d\w*)")?'
)
EMPTY_DIR = re.compile(r'EmptyDir volume "([^"]+)" exceeds the limit "(\d\w*)"')
NODE_LOW = re.compile(r"The node was low on resource: ([\w-]+)")
NO_DEVICE = re.compile(
    r"Allocate failed|devices? unavailable|nvidia-container|nvml|CDI device|/dev/(nvidia|kfd|dri|accel|habana)"
)
"""Words of the kubelet's device manager, and of the runtimes of device makers."""
NOT_STARTED = frozenset({"StartError", "ContainerCannotRun"})
"""Reasons of a container whose process the runtime could not start."""
REQUESTS = frozenset({"memory", "ephemeral-storage"})
"""Resources of a node that a request reserves. It also has inodes and process ids."""
DEADLINE = "DeadlineExceeded"
"""Reason of a pod, and of a Job, that ran for longer than its activeDeadlineSeconds."""
SHARED_MEMORY = "shm"
"""Volume of /dev/shm."""


def fault_of(pod: ObservedPod) -> PodFault | None:
    """Return what ended the pod, if it has a reason of its own: a limit of storage, the node, an init container."""
    if pod.status_reason == "Evicted":
        fault = _storage_exceeded(pod) or _node_pressure(pod)
        if fault:
            return fault
    if pod.status_reason == DEADLINE:
        return _deadline("pod", pod.status_message)
    device = _no_device(pod)
    if device or pod.disruption:
        return device
    return _init_container_failed(pod)


def deadline_of(job: Object | None) -> PodFault | None:
    """Return that a time limit of the Job, which the operator never sets, has ended its pods."""
    failed = condition_of(job, "Failed")
    if failed.get("status") != "True" or failed.get("reason") != DEADLINE:
        return None
    return _deadline("Job", str(failed.get("message") or ""))


def _deadline(kind: str, message: str) -> PodFault:
    fix = f"an admission policy has set activeDeadlineSeconds of the {kind}: raise or remove it"
    return PodFault(Reason.STAGE_FAILED, f"{message.rstrip('. ')}: {fix}")


def _storage_exceeded(pod: ObservedPod) -> PodFault | None:
    """Return which limit of storage the pod has exceeded. Another attempt would exceed it again."""
    evidence = pod.status_message.rstrip(". ")
    container = CONTAINER_STORAGE.search(evidence)
    if container and container[1] != STAGE_CONTAINER:
        # Its author is an injector, and its use may depend on time: the next attempt goes on.
        fix = f"raise the limit of the container {container[1]}, which an admission policy may have added"
        return PodFault(Reason.STAGE_FAILED, f"{evidence}: {fix}")
    volume = EMPTY_DIR.search(evidence)
    total = POD_STORAGE.search(evidence)
    if volume:
        fix = _more_in_volume(pod, volume[1], volume[2])
    elif container or total:
        limit = pod.limit_of("ephemeral-storage") or (total[1] if total else "")
        fix = _more_storage(pod, limit)
    else:
        return None
    return PodFault(Reason.EPHEMERAL_STORAGE_EXCEEDED, f"{evidence}: {fix}")


def _more_storage(pod: ObservedPod, limit: str) -> str:
    more = f" to {doubled(limit)}" if limit else ""
    field = f"{_pod_field(pod)}.resources.limits.ephemeral-storage"
    return f"raise {field}{more}, or write to the workspace in place of /tmp"


def _more_in_volume(pod: ObservedPod, volume: str, limit: str) -> str:
    if volume == SHARED_MEMORY:
        return f"raise {_pod_field(pod)}.sharedMemory to {doubled(limit)}"
    return f"write less to it, or raise the sizeLimit of the volume {volume} to {doubled(limit)}"


def _node_pressure(pod: ObservedPod) -> PodFault | None:
    """Return that the pod was evicted because its node ran out of a resource. Another attempt may succeed."""
    evidence = pod.status_message.rstrip(". ")
    low = NODE_LOW.search(evidence)
    if low is None and "The node had condition" not in evidence:
        return None
    place = f" on {pod.node}" if pod.node else ""
    message = f"evicted{place}: {evidence}"
    if low and low[1] in REQUESTS:
        field = f"{_pod_field(pod)}.resources.requests.{low[1]}"
        message += f": set {field} to what the stage uses, so that the scheduler finds a node with as much"
    return PodFault(Reason.NODE_PRESSURE, message, interrupts=True)


def _no_device(pod: ObservedPod) -> PodFault | None:
    """Return that the node could not give the pod its devices, although the scheduler had seen them there."""
    place = f"node {pod.node}" if pod.node else "the node"
    evidence = ""
    if pod.status_reason == "UnexpectedAdmissionError":
        evidence = pod.status_message
    elif pod.terminated.get("reason") in NOT_STARTED:
        evidence = pod.termination_text
    if not NO_DEVICE.search(evidence):
        return None
    fix = "if it happens again there, check its device plugin and its driver, or take it out of service"
    message = f"{place} cannot give the pod its devices: {evidence[-1000:]}: {fix}"
    return PodFault(Reason.DEVICE_FAILED, message, interrupts=True)


def _init_container_failed(pod: ObservedPod) -> PodFault | None:
    """Return which init container failed, if the process therefore never started."""
    if not pod.failed or pod.started_at:
        return None
    for status in pod.init_statuses:
        terminated = (status.get("state") or {}).get("terminated") or {}
        if terminated.get("exitCode"):
            failure = describe_failure({**status, "isInit": True})
            fix = f"see its log with `kubectl logs {pod.name} -c {status['name']}`"
            message = f"{failure}, so the process never started: {fix}"
            return PodFault(Reason.INIT_CONTAINER_FAILED, message)
    return None


def _pod_field(pod: ObservedPod) -> str:
    return f"{pod.stage}.pod" if pod.stage else "pod"
