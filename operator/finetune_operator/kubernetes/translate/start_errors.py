"""The words of the kubelet and of the Job controller about a pod that does not start, as blockers with a fix: pure.

Neither has a code for most causes: only the text tells them apart.
"""

import re

from finetune_operator.api.conditions import Reason
from finetune_operator.core.observation import Blocker
from finetune_operator.kubernetes.translate.api_errors import (
    DENIED,
    DENIED_FIX,
    QUOTA,
    WEBHOOK_FIX,
)

ABSENT = re.compile(r'(?i)\b(secret|configmap)s? "([^"]+)" not found')
ABSENT_KEY = re.compile(r"(?i)couldn't find key (\S+) in (secret|configmap) (\S+)")
ABSENT_FILE = re.compile(r"(?i)references non-existent (secret|config) key: (\S+)")
SANDBOX = re.compile(r"(?i)sandbox|network is not ready")
RUNTIME = re.compile(r"(?i)no runtime for|runtime ?handler")
NETWORK = re.compile(r"(?i)\bcni\b|plugin type=|network|ip address")
DEVICE = re.compile("(?i)prepare dynamic resources")
MOUNT = re.compile(r"(?i)volume|\bmount")
# The event of the scheduler stays the newest until the kubelet has another.
SCHEDULER = re.compile("nodes are available")
"""Words of the scheduler, whose reasons are over when the pod has a node."""
REQUIRED = re.compile(r"(?:limits|requests)\.[\w./-]+|\b(?:cpu|memory)\b")
"""Resources that a quota requires, behind the words `must specify`."""
KINDS = {
    "secret": (Reason.SECRET_NOT_FOUND, "Secret"),
    "configmap": (Reason.CONFIG_MAP_NOT_FOUND, "ConfigMap"),
    "config": (Reason.CONFIG_MAP_NOT_FOUND, "ConfigMap"),
}
PROGRAM_FIX = (
    "correct the stage's pod.command, or name an image that contains the program"
)
CONTAINER_FIXES = (
    (
        "runAsNonRoot|non-numeric user",
        "the image needs a numeric USER other than 0: build it with one",
    ),
    (r"not found in \$PATH", PROGRAM_FIX),
    ("(?i)device|nvidia|cdi", "check the device plugin and the runtime of the node"),
    ("no such file or directory", PROGRAM_FIX),
    ("", "check the stage's pod.command, its devices and its runtimeClassName"),
)
# First the answers of policies, whose texts may hold the words of all others.
REFUSALS = (
    ("failed calling webhook", Reason.DEPENDENCY_NOT_READY, WEBHOOK_FIX),
    (DENIED.pattern, Reason.POD_REFUSED, DENIED_FIX),
    (
        QUOTA,
        Reason.WAITING_FOR_QUOTA,
        "the pod is created once other workloads have finished or the quota is raised",
    ),
    (
        'violates PodSecurity "',
        Reason.POD_REFUSED,
        "the namespace's Pod Security level does not admit the pod: relax it, or use another namespace",
    ),
    (
        'serviceaccount "[^"]+" not found',
        Reason.CONTAINER_NOT_STARTED,
        "create the ServiceAccount, or remove serviceAccountName from the stage",
    ),
    (
        'RuntimeClass "[^"]*" not found',
        Reason.CONTAINER_NOT_STARTED,
        "create the RuntimeClass, or remove runtimeClassName from the stage",
    ),
    (
        "no PriorityClass with name",
        Reason.CONTAINER_NOT_STARTED,
        "create the PriorityClass, or remove priorityClassName from the stage",
    ),
    (
        "insufficient quota to match these scopes",
        Reason.POD_REFUSED,
        "create a quota for these scopes in the namespace, or change the stage's priorityClassName",
    ),
    (
        "usage per (Container|Pod) is|limit to request ratio",
        Reason.POD_REFUSED,
        "a LimitRange of the namespace refuses the pod: change the stage's pod.resources",
    ),
    (
        "is forbidden|is invalid",
        Reason.POD_REFUSED,
        DENIED_FIX,
    ),
    (
        "",
        Reason.DEPENDENCY_NOT_READY,
        "the cluster could not create the pod and tries again: if this lasts, ask the platform team",
    ),
)
"""Words -> reason and fix of a pod that the controller of its Job or ReplicaSet cannot create; the first match."""


