"""An API server accepts the CRD, explains its fields, sets defaults, and refuses what the models refuse."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from testcluster.errors import TimedOut
from testcluster.kube import Kube
from testcluster.kube_namespace import KubeNamespace, temporary_namespace, until
from testcluster.provider import Provider

ROOT = Path(__file__).parents[2]
MANIFEST = yaml.safe_load((ROOT / "examples" / "demo" / "pipeline.yaml").read_text())


@pytest.fixture(scope="module")
def namespace(control_plane: Provider) -> Iterator[KubeNamespace]:
    """A namespace on an API server that serves the CRD."""
    control_plane.kube.apply((ROOT / "crds" / "finetunepipelines.yaml").read_text())
    until(lambda: conditions(control_plane.kube).get("Established") == "True", 30)
    with temporary_namespace(control_plane.kube, "pipelines") as created:
        until(lambda: "finetunepipelines" in control_plane.kube.run("api-resources", "--api-group=finetune.dev"), 30)
        yield created


def conditions(kube: Kube) -> dict[str, str]:
    """Return the CRD's conditions: type and status. A new CRD has none until the API server has processed it."""
    status = kube.json("get", "crd", "finetunepipelines.finetune.dev").get("status", {})
    return {condition["type"]: condition["status"] for condition in status.get("conditions") or ()}


def manifest_with(name: str, **stages) -> dict:
    """Return the demo's manifest under another name, with fields of stages replaced."""
    manifest = copy.deepcopy(MANIFEST)
    manifest["metadata"]["name"] = name
    for stage, fields in stages.items():
        manifest["spec"].setdefault(stage, {}).update(fields)
    return manifest


def test_crd_is_established_with_a_structural_schema(namespace: KubeNamespace):
    found = conditions(namespace.kube)
    assert found["Established"] == "True"
    assert found["NamesAccepted"] == "True"
    assert found.get("NonStructuralSchema", "False") == "False"


def test_api_server_sets_defaults_of_the_demo(namespace: KubeNamespace):
    namespace.create(manifest_with("defaults"))
    spec = namespace.get("ftp", "defaults")["spec"]
    assert spec["train"]["lora"]["targetModules"] == ["all-linear"]
    assert spec["train"]["retries"] == {"failures": 3, "interruptions": 20}


def test_kubectl_explain_shows_type_and_description(namespace: KubeNamespace):
    output = namespace.run("explain", "ftp.spec.train.lora.rank")
    assert "rank" in output.lower()
    assert "<integer>" in output
    assert len(output.split("DESCRIPTION:")[1].strip()) > 20


@pytest.mark.parametrize(
    ("stages", "error"),
    [
        ({"train": {"lora": {"rank": 0}}}, "spec.train.lora.rank"),
        ({"push": {"placement": {"capacity": "spot"}}}, "spec.push.*placement.capacity: must be on-demand"),
        ({"train": {"resources": {"gpu": {"count": 2}}}}, "spec.train.*resources.gpu.count: must be 1 without command"),
        ({"train": {"placement": {"capacity": "moon"}}}, "spec.train.placement.capacity"),
        ({"evaluate": {"gate": {"task": "missing", "metric": "acc", "threshold": 0.5}}}, "gate"),
    ],
)
def test_api_server_refuses_an_invalid_field_by_its_path(namespace: KubeNamespace, stages, error):
    with pytest.raises(TimedOut, match=error):
        namespace.create(manifest_with("refused", **stages))


def test_strict_validation_names_an_unknown_field(namespace: KubeNamespace):
    with pytest.raises(TimedOut, match=r'unknown field "spec\.train\.lora\.rnak"'):
        namespace.run(
            "create",
            "--validate=strict",
            "-f",
            "-",
            given=json.dumps(manifest_with("typo", train={"lora": {"rnak": 8}})),
        )


def test_status_is_written_only_through_its_subresource(namespace: KubeNamespace):
    namespace.create(manifest_with("subresource") | {"status": {"phase": "Succeeded"}})
    assert "phase" not in namespace.get("ftp", "subresource").get("status", {})
    namespace.run(
        "patch", "ftp", "subresource", "--subresource=status", "--type=merge", "-p", '{"status":{"phase":"Running"}}'
    )
    assert namespace.get("ftp", "subresource")["status"]["phase"] == "Running"
    columns = namespace.run("get", "ftp", "subresource").splitlines()
    assert columns[0].split()[:2] == ["NAME", "PHASE"]
    assert "Running" in columns[1]


def test_pipeline_is_listed_by_short_name_and_under_all(namespace: KubeNamespace):
    namespace.create(manifest_with("found"))
    assert "found" in namespace.run("get", "ftp")
    assert "finetunepipeline.finetune.dev/found" in namespace.run("get", "all")
