"""The exact words of kubelets, runtimes and controllers about a pod that does not start."""

import pytest
from support.operator.pods import (
    NOW,
    a_pod,
    waiting,
)

from finetune_operator.api.conditions import Reason
from finetune_operator.kubernetes.cache.trim import trim_pod
from finetune_operator.kubernetes.translate.diagnose import diagnose
from finetune_operator.kubernetes.translate.pod import ObservedPod

SANDBOX = "Failed to create pod sandbox: rpc error: code = Unknown desc = "
EVENTS = {
    "runtime of containerd": (
        SANDBOX
        + 'failed to get sandbox runtime: no runtime for "nvidia" is configured',
        Reason.CONTAINER_NOT_STARTED,
        "correct the stage's runtimeClassName",
    ),
    "runtime of cri-o": (
        SANDBOX + "failed to find runtime handler nvidia from runtime list map[runc:]",
        Reason.CONTAINER_NOT_STARTED,
        "correct the stage's runtimeClassName",
    ),
    "network without addresses": (
        SANDBOX
        + 'failed to setup network for sandbox "5f": plugin type="aws-cni" name="aws-cni" failed (add):'
        " add cmd: failed to assign an IP address to container",
        Reason.CONTAINER_NOT_STARTED,
        "repair the pod network of node spot-1",
    ),
    "network of the node": (
        "network is not ready: container runtime network not ready: cni plugin not initialized",
        Reason.CONTAINER_NOT_STARTED,
        "repair the pod network of node spot-1",
    ),
    "sandbox with the word mount": (
        SANDBOX + "failed to create containerd task: failed to mount rootfs",
        Reason.CONTAINER_NOT_STARTED,
        "repair the container runtime of node spot-1",
    ),
    "device of a claim": (
        "Failed to prepare dynamic resources: prepare devices: driver gpu.nvidia.com: not ready",
        Reason.CONTAINER_NOT_STARTED,
        "repair the device driver of node spot-1",
    ),
    "mount": (
        'MountVolume.SetUp failed for volume "pvc-1": mount failed: exit status 32',
        Reason.VOLUME_NOT_READY,
        "exit status 32",
    ),
    "secret of a volume": (
        'MountVolume.SetUp failed for volume "keys" : secret "keys" not found',
        Reason.SECRET_NOT_FOUND,
        "create the Secret keys in this namespace",
    ),
    "key of a volume": (
        'MountVolume.SetUp failed for volume "c" : references non-existent config key: ca.crt',
        Reason.CONFIG_MAP_NOT_FOUND,
        "add the key ca.crt to the ConfigMap",
    ),
}
CONFIG = "CreateContainerConfigError"
CONTAINERS = {
    "key of a secret": (
        CONFIG,
        "couldn't find key HF_TOKEN in Secret default/hf",
        Reason.SECRET_NOT_FOUND,
        "the Secret hf has no key HF_TOKEN: add it",
    ),
    "key of a configmap": (
        CONFIG,
        "couldn't find key secret in ConfigMap default/settings",
        Reason.CONFIG_MAP_NOT_FOUND,
        "the ConfigMap settings has no key secret: add it",
    ),
    "configmap": (
        CONFIG,
        'configmap "settings" not found',
        Reason.CONFIG_MAP_NOT_FOUND,
        "create the ConfigMap settings in this namespace",
    ),
    "configmap with the word secret": (
        CONFIG,
        'configmap "my-secret-settings" not found',
        Reason.CONFIG_MAP_NOT_FOUND,
        "create the ConfigMap my-secret-settings",
    ),
    "secret": (
        CONFIG,
        'secret "my-configmap" not found',
        Reason.SECRET_NOT_FOUND,
        "create the Secret my-configmap",
    ),
    "root": (
        CONFIG,
        "container has runAsNonRoot and image will run as root (pod: x, container: stage)",
        Reason.CONTAINER_NOT_STARTED,
        "a numeric USER",
    ),
    "program": (
        "RunContainerError",
        'failed to create task: exec: "tran": executable file not found in $PATH',
        Reason.CONTAINER_NOT_STARTED,
        "correct the stage's pod.command",
    ),
    "device": (
        "CreateContainerError",
        "nvidia-container-cli: initialization error: driver not loaded",
        Reason.CONTAINER_NOT_STARTED,
        "check the device plugin",
    ),
    "other words": (
        "CreateContainerError",
        "context deadline exceeded",
        Reason.CONTAINER_NOT_STARTED,
        "check the stage's pod.command, its devices and its runtimeClassName",
    ),
}
CREATIONS = {
    "webhook": (
        'Error creating: Internal error occurred: failed calling webhook "inject.vault.example.com": x',
        Reason.DEPENDENCY_NOT_READY,
        "the platform team must repair this admission webhook",
    ),
    "quota that requires limits": (
        'Error creating: pods "hooked-x" is forbidden: failed quota: q: must specify limits.cpu for: stage',
        Reason.POD_REFUSED,
        "set limits.cpu in the stage's pod.resources",
    ),
    "quota that requires several": (
        'Error creating: pods "x" is forbidden: failed quota: q: must specify cpu for: stage; limits.memory for: stage',
        Reason.POD_REFUSED,
        "set requests.cpu and limits.memory in the stage's pod.resources",
    ),
    "used quota": (
        'Error creating: pods "x" is forbidden: exceeded quota: q, requested: cpu=1, used: cpu=9, limited: cpu=9',
        Reason.WAITING_FOR_QUOTA,
        "the quota is raised",
    ),
    "runtime class": (
        'Error creating: pods "x" is forbidden: pod rejected: RuntimeClass "nvidia" not found',
        Reason.CONTAINER_NOT_STARTED,
        "create the RuntimeClass, or remove runtimeClassName",
    ),
    "limit range": (
        'Error creating: pods "x" is forbidden: maximum memory usage per Container is 1Gi, but limit is 2Gi',
        Reason.POD_REFUSED,
        "a LimitRange of the namespace refuses the pod",
    ),
    "webhook that refuses": (
        'Error creating: admission webhook "policy.example.com" denied the request: no team label',
        Reason.POD_REFUSED,
        "change the field that the message names",
    ),
    "api server": (
        'Error creating: Post "https://10.0.0.1:443/api/v1/namespaces/t/pods": dial tcp: connection refused',
        Reason.DEPENDENCY_NOT_READY,
        "tries again",
    ),
    "storage": (
        "Error creating: etcdserver: request timed out",
        Reason.DEPENDENCY_NOT_READY,
        "tries again",
    ),
}


