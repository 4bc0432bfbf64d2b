"""A live API server takes the CRD, explains it, fills in defaults and refuses what the models refuse."""

import copy
import json
from pathlib import Path

import pytest
import yaml

from testcluster.errors import TimedOut
from testcluster.kube import Kube
from testcluster.kube_namespace import KubeNamespace, temporary_namespace, until

ROOT = Path(__file__).parents[2]
MANIFEST = yaml.safe_load((ROOT / "examples" / "demo" / "pipeline.yaml").read_text())


@pytest.fixture(scope="module")
def namespace(control_plane):
    control_plane.kube.apply((ROOT / "crds" / "finetunepipelines.yaml").read_text())
    until(lambda: conditions(control_plane.kube).get("Established") == "True", 30)
    with temporary_namespace(control_plane.kube, "pipelines") as made:
        until(lambda: "finetunepipelines" in control_plane.kube.run("api-resources", "--api-group=finetune.dev"), 30)
        yield made


def conditions(kube: Kube) -> dict[str, str]:
    """Give the definition's conditions; there are none while nobody has looked at it."""
    status = kube.json("get", "crd", "finetunepipelines.finetune.dev").get("status", {})
    return {one["type"]: one["status"] for one in status.get("conditions") or ()}


def changed(name: str, **stages) -> dict:
    manifest = copy.deepcopy(MANIFEST)
    manifest["metadata"]["name"] = name
    for stage, fields in stages.items():
        manifest["spec"].setdefault(stage, {}).update(fields)
    return manifest


def test_the_crd_has_no_complaints_about_its_schema(namespace: KubeNamespace):
    said = conditions(namespace.kube)
    assert said["Established"] == "True"
    assert said["NamesAccepted"] == "True"
    assert said.get("NonStructuralSchema", "False") == "False"


def test_the_demos_manifest_is_taken_and_given_its_defaults(namespace: KubeNamespace):
    namespace.create(changed("taken"))
    spec = namespace.get("ftp", "taken")["spec"]
    assert spec["train"]["lora"]["targetModules"] == ["all-linear"]
    assert spec["train"]["retries"] == {"failures": 3, "interruptions": 20}


def test_kubectl_explain_tells_what_a_field_is_for(namespace: KubeNamespace):
    told = namespace.run("explain", "ftp.spec.train.lora.rank")
    assert "rank" in told.lower()
    assert "<integer>" in told
    assert len(told.split("DESCRIPTION:")[1].strip()) > 20


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train": {"lora": {"rank": 0}}}, "spec.train.lora.rank"),
        ({"push": {"placement": {"capacity": "spot"}}}, "spec.push.*placement.capacity: must be on-demand"),
        ({"train": {"placement": {"capacity": "moon"}}}, "spec.train.placement.capacity"),
        ({"evaluate": {"gate": {"task": "nobody", "metric": "acc", "threshold": 0.5}}}, "gate"),
    ],
)
def test_what_the_models_refuse_the_server_refuses_by_name(namespace: KubeNamespace, change, words):
    with pytest.raises(TimedOut, match=words):
        namespace.create(changed("refused", **change))


def test_an_unknown_field_is_named(namespace: KubeNamespace):
    with pytest.raises(TimedOut, match=r'unknown field "spec\.train\.lora\.rnak"'):
        namespace.run(
            "create", "--validate=strict", "-f", "-", given=json.dumps(changed("typo", train={"lora": {"rnak": 8}}))
        )


def test_status_is_written_through_its_own_door_only(namespace: KubeNamespace):
    namespace.create(changed("doors") | {"status": {"phase": "Succeeded"}})
    assert "phase" not in namespace.get("ftp", "doors").get("status", {})
    namespace.run(
        "patch", "ftp", "doors", "--subresource=status", "--type=merge", "-p", '{"status":{"phase":"Running"}}'
    )
    assert namespace.get("ftp", "doors")["status"]["phase"] == "Running"
    columns = namespace.run("get", "ftp", "doors").splitlines()
    assert columns[0].split()[:2] == ["NAME", "PHASE"]
    assert "Running" in columns[1]


def test_a_pipeline_is_found_by_its_short_name_and_among_all(namespace: KubeNamespace):
    namespace.create(changed("found"))
    assert "found" in namespace.run("get", "ftp")
    assert "finetunepipeline.finetune.dev/found" in namespace.run("get", "all")
