"""A stored pipeline that breaks a rule of a newer version can be edited, but for the fields that break the rule."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from support.operator.crd_rules import delete_policies
from support.operator.demo_manifest import manifest_with
from support.operator.operator_process import GROUP

from finetune_operator.crd import generate
from finetune_operator.crd.structural import RULES
from testcluster.errors import TimedOut
from testcluster.kube_namespace import KubeNamespace, temporary_namespace, until
from testcluster.provider import Provider

Spec = dict[str, Any]


@dataclass(frozen=True)
class Stored:
    """A pipeline from before the rules, and its edits."""

    spec: Spec
    """What breaks a rule, merged into the demo."""
    admitted: tuple[Spec, ...]
    refused: tuple[Spec, ...]
    message: str
    """Part of the refusal."""


ADAPTER = {"uri": "pvc://a/b", "format": "Adapter"}
STORED = {
    "path": Stored(
        {"model": {"uri": "models/base"}},
        ({"train": {"epochs": 2}}, {"model": {"uri": "hf://org/base"}}),
        ({"model": {"uri": "models/other"}},),
        "model.uri: a pod cannot read",
    ),
    "data": Stored(
        {"datasets": [{"uri": "data/a.jsonl"}]},
        ({"prepare": {"contextLength": 512}},),
        ({"datasets": [{"uri": "data/a.jsonl"}, {"uri": "data/b.jsonl"}]},),
        "datasets: a pod cannot read",
    ),
    "nodes": Stored(
        {"train": {"nodes": 2}},
        ({"train": {"epochs": 2}}, {"workspace": {"whenDeleted": "Delete"}}),
        ({"train": {"nodes": 3}}, {"workspace": {"accessMode": "ReadWriteOnce"}}),
        "train.nodes: all nodes mount the workspace",
    ),
    "weights": Stored(
        {"train": {"method": "Full", "lora": None}, "evaluate": {"weights": "Adapter"}},
        ({"train": {"epochs": 2}}, {"evaluate": {"weights": "Merged"}}),
        ({"push": {"targets": [{"uri": "pvc://a/m"}, ADAPTER]}},),
        "push.targets: train.method Full trains no adapter",
    ),
    "expiry": Stored(
        {"whenExpired": "Retain"},
        ({"seed": 7}, {"ttlSecondsAfterFinished": 60}),
        (),
        "",
    ),
    "server": Stored(
        {"whenExpired": "Delete", "ttlSecondsAfterFinished": 9, "deploy": {}},
        ({"deploy": {"replicas": 2}}, {"ttlSecondsAfterFinished": 10}),
        (),
        "",
    ),
    "resources": Stored(
        {"train": {"pod": {"resources": {"requests": {"memory": 16}}}}},
        ({"train": {"epochs": 2}}, {"train": {"pod": {"labels": {"a": "b"}}}}),
        ({"train": {"pod": {"resources": {"requests": {"memory": 17}}}}},),
        "is less than a megabyte",
    ),
}
"""Name of a pipeline -> what it has stored. All rules but the last one's are rules of the spec itself."""


@pytest.fixture(scope="module")
def namespace(control_plane: Provider, rules: list[dict]) -> Iterator[KubeNamespace]:
    """A namespace with pipelines from before the rules, on an API server that checks them now."""
    kube = control_plane.kube
    delete_policies(kube)
    kube.apply([without_all_rules(generate.definition(rules=False))])
    until(lambda: "finetunepipelines" in kube.run("api-resources", GROUP), 30)
    with temporary_namespace(kube, f"ratchets-in-{len(rules)}-objects") as created:
        until(lambda: not refusal_of(created, "create", "path"), 30)
        for name in STORED:
            created.create(manifest(name))
        kube.apply(rules)
        until(lambda: refusal_of(created, "create", "path"), 30)
        yield created
    delete_policies(kube)


def without_all_rules(part: Any) -> Any:
    """Return the CRD without the rules that stay in the schema beside a policy, too."""
    if isinstance(part, list):
        return [without_all_rules(item) for item in part]
    if not isinstance(part, dict):
        return part
    return {
        key: without_all_rules(value) for key, value in part.items() if key != RULES
    }


def manifest(name: str) -> Spec:
    created = manifest_with(name)
    for field, value in STORED[name].spec.items():
        known = created["spec"].get(field)
        both = isinstance(value, dict) and isinstance(known, dict)
        created["spec"][field] = {**known, **value} if both else value
    return created


def refusal_of(namespace: KubeNamespace, verb: str, name: str, *patch: str) -> str:
    """Return the API server's refusal of a request in dry-run; empty if it would be admitted."""
    try:
        if verb == "create":
            given = json.dumps({**manifest(name), "metadata": {"name": f"new-{name}"}})
            namespace.run("create", "--dry-run=server", "-f", "-", given=given)
        else:
            namespace.run(verb, "ft", name, "--dry-run=server", *patch)
    except TimedOut as error:
        return str(error)
    return ""


def refusal_of_edit(namespace: KubeNamespace, name: str, spec: Spec) -> str:
    patch = json.dumps({"spec": spec})
    return refusal_of(namespace, "patch", name, "--type=merge", "-p", patch)


@pytest.mark.parametrize("name", STORED)
def test_new_pipeline_breaks_the_rule(namespace: KubeNamespace, name: str):
    assert refusal_of(namespace, "create", name)


@pytest.mark.parametrize("name", STORED)
def test_stored_pipeline_is_edited_elsewhere(namespace: KubeNamespace, name: str):
    refusals = [
        refusal_of_edit(namespace, name, spec) for spec in STORED[name].admitted
    ]
    assert refusals == [""] * len(refusals)
    assert not refusal_of(namespace, "annotate", name, "finetune.dev/cancel=now")


@pytest.mark.parametrize("name", STORED)
def test_field_that_breaks_a_rule_is_mended_or_kept(
    namespace: KubeNamespace, name: str
):
    for spec in STORED[name].refused:
        assert STORED[name].message in refusal_of_edit(namespace, name, spec)


def test_operator_writes_the_status_of_a_stored_pipeline(namespace: KubeNamespace):
    status = json.dumps({"status": {"phase": "Failed"}})
    for name in STORED:
        namespace.run(
            *("patch", "ft", name, "--subresource=status", "--type=merge", "-p", status)
        )
        assert namespace.get("ft", name)["status"]["phase"] == "Failed"