def blocker_of(*arguments):
    blocker = diagnose(*arguments)
    assert blocker
    return blocker


def starting(state=None, **status):
    raw = a_pod(state or waiting("ContainerCreating"), phase="Pending", status=status)
    return ObservedPod(trim_pod(raw))


@pytest.mark.parametrize(("text", "reason", "fix"), EVENTS.values(), ids=EVENTS)
def test_event_of_a_pod_has_its_reason_and_fix(text, reason, fix):
    blocker = blocker_of(starting(), text, NOW)
    assert blocker.reason is reason
    assert text in blocker.message
    assert fix in blocker.message


@pytest.mark.parametrize(
    ("state", "text", "reason", "fix"), CONTAINERS.values(), ids=CONTAINERS
)
def test_container_error_has_its_reason_and_fix(state, text, reason, fix):
    blocker = blocker_of(starting(waiting(state, text)), "", NOW)
    assert blocker.reason is reason
    assert text in blocker.message
    assert fix in blocker.message


@pytest.mark.parametrize(("text", "reason", "fix"), CREATIONS.values(), ids=CREATIONS)
def test_refused_pod_has_its_reason_and_fix(text, reason, fix):
    blocker = blocker_of(None, text, NOW)
    assert blocker.reason is reason
    assert text in blocker.message
    assert fix in blocker.message


def test_event_that_is_over_blocks_no_pod():
    """The pod has its volumes and its network, and pulls a large image."""
    text, _, _ = EVENTS["mount"]
    assert diagnose(starting(podIP="10.0.0.7"), text, NOW) is None


def test_event_of_the_scheduler_blocks_no_scheduled_pod():
    text = "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims."
    assert diagnose(starting(), text, NOW) is None


@pytest.mark.parametrize(
    "text", ["policy amount: audit", "Liveness probe failed", "the pod is slow"]
)
def test_other_warnings_block_no_pod(text):
    assert diagnose(starting(), text, NOW) is None
