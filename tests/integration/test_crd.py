"""An API server accepts the CRD, explains its fields, sets defaults, and stores what the operator writes."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.operator.demo_manifest import manifest_with
from support.operator.operator_process import install_crd

from finetune_trainer.contract import LossCurve, ValidationPoint
from testcluster.errors import TimedOut
from testcluster.kube_namespace import (
    KubeNamespace,
    crd_conditions,
    temporary_namespace,
)
from testcluster.provider import Provider

ROOT = Path(__file__).parents[2]

CRD = "finetunepipelines.finetune.dev"
EXAMPLES = sorted((ROOT / "examples").glob("*/pipeline.yaml"))
ARGOCD = ROOT / "deploy" / "argocd" / "examples"


@pytest.fixture(scope="module")
def namespace(control_plane: Provider) -> Iterator[KubeNamespace]:
    """A namespace on an API server that serves the CRD."""
    install_crd(control_plane.kube)
    with temporary_namespace(control_plane.kube, "pipelines") as created:
        yield created


def test_crd_is_established_with_a_structural_schema(namespace: KubeNamespace):
    conditions = crd_conditions(namespace.kube, CRD)
    assert conditions["Established"] == "True"
    assert conditions["NamesAccepted"] == "True"
    assert conditions.get("NonStructuralSchema", "False") == "False"


@pytest.mark.parametrize("name", ["post-sync-hook", "template-with-trigger"])
def test_api_server_accepts_pipelines_of_argo_cds_examples(
    namespace: KubeNamespace, name: str
):
    """A hook is a pipeline; a template is a pipeline in a ConfigMap."""
    [pipeline] = pipelines(ARGOCD / f"{name}.yaml")
    answer = namespace.run(
        "create",
        "--dry-run=server",
        "--validate=strict",
        "-f",
        "-",
        "-o",
        "json",
        given=json.dumps(pipeline),
    )
    assert json.loads(answer)["metadata"]["name"].startswith(
        pipeline["metadata"]["generateName"]
    )


def pipelines(file: Path) -> Iterator[dict]:
    for manifest in yaml.safe_load_all(file.read_text()):
        if manifest["kind"] == "ConfigMap":
            yield yaml.safe_load(manifest["data"]["pipeline.yaml"])
        elif manifest["kind"] == "FineTunePipeline":
            yield manifest


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.parent.name)
def test_api_server_accepts_examples(namespace: KubeNamespace, file: Path):
    answer = namespace.run(
        "create", "--dry-run=server", "--validate=strict", "-f", str(file), "-o", "json"
    )
    assert (
        json.loads(answer)["spec"]["model"]
        == yaml.safe_load(file.read_text())["spec"]["model"]
    )


def test_api_server_sets_defaults_of_the_demo(namespace: KubeNamespace):
    namespace.create(manifest_with("defaults"))
    spec = namespace.get("ft", "defaults")["spec"]
    assert spec["train"]["lora"]["targetModules"] == ["all-linear"]
    assert spec["train"]["maxFailures"] == 3
    assert spec["train"]["maxInterruptions"] == 20


def test_kubectl_explain_shows_type_and_description(namespace: KubeNamespace):
    output = namespace.run("explain", "ft.spec.train.lora.rank")
    assert "rank" in output.lower()
    assert "<integer>" in output
    assert len(output.split("DESCRIPTION:")[1].strip()) > 20


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
    assert "phase" not in namespace.get("ft", "subresource").get("status", {})
    namespace.run(
        "patch",
        "ft",
        "subresource",
        "--subresource=status",
        "--type=merge",
        "-p",
        '{"status":{"phase":"Running"}}',
    )
    assert namespace.get("ft", "subresource")["status"]["phase"] == "Running"
    columns = namespace.run("get", "ft", "subresource").splitlines()
    assert columns[0].split()[:2] == ["NAME", "PHASE"]
    assert "Running" in columns[1]


def test_status_accepts_reason_and_state_of_another_version(namespace: KubeNamespace):
    """After a rollback of the CRD, the older operator writes them back as it has read them."""
    namespace.create(manifest_with("rollback"))
    newer = {
        "status": {
            "stages": [{"name": "train", "state": "Dreaming", "reason": "NodeDrained"}]
        }
    }
    namespace.run(
        "patch",
        "ft",
        "rollback",
        "--subresource=status",
        "--type=merge",
        "-p",
        json.dumps(newer),
    )
    assert (
        namespace.get("ft", "rollback")["status"]["stages"] == newer["status"]["stages"]
    )


def test_status_stores_the_largest_loss_curve(namespace: KubeNamespace):
    validations = tuple(
        ValidationPoint(step=step, loss=2.3456) for step in range(1, 66)
    )
    curve = LossCurve(
        every_steps=10**9,
        step=64 * 10**9,
        losses=(1.2345, *[1e15] * 63),
        validations=validations,
    )
    written = {
        "stages": [
            {
                "name": "train",
                "lossCurve": curve.model_dump(mode="json", by_alias=True),
            }
        ]
    }
    namespace.create(manifest_with("curve"))
    namespace.run(
        "patch",
        "ft",
        "curve",
        "--subresource=status",
        "--type=merge",
        "-p",
        json.dumps({"status": written}),
    )
    [stage] = namespace.get("ft", "curve")["status"]["stages"]
    assert LossCurve.model_validate(stage["lossCurve"]) == curve


def test_pipeline_is_listed_by_short_name_and_under_all(namespace: KubeNamespace):
    namespace.create(manifest_with("found"))
    assert "found" in namespace.run("get", "ft")
    assert "finetunepipeline.finetune.dev/found" in namespace.run("get", "all")