VOLUME_FIXES = (
    (
        "Multi-Attach",
        "a pod on another node still has the volume until it ends; if its node is lost, delete that pod",
    ),
    ("access denied", "the server of the volume must allow node {node} to mount it"),
    (
        "list of registered CSI drivers",
        "the platform team must install this CSI driver on node {node}",
    ),
    (
        "SecretProviderClass",
        "create the SecretProviderClass in this namespace, or correct the stage's pod.volumes",
    ),
    (
        "wrong fs type|bad option",
        "the platform team must repair the file system of the volume or its mount options",
    ),
    (
        "AttachVolume|MountDevice",
        "run `kubectl describe pvc`: the platform team must repair the volume or its driver",
    ),
    (
        "",
        "if this lasts, run `kubectl describe pvc` and check the volume that the message names",
    ),
)
"""Words -> fix of a volume that the kubelet cannot mount; the first match."""


def pod_not_created(warning: str) -> Blocker:
    """Return why the controller of the Job or ReplicaSet could not create the pod."""
    if "failed quota: " in warning and not DENIED.search(warning):
        return _quota_requires(warning)
    # The last pattern matches always.
    matches = [entry for entry in REFUSALS if re.search(entry[0], warning)]
    _, reason, fix = matches[0]
    return Blocker(reason, f"{warning}; {fix}")


def _quota_requires(warning: str) -> Blocker:
    """Return the blocker of a pod without the requests or limits that a quota counts."""
    _, _, words = warning.partition("must specify")
    required = list(dict.fromkeys(REQUIRED.findall(words)))
    # The quota's cpu and memory are requests.
    fields = [name if "." in name else f"requests.{name}" for name in required]
    fix = f"a quota counts them: set {' and '.join(fields) or 'them'} in the stage's pod.resources"
    return Blocker(Reason.POD_REFUSED, f"{warning}; {fix}")


def missing_object(text: str) -> Blocker | None:
    """Return the blocker of a pod whose Secret or ConfigMap, or a key of it, does not exist; None for other words."""
    absent = ABSENT.search(text)
    if absent:
        reason, kind = KINDS[absent[1].lower()]
        fix = "in this namespace, or remove it from the stage's pod.envFrom and pod.env"
        if text.startswith("MountVolume"):
            fix = "in this namespace, or remove it from the stage's pod.volumes, or from the chart's trustedCAs"
        return Blocker(reason, f"{text}; create the {kind} {absent[2]} {fix}")
    key = ABSENT_KEY.search(text)
    if key:
        reason, kind = KINDS[key[2].lower()]
        name = key[3].rpartition("/")[2]
        cause = f"the {kind} {name} has no key {key[1]}"
        return Blocker(reason, f"{text}; {cause}: add it, or correct the stage's pod")
    file = ABSENT_FILE.search(text)
    if file:
        reason, kind = KINDS[file[1].lower()]
        return Blocker(reason, f"{text}; add the key {file[2]} to the {kind}")
    return None


def container_not_started(reason: str, message: str) -> Blocker:
    """Return the blocker of a container that the kubelet cannot start."""
    missing = missing_object(message)
    if missing:
        return missing
    text = f"{reason}: {message}".rstrip(": ")
    # The last pattern matches always.
    fixes = [fix for words, fix in CONTAINER_FIXES if re.search(words, text)]
    return Blocker(Reason.CONTAINER_NOT_STARTED, f"{text}; {fixes[0]}")


def pod_not_started(warning: str, node: str) -> Blocker | None:
    """Return why the kubelet cannot prepare the pod; None for words that stop no pod."""
    if SCHEDULER.search(warning):
        return None
    missing = missing_object(warning)
    if missing:
        return missing
    fix = ""
    if SANDBOX.search(warning):
        fix = f"the platform team must repair the container runtime of node {node}"
        if RUNTIME.search(warning):
            fix = f"configure the runtime on node {node}, or correct the stage's runtimeClassName"
        elif NETWORK.search(warning):
            fix = f"the platform team must repair the pod network of node {node}"
    elif DEVICE.search(warning):
        fix = f"the platform team must repair the device driver of node {node}"
    if fix:
        return Blocker(Reason.CONTAINER_NOT_STARTED, f"{warning}; {fix}")
    if MOUNT.search(warning):
        # The last pattern matches always.
        fixes = [fix for words, fix in VOLUME_FIXES if re.search(words, warning)]
        text = fixes[0].format(node=node)
        return Blocker(Reason.VOLUME_NOT_READY, f"{warning}; {text}")
    return None
