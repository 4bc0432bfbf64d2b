"""`kubectl scale` and autoscalers write the spec of a pipeline by the subresource scale: no rule is passed by."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.operator.crd_rules import delete_policies
from support.operator.demo_manifest import manifest_with
from support.operator.operator_process import GROUP

from finetune_operator.api.spec import PipelineSpec
from testcluster.errors import TimedOut
from testcluster.kube_namespace import KubeNamespace, temporary_namespace, until
from testcluster.provider import Provider

EXPIRY = {"whenExpired": "Delete", "ttlSecondsAfterFinished": 1}
ADAPTER = {"targets": [{"uri": "pvc://a/b", "format": "Adapter"}], "dtype": None}
WITHOUT: dict[str, tuple[dict[str, Any], str]] = {
    "push": ({"push": None}, "deploy: needs a published model"),
    "a merged target": ({"push": ADAPTER}, "deploy: needs a published model"),
    "a gate": ({"evaluate": {"gates": None}}, "deploy.when: GatesPassed needs a gate"),
    "an end that keeps it": (EXPIRY, "whenExpired: Delete would delete the server"),
}
"""What a pipeline without deploy lacks -> its fields, and the rule that refuses a server for it."""


@pytest.fixture(scope="module")
def namespace(control_plane: Provider, rules: list[dict]) -> Iterator[KubeNamespace]:
    kube = control_plane.kube
    kube.apply(rules)
    until(lambda: "finetunepipelines" in kube.run("api-resources", GROUP), 30)
    with temporary_namespace(kube, f"scale-{len(rules)}-objects") as created:
        yield created
    delete_policies(kube)


def without_deploy(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    manifest = manifest_with(name)
    spec = manifest["spec"]
    del spec["deploy"]
    for field, value in fields.items():
        if value is None:
            del spec[field]
        elif isinstance(value, dict):
            spec[field] = {
                key: inner
                for key, inner in {**spec[field], **value}.items()
                if inner is not None
            }
        else:
            spec[field] = value
    return manifest


@pytest.mark.parametrize("lack", WITHOUT)
def test_scale_adds_no_server_that_a_rule_refuses(namespace: KubeNamespace, lack: str):
    fields, error = WITHOUT[lack]
    name = f"without-{lack.split()[1 if ' ' in lack else 0]}"
    namespace.create(without_deploy(name, fields))
    before = namespace.get("ft", name)["spec"]
    with pytest.raises(TimedOut, match=error) as refusal:
        namespace.run("scale", "ft", name, "--replicas=2")
    # No rule may name a field of deploy that only a default would add.
    assert "evaluating rule" not in str(refusal.value)
    assert namespace.get("ft", name)["spec"] == before


def test_scaled_pipeline_can_be_read(namespace: KubeNamespace):
    namespace.create(manifest_with("served"))
    namespace.create(without_deploy("not-served", {}))
    for name in ("served", "not-served"):
        namespace.run("scale", "ft", name, "--replicas=3")
        spec = namespace.get("ft", name)["spec"]
        read = PipelineSpec.model_validate_json(json.dumps(spec))
        assert read.deploy
        assert read.deploy.replicas == 3
    for count in (0, 65):
        with pytest.raises(TimedOut, match=r"spec\.deploy\.replicas"):
            namespace.run("scale", "ft", "served", f"--replicas={count}")
