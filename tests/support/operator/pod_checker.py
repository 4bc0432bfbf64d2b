"""A check of pod specs that shares no code with the operator: what a user's pod must never have."""

import posixpath
import re
from collections.abc import Iterator
from typing import Any

Object = dict[str, Any]
NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
HARMLESS = {
    *(
        "restartPolicy",
        "terminationGracePeriodSeconds",
        "nodeSelector",
        "tolerations",
        "affinity",
        "topologySpreadConstraints",
        "priorityClassName",
    ),
    *(
        "enableServiceLinks",
        "dnsPolicy",
        "schedulerName",
        "preemptionPolicy",
        "priority",
        "imagePullSecrets",
    ),
    *("hostname", "subdomain"),
}
"""Fields of a pod spec that reach neither data nor rights."""
CHECKED = {
    *(
        "automountServiceAccountToken",
        "serviceAccountName",
        "serviceAccount",
        "securityContext",
        "runtimeClassName",
    ),
    *("containers", "initContainers", "volumes"),
}
FOLDERS = ("/workspace", "/claims/", "/tmp", "/dev/shm")
"""Paths of volumes that the operator mounts. The volumes of a user are read-only, and may be elsewhere."""
RUNTIME_FOLDERS = ("/proc", "/sys")
CONTAINER_FIELDS = {
    *(
        "name",
        "image",
        "imagePullPolicy",
        "command",
        "args",
        "env",
        "envFrom",
        "resources",
        "securityContext",
    ),
    *(
        "terminationMessagePath",
        "terminationMessagePolicy",
        "volumeMounts",
        "ports",
        "lifecycle",
    ),
    *("readinessProbe", "livenessProbe", "startupProbe"),
}
LOCAL_SOURCES = {"secretKeyRef", "configMapKeyRef", "fieldRef", "resourceFieldRef"}
"""Sources of a variable that are the pod itself or objects of its namespace."""


def pod_violations(spec: Object) -> Iterator[str]:
    """Yield each way in which a pod could reach more than its own namespace's claims and named Secrets."""
    yield from (f"unexpected field {name}" for name in spec.keys() - HARMLESS - CHECKED)
    if spec.get("automountServiceAccountToken") is not False:
        yield "a token of its service account is mounted"
    yield from _name_violations(spec)
    context = spec.get("securityContext", {})
    if context.get("runAsNonRoot") is not True or context.get("runAsUser") == 0:
        yield "the pod may run as root"
    if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "no seccomp profile"
    for volume in spec.get("volumes", []):
        yield from _volume_violations(volume)
    for container in (*spec.get("initContainers", []), *spec["containers"]):
        yield from (
            f"{container['name']}: {problem}"
            for problem in _container_violations(container)
        )


def _name_violations(spec: Object) -> Iterator[str]:
    for field in (
        "serviceAccountName",
        "priorityClassName",
        "schedulerName",
        "runtimeClassName",
        "subdomain",
    ):
        if field in spec and not NAME.fullmatch(spec[field]):
            yield f"{field} {spec[field]!r} is not a name"


def _volume_violations(volume: Object) -> Iterator[str]:
    [kind] = volume.keys() - {"name"}
    source = volume[kind]
    match kind:
        case "emptyDir":
            return
        case "persistentVolumeClaim":
            names = [source["claimName"]]
        case "configMap":
            names = [source["name"]]
        case "secret":
            names = [source["secretName"]]
        case "projected":
            names = []
            for projection in source["sources"]:
                yield from _projection_violations(projection)
        case "csi":
            names = [source["driver"]]
            if source.get("readOnly") is not True:
                yield f"volume of {names[0]} that may be written"
        case _:
            yield f"volume of the kind {kind}"
            return
    yield from (
        f"{kind} {name!r} is not a name" for name in names if not NAME.fullmatch(name)
    )


def _projection_violations(projection: Object) -> Iterator[str]:
    """Yield what a projected volume may hold besides objects of the namespace, such as a token."""
    [kind] = projection
    if kind not in {"secret", "configMap"}:
        yield f"projection of {kind}"
    elif not NAME.fullmatch(projection[kind]["name"]):
        yield f"{kind} {projection[kind]['name']!r} is not a name"


def _container_violations(container: Object) -> Iterator[str]:
    yield from (
        f"unexpected field {name}" for name in container.keys() - CONTAINER_FIELDS
    )
    context = container.get("securityContext", {})
    if context != {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }:
        yield f"security context {context}"
    if (
        container.get("terminationMessagePath", "/dev/termination-log")
        != "/dev/termination-log"
    ):
        yield f"termination message at {container['terminationMessagePath']}"
    for mount in container.get("volumeMounts", []):
        yield from _mount_violations(mount)
    yield from _environment_violations(container)
    if any(
        "hostPort" in port or "hostIP" in port for port in container.get("ports", [])
    ):
        yield "port of the node"
    for name in ("readinessProbe", "livenessProbe", "startupProbe"):
        if "host" in container.get(name, {}).get("httpGet", {}):
            yield f"{name} of another host"
    if container.get("lifecycle", {}).keys() - {"preStop"} or "httpGet" in str(
        container.get("lifecycle", {})
    ):
        yield "request of the kubelet"


def _mount_violations(mount: Object) -> Iterator[str]:
    path = mount["mountPath"]
    part = mount.get("subPath", "part")
    is_inside = path.startswith(FOLDERS) or mount.get("readOnly") is True
    if path != posixpath.normpath(path) or not is_inside or ":" in path:
        yield f"mount at {path}"
    if path.startswith(RUNTIME_FOLDERS):
        yield f"mount at {path}"
    if part != posixpath.normpath(part) or part.startswith(("/", "..")):
        yield f"mount of the part {part}"
    if mount.keys() - {"name", "mountPath", "subPath", "readOnly"}:
        yield f"mount with {set(mount)}"


def _environment_violations(container: Object) -> Iterator[str]:
    known = {variable["name"] for variable in container.get("env", [])}
    for variable in container.get("env", []):
        if set(variable.get("valueFrom", {})) - LOCAL_SOURCES:
            yield f"variable {variable['name']} of {set(variable['valueFrom'])}"
        yield from (
            f"variable {variable['name']} expands {name}"
            for name in expanded(variable.get("value", ""))
        )
    for text in (*container.get("command", []), *container.get("args", [])):
        yield from (
            f"command expands {name}" for name in expanded(text) if name in known
        )
    for source in container.get("envFrom", []):
        kind = source.keys() & {"secretRef", "configMapRef"}
        others = source.keys() - kind - {"prefix"}
        if (
            others
            or len(kind) != 1
            or not all(NAME.fullmatch(source[name]["name"]) for name in kind)
        ):
            yield f"environment of {source}"


def expanded(text: str) -> list[str]:
    """Return the names of the variables that the kubelet expands in a text."""
    return [part[1:] for part in _parts(text) if part.startswith("\0")]


def received(text: str) -> str:
    """Return the text that a container receives, with each variable as <NAME>."""
    return "".join(
        f"<{part[1:]}>" if part.startswith("\0") else part for part in _parts(text)
    )


def _parts(text: str) -> Iterator[str]:
    """Yield the parts of a text as the kubelet reads it: $(NAME) is a variable, here \\0NAME, and $$ is one $.

    Source: k8s.io/kubernetes/third_party/forked/golang/expansion.
    """
    for match in re.finditer(r"\$\$|\$\(([^)]*)\)|.", text, re.DOTALL):
        if match[0] == "$$":
            yield "$"
        else:
            yield match[0] if match[1] is None else f"\0{match[1]}"
