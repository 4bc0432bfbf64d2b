"""What tests do on a cluster: a namespace of their own, pods in it, and a watch that remembers pods that are gone."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from testcluster.errors import TimedOut
from testcluster.images.packing import TOOLBOX
from testcluster.kube import Kube
from testcluster.nodes import NAME

RESTRICTED = {
    "pod-security.kubernetes.io/enforce": "restricted",
    "pod-security.kubernetes.io/enforce-version": "latest",
}
SPOT = {"key": "spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
UNPRIVILEGED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
Object = dict[str, Any]


def until(true: Callable[[], Any], seconds: float, otherwise: str | Callable[[], str] = "it did not come true") -> Any:
    """Ask until the answer is not empty, and give it: often at first, as it costs a process where kubectl is asked.

    Raises NotReady when time is up.
    """
    end, pause = time.monotonic() + seconds, 0.1
    while not (answer := true()):
        if time.monotonic() > end:
            raise TimedOut(f"after {seconds:g} s: {otherwise if isinstance(otherwise, str) else otherwise()}")
        time.sleep(pause)
        pause = min(pause * 1.2, 0.7)
    return answer


@dataclass(frozen=True)
class KubeNamespace:
    """One namespace of a cluster."""

    kube: Kube
    name: str

    def run(self, *arguments: str, given: str = "", timeout: float = 60) -> str:
        """Run kubectl in the namespace."""
        return self.kube.run("--namespace", self.name, *arguments, given=given, timeout=timeout)

    def get(self, kind: str, name: str) -> Object:
        """Get an object; empty when there is none."""
        text = self.run("get", kind, name, "--ignore-not-found", "-o", "json")
        return json.loads(text) if text.strip() else {}

    def create(self, *manifests: Object) -> None:
        """Create objects."""
        for manifest in manifests:
            self.run("create", "-f", "-", given=json.dumps(manifest))

    def claim(self, name: str, mode: str = "ReadWriteOnce", storage_class: str | None = None) -> None:
        """Create a claim for a small volume."""
        spec: Object = {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}}
        if storage_class:
            spec["storageClassName"] = storage_class
        self.create({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec})

    def phase(self, pod: str) -> str:
        """Tell a pod's phase; empty when it is gone."""
        return str(self.get("pod", pod).get("status", {}).get("phase", ""))

    def wait_phase(self, pod: str, *phases: str, seconds: float = 60) -> str:
        """Wait for one of the phases. Raises NotReady with what kubectl describe says."""
        return str(
            until(
                lambda: self.phase(pod) in phases and self.phase(pod), seconds, lambda: self.run("describe", "pod", pod)
            )
        )

    def run_script(self, script: str, name: str = "says", **more: Any) -> str:
        """Run a shell script in a pod of the toolbox image to its end, and give its output."""
        self.create(pod(name, script, **more))
        assert self.wait_phase(name, "Succeeded", "Failed") == "Succeeded", self.run("logs", name)
        return self.run("logs", name)


@contextmanager
def temporary_namespace(kube: Kube, name: str, labels: dict[str, str] | None = None) -> Iterator[KubeNamespace]:
    """Have a namespace, with its service account, for a while."""
    kube.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels or RESTRICTED}}])
    namespace = KubeNamespace(kube, name)
    until(lambda: namespace.get("serviceaccount", "default"), 30, f"namespace {name} got no service account")
    try:
        yield namespace
    finally:
        kube.run("delete", "namespace", name, "--wait=false", "--ignore-not-found")


def pod(
    name: str,
    script: str,
    *,
    node: str = "",
    selector: dict[str, str] | None = None,
    claims: dict[str, str] | None = None,
    image: str = TOOLBOX,
    command: list[str] | None = None,
    grace: int = 30,
    pull: str = "IfNotPresent",
) -> Object:
    """Describe a pod that Pod Security's level restricted admits; claims: {claim: where it is mounted}."""
    container: Object = {
        "name": "main",
        "image": image,
        "imagePullPolicy": pull,
        "command": command or ["sh", "-c", script],
        "securityContext": UNPRIVILEGED,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, *_mounts(claims)],
    }
    volumes = [{"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in claims or {}]
    spec: Object = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace,
        "securityContext": {"runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532},
        "tolerations": [SPOT],
        "nodeSelector": ({NAME: node} if node else {}) | (selector or {}),
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}, *volumes],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def _mounts(claims: dict[str, str] | None) -> list[Object]:
    return [{"name": claim, "mountPath": path} for claim, path in (claims or {}).items()]


def job(name: str, template: Object) -> Object:
    """Wrap a pod into a Job of one attempt that fails at once when its pod is disrupted, as the operator's Jobs do."""
    spec = {
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
        },
        "podReplacementPolicy": "Failed",
        "template": {"metadata": {"labels": {"attempt": name}}, "spec": template["spec"]},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}


@dataclass
class Watched:
    """All that a watcher was ever told of the pods of a namespace."""

    events: list[tuple[str, Object]] = field(default_factory=list)

    def of(self, name: str) -> list[tuple[str, Object]]:
        """Give what was told of pods whose name begins so."""
        return [(kind, pod) for kind, pod in self.events if pod["metadata"]["name"].startswith(name)]

    def gone(self, name: str) -> bool:
        """Tell whether it was seen to go."""
        return any(kind == "DELETED" for kind, _ in self.of(name))

    def termination(self, name: str) -> Object:
        """Give exit code, termination message and disruption as last seen."""
        words: Object = {}
        for _, told in self.of(name):
            conditions = told["status"].get("conditions", [])
            for disruption in (one["reason"] for one in conditions if one["type"] == "DisruptionTarget"):
                words["disruption"] = disruption
            for container in told["status"].get("containerStatuses", []):
                if ended := container["state"].get("terminated"):
                    words |= {"code": ended["exitCode"], "message": ended.get("message", "")}
        return words


@contextmanager
def watching(namespace: KubeNamespace) -> Iterator[Watched]:
    """Watch the pods of a namespace for a while, as an operator would."""
    command = [
        str(namespace.kube.kubectl),
        "--kubeconfig",
        str(namespace.kube.kubeconfig),
        "--namespace",
        namespace.name,
    ]
    command += ["get", "pods", "--watch", "--output-watch-events", "-o", "json"]
    watched = Watched()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        reader = threading.Thread(target=_read, args=(process, watched), daemon=True)
        reader.start()
        try:
            yield watched
        finally:
            process.terminate()
            reader.join(5)


def _read(process: subprocess.Popen[str], watched: Watched) -> None:
    decoder, text = json.JSONDecoder(), ""
    for line in process.stdout or ():
        text += line
        try:
            told, end = decoder.raw_decode(text)
        except ValueError:
            continue
        text = text[end:].lstrip()
        watched.events.append((told["type"], told["object"]))
