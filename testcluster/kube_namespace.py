"""Helpers for tests on a cluster: a temporary namespace, pods in it, and a watch that records deleted pods too."""

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
from testcluster.images.image_layers import TOOLBOX
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


def until(
    condition: Callable[[], Any],
    seconds: float,
    otherwise: str | Callable[[], str] = "the condition is not met",
) -> Any:
    """Call `condition` until it returns a true value, and return that value.

    Raises TimedOut with `otherwise` after `seconds`.
    """
    deadline = time.monotonic() + seconds
    pause = 0.1
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimedOut(
                f"after {seconds:g} s: {otherwise if isinstance(otherwise, str) else otherwise()}"
            )
        time.sleep(pause)
        # Poll often at first, then less often: a condition that calls kubectl costs a process each time.
        pause = min(pause * 1.2, 0.7)
    return value


def wait_until_established(kube: Kube, *crds: str, seconds: float = 30) -> None:
    """Wait until CRDs are served. Raises TimedOut.

    `kubectl wait` fails at once on a new CRD, which has no conditions until the API server has processed it.
    """
    until(
        lambda: all(
            crd_conditions(kube, crd).get("Established") == "True" for crd in crds
        ),
        seconds,
    )


def crd_conditions(kube: Kube, crd: str) -> dict[str, str]:
    """Return the status of each condition of a CRD; a new one has none."""
    status = kube.json("get", "crd", crd).get("status", {})
    return {
        condition["type"]: condition["status"]
        for condition in status.get("conditions") or ()
    }


@dataclass(frozen=True)
class KubeNamespace:
    """A namespace of a cluster."""

    kube: Kube
    name: str

    def run(self, *arguments: str, given: str = "", timeout: float = 60) -> str:
        """Run kubectl in the namespace and return its output; `given` is its standard input."""
        return self.kube.run(
            "--namespace", self.name, *arguments, given=given, timeout=timeout
        )

    def get(self, kind: str, name: str) -> Object:
        """Return an object, or an empty dictionary when it does not exist."""
        text = self.run("get", kind, name, "--ignore-not-found", "-o", "json")
        return json.loads(text) if text.strip() else {}

    def create(self, *manifests: Object) -> None:
        """Create objects."""
        for manifest in manifests:
            self.run("create", "-f", "-", given=json.dumps(manifest))

    def claim(
        self, name: str, mode: str = "ReadWriteOnce", storage_class: str | None = None
    ) -> None:
        """Create a PersistentVolumeClaim of 1 GiB."""
        spec: Object = {
            "accessModes": [mode],
            "resources": {"requests": {"storage": "1Gi"}},
        }
        if storage_class:
            spec["storageClassName"] = storage_class
        self.create(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": name},
                "spec": spec,
            }
        )

    def phase(self, pod: str) -> str:
        """Return the phase of a pod, or an empty string when it does not exist."""
        return str(self.get("pod", pod).get("status", {}).get("phase", ""))

    def wait_phase(self, pod: str, *phases: str, seconds: float = 60) -> str:
        """Wait for one of the phases and return it. Raises TimedOut with the output of kubectl describe."""
        return str(
            until(
                lambda: self.phase(pod) in phases and self.phase(pod),
                seconds,
                lambda: self.run("describe", "pod", pod),
            )
        )

    def run_script(self, script: str, name: str = "script", **options: Any) -> str:
        """Run a shell script to completion in a pod of the toolbox image, and return its output."""
        self.create(pod(name, script, **options))
        assert self.wait_phase(name, "Succeeded", "Failed") == "Succeeded", self.run(
            "logs", name
        )
        return self.run("logs", name)


@contextmanager
def temporary_namespace(
    kube: Kube, name: str, labels: dict[str, str] | None = None
) -> Iterator[KubeNamespace]:
    """Create a namespace, wait for its service account, and delete the namespace at the end of the context."""
    kube.apply(
        [
            {
                "apiVersion": "v1",
                "kind": "Namespace",
                "metadata": {"name": name, "labels": labels or RESTRICTED},
            }
        ]
    )
    namespace = KubeNamespace(kube, name)
    until(
        lambda: namespace.get("serviceaccount", "default"),
        30,
        f"namespace {name} has no service account",
    )
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
    """Return a pod that the Pod Security level `restricted` admits; `claims` maps claim names to mount paths."""
    container: Object = {
        "name": "main",
        "image": image,
        "imagePullPolicy": pull,
        "command": command or ["sh", "-c", script],
        "securityContext": UNPRIVILEGED,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, *_mounts(claims)],
    }
    volumes = [
        {"name": claim, "persistentVolumeClaim": {"claimName": claim}}
        for claim in claims or {}
    ]
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
    return [
        {"name": claim, "mountPath": path} for claim, path in (claims or {}).items()
    ]


def job(name: str, template: Object) -> Object:
    """Return a Job of one attempt that fails as soon as its pod is disrupted, like the operator's Jobs."""
    spec = {
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                }
            ]
        },
        "podReplacementPolicy": "Failed",
        "template": {
            "metadata": {"labels": {"attempt": name}},
            "spec": template["spec"],
        },
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": spec,
    }


@dataclass
class PodWatch:
    """The watch events of all pods of a namespace, in order of arrival."""

    events: list[tuple[str, Object]] = field(default_factory=list)

    def events_of(self, prefix: str) -> list[tuple[str, Object]]:
        """Return the events of pods whose name starts with the prefix."""
        return [
            (kind, pod)
            for kind, pod in self.events
            if pod["metadata"]["name"].startswith(prefix)
        ]

    def is_deleted(self, prefix: str) -> bool:
        """Check whether a pod with that prefix was deleted."""
        return any(kind == "DELETED" for kind, _ in self.events_of(prefix))

    def termination(self, prefix: str) -> Object:
        """Return the last observed exit code, termination message and disruption reason, as far as observed."""
        ending: Object = {}
        for _, observed in self.events_of(prefix):
            conditions = observed["status"].get("conditions", [])
            for disruption in (
                condition["reason"]
                for condition in conditions
                if condition["type"] == "DisruptionTarget"
            ):
                ending["disruption"] = disruption
            for container in observed["status"].get("containerStatuses", []):
                terminated = container["state"].get("terminated")
                if terminated:
                    ending |= {
                        "code": terminated["exitCode"],
                        "message": terminated.get("message", ""),
                    }
        return ending


@contextmanager
def watch_pods(namespace: KubeNamespace) -> Iterator[PodWatch]:
    """Watch the pods of a namespace until the end of the context, as an operator would."""
    command = [
        str(namespace.kube.kubectl),
        "--kubeconfig",
        str(namespace.kube.kubeconfig),
        "--namespace",
        namespace.name,
    ]
    command += ["get", "pods", "--watch", "--output-watch-events", "-o", "json"]
    watch = PodWatch()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        reader = threading.Thread(target=_read, args=(process, watch), daemon=True)
        reader.start()
        try:
            yield watch
        finally:
            process.terminate()
            reader.join(5)


def _read(process: subprocess.Popen[str], watch: PodWatch) -> None:
    decoder = json.JSONDecoder()
    text = ""
    for line in process.stdout or ():
        text += line
        try:
            event, end = decoder.raw_decode(text)
        except ValueError:
            # kubectl prints an event over several lines: read on until it is complete.
            continue
        text = text[end:].lstrip()
        watch.events.append((event["type"], event["object"]))
