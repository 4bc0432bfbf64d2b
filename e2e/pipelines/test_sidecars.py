"""Containers that an admission policy injects into the pods of stages, as meshes do: plain, and as native sidecars."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.pipelines.driver import Object, PipelineDriver, pipeline
from testcluster.images.image_layers import TOOLBOX
from testcluster.kube_namespace import KubeNamespace, until

pytestmark = pytest.mark.usefixtures("operator")
LABEL = "example.com/mesh"
PORT = 15021
ENDLESS = "trap 'exit 0' TERM; while :; do sleep 1 & wait $!; done"
SECURE = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
"""What the Pod Security level restricted asks of each container."""
LATE = f"sleep 20; httpd -f -h /etc -p {PORT}"


def proxy(script: str, image: str = TOOLBOX, **more: Any) -> Object:
    """Return an injected container."""
    return {
        "name": "proxy",
        "image": image,
        "command": ["sh", "-c", script],
        "securityContext": SECURE,
        **more,
    }


def native(script: str) -> Object:
    """Return a native sidecar, which is started as soon as its port answers."""
    # The image has the programs in its shell only.
    command = ["sh", "-c", f"wget -qO- http://127.0.0.1:{PORT}/hostname"]
    probe = {"exec": {"command": command}}
    return proxy(script, restartPolicy="Always", startupProbe=probe)


PLAIN = {
    "plain-outlives": proxy(ENDLESS),
    "plain-fails": proxy("exit 1"),
    # Its image cannot be pulled: the process has ended long before it.
    "plain-late": proxy(ENDLESS, image="localhost:1/nothing:1"),
}
NATIVE = {
    # sh as process 1 ignores SIGTERM.
    "native-outlives": native(f"httpd -h /etc -p {PORT}; while :; do sleep 1; done"),
    "native-fails": native("exit 3"),
    "native-late": native(LATE),
}


def cel(value: Any, kind: str) -> str:
    """Return a value of JSON as CEL, with the objects of this type."""
    match value:
        case dict():
            fields = [
                f"{key}: {cel(item, f'{kind}.{key}')}" for key, item in value.items()
            ]
            return f"{kind}{{{', '.join(fields)}}}"
        case list():
            return f"[{', '.join(cel(item, kind) for item in value)}]"
        case bool():
            return str(value).lower()
        case str():
            return '"' + value.replace('"', '\\"') + '"'
        case _:
            return str(value)


def inject(namespace: KubeNamespace, case: str, container: Object) -> None:
    """Create the policy that adds the container to the pods with the label of this case."""
    field = "initContainers" if case in NATIVE else "containers"
    item = cel(container, f"Object.spec.{field}")
    name = f"{namespace.name}-{case}"
    selector = {"matchLabels": {"kubernetes.io/metadata.name": namespace.name}}
    pods = {
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "operations": ["CREATE"],
        "resources": ["pods"],
    }
    patches = [f'JSONPatch{{op: "add", path: "/spec/{field}/-", value: {item}}}']
    if field == "initContainers":
        patches.insert(0, f'JSONPatch{{op: "add", path: "/spec/{field}", value: []}}')
    expression = f"[{', '.join(patches)}]"
    labelled = f"object.metadata.?labels[?'{LABEL}'].orValue('') == '{case}'"
    namespace.create(
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingAdmissionPolicy",
            "metadata": {"name": name},
            "spec": {
                "matchConstraints": {
                    "namespaceSelector": selector,
                    "resourceRules": [pods],
                },
                "matchConditions": [{"name": "case", "expression": labelled}],
                "failurePolicy": "Fail",
                "reinvocationPolicy": "Never",
                "mutations": [
                    {"patchType": "JSONPatch", "jsonPatch": {"expression": expression}}
                ],
            },
        }
    )
    namespace.create(
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingAdmissionPolicyBinding",
            "metadata": {"name": name},
            "spec": {"policyName": name},
        }
    )


@pytest.fixture
def meshes(namespace: KubeNamespace) -> Iterator[None]:
    """The policies of all cases, which are deleted after the test."""
    cases = PLAIN | NATIVE
    for case, container in cases.items():
        inject(namespace, case, container)
    # The API server applies new policies after some seconds.
    until(lambda: all(injects(namespace, case) for case in cases), 60)
    yield
    names = [f"{namespace.name}-{case}" for case in cases]
    for kind in ("mutatingadmissionpolicybinding", "mutatingadmissionpolicy"):
        namespace.run("delete", kind, *names)


def injects(namespace: KubeNamespace, case: str) -> bool:
    """Return whether a new pod of the case gets the container."""
    container = {"name": "x", "image": TOOLBOX, "securityContext": SECURE}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "x", "labels": {LABEL: case}},
        "spec": {
            "securityContext": {
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
        },
    }
    command = ("create", "--dry-run=server", "-o", "json", "-f", "-")
    spec = json.loads(namespace.run(*command, given=json.dumps(pod)))["spec"]
    containers = [*spec["containers"], *spec.get("initContainers", [])]
    return len(containers) > 1


def start(namespace: KubeNamespace, case: str) -> PipelineDriver:
    """Start a pipeline whose pods have the label of the case."""
    manifest = pipeline(case, podDefaults={"labels": {LABEL: case}})
    return PipelineDriver.start(namespace, manifest)


def wait_ready(driver: PipelineDriver, field: str, text: str) -> None:
    """Wait until a field of the condition Ready has the text."""
    driver.until(lambda: text in driver.condition("Ready").get(field, ""))


@pytest.mark.usefixtures("meshes")
def test_injected_container_does_not_decide_about_the_stage(namespace: KubeNamespace):
    """A container that outlives, fails or starts late, as plain container and as native sidecar."""
    drivers = {case: start(namespace, case) for case in PLAIN | NATIVE}
    failing = drivers.pop("native-fails")

    wait_ready(drivers["native-late"], "message", "waits for the init container proxy")
    wait_ready(drivers["plain-outlives"], "reason", "SidecarRunning")
    wait_ready(failing, "reason", "SidecarFailed")
    message = failing.condition("Ready")["message"]
    assert "init container proxy failed (exit code 3)" in message
    for case, driver in drivers.items():
        driver.wait_state("prepare", "Succeeded", seconds=150)
        stage = driver.stage("prepare")
        outcomes = [attempt["outcome"] for attempt in stage["attempts"]]
        assert (outcomes, stage["failures"]) == (["Succeeded"], 0), case
    stopped = drivers["plain-outlives"].stage("prepare")["attempts"][0]
    assert stopped["stopping"] == "SidecarRunning"
