"""Hostile values in every string of a spec: no pod that is built from them reaches beyond its namespace."""

import copy
import json

import pytest
from pydantic import ValidationError
from support.operator.built_objects import UID, BuiltObjects, built_objects
from support.operator.hostile import (
    VALUES,
    Object,
    full_spec,
    spec_schema,
    string_fields,
    trainers_spec,
    with_value,
)
from support.operator.pod_checker import expanded, pod_violations, received

from finetune_operator.kubernetes.translate.api_errors import Blocked

SPECS = {"own-programs": full_spec, "trainer": trainers_spec}
FIELDS = list(string_fields(spec_schema(), full_spec()))


def build(spec: Object) -> BuiltObjects | None:
    """Return the objects of a spec; None if the operator refuses the spec."""
    manifest = {"metadata": {"name": "mine"}, "spec": spec}
    try:
        return built_objects(manifest, "own")
    except (ValidationError, Blocked):
        return None


def violations(objects: BuiltObjects) -> list[str]:
    result = [
        problem
        for child in objects.workloads.values()
        for problem in pod_violations(child["spec"]["template"]["spec"])
    ]
    for child in objects:
        meta = child["metadata"]
        if meta["namespace"] != "own":
            result.append(f"{child['kind']} in {meta['namespace']}")
        if any(owner["uid"] != UID for owner in meta["ownerReferences"]):
            result.append(f"{child['kind']} of another owner")
    if objects.service and objects.service["spec"].keys() - {"selector", "ports"}:
        result.append(f"Service with {set(objects.service['spec'])}")
    return result


def test_fields_are_found_in_every_part_of_the_schema():
    assert {path[0] for path in FIELDS} >= {
        "model",
        "podDefaults",
        "datasets",
        "validation",
        "workspace",
        "prepare",
        "train",
        "evaluate",
        "push",
        "deploy",
    }
    assert ("train", "pod", "envFrom", 0, "secretRef", "name") in FIELDS
    assert ("train", "pod", "affinity", "hostPath") in FIELDS
    assert ("evaluate", "tasks", 0, "name") in FIELDS


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("value", VALUES)
def test_hostile_value_in_any_field_reaches_nothing(kind, value):
    spec = SPECS[kind]()
    accepted = 0
    for path in FIELDS:
        objects = build(with_value(spec, path, value))
        if objects:
            accepted += 1
            assert violations(objects) == [], path
    assert accepted > 5, "nothing was checked"


@pytest.mark.parametrize("kind", SPECS)
def test_harmless_spec_is_built_without_violation(kind):
    objects = build(SPECS[kind]())
    assert objects
    assert violations(objects) == []
    assert objects.workloads.keys() == {
        "prepare",
        "train",
        "evaluate",
        "push",
        "deploy",
    }


def pod() -> Object:
    objects = build(full_spec())
    assert objects
    return copy.deepcopy(objects.jobs["train"]["spec"]["template"]["spec"])


BREAKS = {
    "unexpected field hostNetwork": lambda pod: pod.update(hostNetwork=True),
    "a token of its service account is mounted": lambda pod: pod.update(
        automountServiceAccountToken=True
    ),
    "serviceAccountName 'victim/default'": lambda pod: pod.update(
        serviceAccountName="victim/default"
    ),
    "the pod may run as root": lambda pod: pod["securityContext"].update(runAsUser=0),
    "no seccomp profile": lambda pod: pod["securityContext"].pop("seccompProfile"),
    "persistentVolumeClaim 'victim/key'": lambda pod: pod["volumes"][0][
        "persistentVolumeClaim"
    ].update(claimName="victim/key"),
    "volume of the kind hostPath": lambda pod: pod["volumes"].append(
        {"name": "x", "hostPath": {"path": "/"}}
    ),
    "unexpected field volumeDevices": lambda pod: pod["containers"][0].update(
        volumeDevices=[]
    ),
    "security context": lambda pod: pod["containers"][0]["securityContext"].update(
        privileged=True
    ),
    "termination message at /etc": lambda pod: pod["containers"][0].update(
        terminationMessagePath="/etc/x"
    ),
    "mount at /claims/../etc": lambda pod: pod["containers"][0]["volumeMounts"][
        0
    ].update(mountPath="/claims/../etc"),
    "mount at /etc": lambda pod: pod["containers"][0]["volumeMounts"][0].update(
        mountPath="/etc"
    ),
    "mount with": lambda pod: pod["containers"][0]["volumeMounts"][0].update(
        subPathExpr="$(X)"
    ),
    "variable X expands Y": lambda pod: pod["containers"][0]["env"].append(
        {"name": "X", "value": "$(Y)"}
    ),
    "command expands NODE": lambda pod: pod["containers"][0].update(
        command=["$(NODE)"]
    ),
    "environment of": lambda pod: pod["containers"][0].update(
        envFrom=[{"secretRef": {"name": "victim/key"}}]
    ),
    "port of the node": lambda pod: pod["containers"][0].update(
        ports=[{"containerPort": 1, "hostPort": 1}]
    ),
    "request of the kubelet": lambda pod: pod["containers"][0].update(
        lifecycle={"preStop": {"httpGet": {"port": 1}}}
    ),
    "readinessProbe of another host": lambda pod: pod["containers"][0].update(
        readinessProbe={"httpGet": {"host": "kubernetes.default.svc", "port": 443}}
    ),
}


@pytest.mark.parametrize(("problem", "change"), BREAKS.items(), ids=BREAKS)
def test_checker_finds_a_dangerous_pod(problem, change):
    """Proves that the other tests of this file would notice such a pod."""
    changed = pod()
    change(changed)
    assert [result for result in pod_violations(changed) if problem in result], (
        json.dumps(changed)
    )


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("$(A)", ["A"]),
        ("$$(A)", []),
        ("$$$(A)", ["A"]),
        ("$$$$(A)", []),
        ("$(A", []),
        ("$A", []),
        ("$(A)$(B)", ["A", "B"]),
    ],
)
def test_checker_expands_as_the_kubelet_does(text, names):
    assert expanded(text) == names


@pytest.mark.parametrize(
    "text",
    [
        "$(A)",
        "$(A",
        "$A",
        "x$",
        "{$}",
        "$(A)$(B)",
        "$ (A)",
        "$$",
        "echo $$",
        "$$x^2$$",
        "$$(A)",
        "$$$(A)",
    ],
)
def test_container_receives_each_text_unchanged(text):
    """A manifest means the same in a local run, which expands nothing."""
    spec = full_spec()
    spec["train"]["pod"]["env"] = [{"name": "A", "value": text}]
    objects = build(spec)
    assert objects
    [container] = objects.jobs["train"]["spec"]["template"]["spec"]["containers"]
    [sent] = [
        variable["value"] for variable in container["env"] if variable["name"] == "A"
    ]
    assert received(sent) == text
