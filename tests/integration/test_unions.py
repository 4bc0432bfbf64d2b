"""A manifest replaces another manifest by `kubectl apply`, whichever members of the unions they have."""

import copy
import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import yaml

from testcluster.errors import TimedOut
from testcluster.kube_namespace import (
    KubeNamespace,
    temporary_namespace,
    until,
    wait_until_established,
)
from testcluster.provider import Provider

ROOT = Path(__file__).parents[2]
MANIFEST = yaml.safe_load((ROOT / "examples" / "demo" / "pipeline.yaml").read_text())
MODES = {"client": (), "server": ("--server-side",)}
KEY = {"name": "store", "key": "token"}


def variable(**fields: Any) -> dict[str, Any]:
    return {"pod": {"env": [{"name": "TOKEN", **fields}]}}


UNIONS: dict[str, list[dict[str, Any]]] = {
    "validation": [
        {},
        {"validation": {"fraction": 0.1}},
        {"validation": {"uri": "hf://org/held-out"}},
        {"validation": {"uri": "pvc://data/held-out", "format": "CSV"}},
    ],
    "steps": [{}, {"train": {"epochs": 2}}, {"train": {"maxSteps": 7}}],
    "method": [
        {},
        {"train": {"method": "LoRA", "lora": {"rank": 8}}},
        {"train": {"method": "QLoRA", "lora": {"variant": "DoRA"}}},
        {"train": {"method": "Full"}},
    ],
    "objective": [
        {},
        {"train": {"objective": "DPO"}},
        {"train": {"objective": "DPO", "dpo": {"beta": 0.2}}},
        {"train": {"objective": "SFT"}},
    ],
    "variable": [
        {"train": variable(value="x")},
        {"train": variable(valueFrom={"secretKeyRef": KEY})},
        {"train": variable(valueFrom={"configMapKeyRef": KEY})},
        {"train": variable(valueFrom={"fieldRef": {"fieldPath": "spec.nodeName"}})},
    ],
    "variables": [
        {},
        {"prepare": {"pod": {"envFrom": [{"secretRef": {"name": "a"}}]}}},
        {"prepare": {"pod": {"envFrom": [{"configMapRef": {"name": "a"}}]}}},
    ],
    "workspace": [
        {},
        {"workspace": {"size": "9Gi", "whenDeleted": "Delete"}},
        {"workspace": {"existingClaim": "shared"}},
        {"workspace": {"accessMode": "ReadWriteMany"}},
    ],
    "expiry": [
        {},
        {"ttlSecondsAfterFinished": 9},
        {"ttlSecondsAfterFinished": 9, "whenExpired": "Retain"},
        {"deploy": {"when": "Always"}},
    ],
}
"""Union -> its members. A member without a field takes the default."""
MEMBERS = max(map(len, UNIONS.values()))


@pytest.fixture(scope="module")
def namespace(control_plane: Provider):
    """A namespace on an API server that serves the CRD."""
    control_plane.kube.apply((ROOT / "crds" / "finetunepipelines.yaml").read_text())
    wait_until_established(control_plane.kube, "finetunepipelines.finetune.dev")
    with temporary_namespace(control_plane.kube, "unions") as created:
        until(
            lambda: (
                "finetunepipelines"
                in control_plane.kube.run("api-resources", "--api-group=finetune.dev")
            ),
            30,
        )
        yield created


def merge(fields: dict[str, Any], more: dict[str, Any]) -> None:
    """Add the fields of `more` to `fields`, level by level."""
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(fields.get(name), dict):
            merge(fields[name], value)
        else:
            fields[name] = copy.deepcopy(value)


def manifest(name: str, number: int) -> dict[str, Any]:
    """Return a manifest with this member of each union; unions with fewer members begin again."""
    whole = {key: value for key, value in MANIFEST.items() if key != "spec"}
    spec: dict[str, Any] = {
        "model": MANIFEST["spec"]["model"],
        "datasets": MANIFEST["spec"]["datasets"],
        "push": {"targets": [{"uri": "pvc://models/a"}]},
    }
    for members in UNIONS.values():
        merge(spec, members[number % len(members)])
    return {
        **whole,
        "metadata": {"name": name},
        "spec": spec,
    }


def apply(namespace: KubeNamespace, mode: str, whole: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(whole)
    command = ("apply", *MODES[mode], "-f", "-", "-o", "json")
    answer = json.loads(namespace.run(*command, given=text))
    return answer["spec"]


@pytest.mark.parametrize("mode", MODES)
def test_member_replaces_each_other_member_of_a_union(
    namespace: KubeNamespace, mode: str
):
    """The result is the same as if the second manifest had been created."""
    created = [
        apply(namespace, mode, manifest(f"{mode}-{number}", number))
        for number in range(MEMBERS)
    ]
    for first, second in permutations(range(MEMBERS), 2):
        name = f"{mode}-{first}-{second}"
        apply(namespace, mode, manifest(name, first))
        edited = apply(namespace, mode, manifest(name, second))
        assert edited == created[second], f"from member {first} to member {second}"


@pytest.mark.parametrize("mode", MODES)
def test_fraction_that_an_earlier_version_stored_can_be_removed(
    namespace: KubeNamespace, mode: str
):
    name = f"stored-{mode}"
    apply(namespace, mode, manifest(name, 0))
    stored = [{"op": "add", "path": "/spec/validation", "value": {"fraction": 0.05}}]
    removed = [{"op": "remove", "path": "/spec/validation"}]
    for change in (stored, removed):
        namespace.run("patch", "ft", name, "--type=json", "-p", json.dumps(change))
    edited = apply(namespace, mode, manifest(name, 2))
    assert edited["validation"] == {"uri": "hf://org/held-out", "format": "Auto"}


def test_refused_field_is_named_by_its_path(namespace: KubeNamespace):
    both = manifest("both", 0)
    both["spec"]["train"] = {"epochs": 1, "maxSteps": 1}
    expected = "spec.train.maxSteps: Forbidden: maxSteps: set epochs or maxSteps"
    with pytest.raises(TimedOut, match=expected):
        namespace.create(both)
