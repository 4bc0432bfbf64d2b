"""Disaster recovery: a new cluster gets the manifest of a pipeline with the model that it has published."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.operator.charts import CLUSTER_WIDE, render
from support.operator.operator_process import install_crd, running_operator
from support.operator.pipeline_objects import pipeline_manifest
from support.operator.scenario import ALL_STAGES

from e2e.pipelines.driver import PipelineDriver
from testcluster.fixtures import namespace_name
from testcluster.kube_namespace import KubeNamespace, temporary_namespace
from testcluster.provider import Provider

DIGEST = "sha256:" + "a" * 64
SKIPPED = ("prepare", "train", "evaluate")


@pytest.fixture
def team(
    control_plane: Provider, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[KubeNamespace]:
    """The namespace of a team in a new cluster."""
    kube = control_plane.kube
    install_crd(kube)
    name = namespace_name(request.node.name)
    with (
        temporary_namespace(kube, f"{name}-operator") as own,
        temporary_namespace(kube, name) as created,
        running_operator(own, render(CLUSTER_WIDE, namespace=own.name), tmp_path),
    ):
        yield created


def test_adopted_pipeline_trains_nothing(team: KubeNamespace) -> None:
    spec = {key: value for key, value in ALL_STAGES.items() if key != "deploy"}
    manifest = pipeline_manifest("adopted", {**spec, "workspace": {"size": "1Gi"}})
    model = f"pvc://models/demo@{DIGEST}"
    manifest["metadata"]["annotations"] = {"finetune.dev/adopt": model}
    driver = PipelineDriver.start(team, manifest)
    driver.wait_finished(seconds=60)
    status = driver.status
    assert status["phase"] == "Succeeded"
    assert status["model"]["digest"] == DIGEST
    assert driver.jobs() == []
    states = {driver.stage(name)["state"] for name in SKIPPED}
    assert states == {"Skipped"}
