"""After the loss of a cluster, nothing is trained again: docs/guides/disaster-recovery.md on an API server."""

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from support.operator.backup import (
    CLAIMS,
    PIPELINES,
    Object,
    backup,
    lose_everything,
    restore,
)
from support.operator.charts import CLUSTER_WIDE, render
from support.operator.operator_process import install_crd, running_operator
from support.operator.pipeline_objects import pipeline_manifest
from support.operator.scenario import ALL_STAGES
from support.operator.simulated_kubelet import SimulatedKubelet, simulated_kubelet

from e2e.pipelines.driver import PipelineDriver
from testcluster.kube_namespace import KubeNamespace, temporary_namespace
from testcluster.provider import Provider

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "disaster-recovery.md"
TEAM = "recovered-team"
DIGEST = "sha256:" + "a" * 64
PUBLISHED = {
    "target": "pvc://models/demo",
    "uri": "pvc://models/demo",
    "format": "Merged",
    "digest": DIGEST,
    "size": 1,
}
BEFORE_DEPLOY = ("prepare", "train", "evaluate", "push")


@dataclass(frozen=True)
class Cluster:
    """The namespaces of the operator and of a team, whose objects have been lost, and their backup."""

    own: KubeNamespace
    team: KubeNamespace
    pipelines: list[Object]
    claims: list[Object]
    manifests: dict[str, Object]
    models: str
    """What the guide's command has printed in the old cluster."""


@pytest.fixture(scope="module")
def cluster(
    control_plane: Provider, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Two pipelines: one that is served, after an edit, and one that trains."""
    kube = control_plane.kube
    install_crd(kube)
    with (
        temporary_namespace(kube, "recovered-operator") as own,
        temporary_namespace(kube, TEAM) as team,
    ):
        folder = tmp_path_factory.mktemp("before")
        manifests = {
            "served": manifest("served", workspace={"whenDeleted": "Delete"}),
            "training": manifest("training"),
        }
        with operating(own, team, folder) as kubelet:
            served = PipelineDriver.start(team, manifests["served"])
            served.wait_finished()
            manifests["served"]["spec"]["train"] = {"epochs": 2}
            PipelineDriver.start(team, manifests["served"]).wait_finished()
            kubelet.held.add("train")
            training = PipelineDriver.start(team, manifests["training"])
            training.wait_state("train", "Running")
            run_guide(team, folder, "In the old cluster")
        models = (folder / "models.txt").read_text()
        pipelines = backup(team, PIPELINES)
        claims = backup(team, CLAIMS)
        yield Cluster(own, team, pipelines, claims, manifests, models)


@pytest.fixture
def lost(cluster: Cluster) -> Cluster:
    lose_everything(cluster.team)
    return cluster


def manifest(name: str, **changes: Object) -> Object:
    return pipeline_manifest(name, {**ALL_STAGES, **changes})


@contextmanager
def operating(
    own: KubeNamespace, team: KubeNamespace, folder: Path
) -> Iterator[SimulatedKubelet]:
    """Run the operator and a kubelet until the end of the context."""
    with ExitStack() as stack:
        kubelet = stack.enter_context(simulated_kubelet(team))
        kubelet.results["push"] = {"published": [PUBLISHED]}
        objects = render(CLUSTER_WIDE, namespace=own.name)
        stack.enter_context(running_operator(own, objects, folder))
        yield kubelet


def commands(heading: str) -> str:
    """Return the commands of a section of the guide."""
    _, _, section = GUIDE.read_text().partition(f"## {heading}\n")
    block = re.search(r"```\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    assert block, heading
    return block[1].replace("TEAM", TEAM)


def run_guide(team: KubeNamespace, folder: Path, heading: str) -> None:
    """Run the commands of a section of the guide in a folder."""
    kubectl = Path(team.kube.kubectl).parent
    variables = {
        "PATH": f"{kubectl}:{os.environ['PATH']}",
        "KUBECONFIG": str(team.kube.kubeconfig),
    }
    subprocess.run(
        ["sh", "-euc", commands(heading)],
        cwd=folder,
        env=os.environ | variables,
        check=True,
    )


def as_is(pipelines: list[Object]) -> list[Object]:
    return pipelines


def of_other_version(pipelines: list[Object]) -> list[Object]:
    """Return the pipelines as an operator that hashes specs in another way would have stored them."""
    changed = deepcopy(pipelines)
    for pipeline in changed:
        status = pipeline["status"]
        status["observedVersion"] = "another"
        for stage in status["stages"]:
            contents = stage["inputs"].partition("-")[2]
            stage["inputs"] = f"0000000000000000-{contents}"
            stage["execution"] = "0000000000000000"
    return changed


@pytest.mark.parametrize("version", [as_is, of_other_version])
def test_restored_status_keeps_all_results(
    lost: Cluster, tmp_path: Path, version: Callable[[list[Object]], list[Object]]
) -> None:
    saved = {entry["metadata"]["name"]: entry for entry in lost.pipelines}
    results = {name: results_of(entry) for name, entry in saved.items()}
    restore(lost.team, lost.claims)
    restore(lost.team, version(lost.pipelines), with_status=True)
    claims = uids(lost.team)
    served = PipelineDriver(lost.team, "served")
    training = PipelineDriver(lost.team, "training")
    with operating(lost.own, lost.team, tmp_path) as kubelet:
        kubelet.held.add("train")
        training.until(lambda: len(training.stage("train")["attempts"]) == 2)
        training.wait_state("train", "Running")
        served.until(lambda: served.object["status"]["observedGeneration"] == 1)
        served.wait_finished()
        assert results_of(served.object) == results["served"]
        assert results_of(training.object) == results["training"]
        assert stages_of(served) == []
        assert stages_of(training) == ["train"]
        # The server is lost with its cluster.
        assert served.status["model"]["digest"] == DIGEST
        assert served.stage("deploy")["attempts"][-1]["number"] > 1
        assert uids(lost.team) == claims
        owners = lost.team.get("pvc", "served-workspace")["metadata"]["ownerReferences"]
        assert [owner["uid"] for owner in owners] == [served.object["metadata"]["uid"]]


def test_manifests_with_published_models_train_nothing(
    lost: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "models.txt").write_text(lost.models)
    for name, content in lost.manifests.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    run_guide(lost.team, tmp_path, "In the new cluster")
    served = PipelineDriver(lost.team, "served")
    with operating(lost.own, lost.team, tmp_path):
        served.until(lambda: served.object["status"].get("phase"))
        served.wait_finished()
        assert stages_of(served) == []
        model = served.status["model"]
        assert model["uri"] == PUBLISHED["uri"]
        assert model["digest"] == DIGEST
        assert served.stage("deploy")["state"] == "Succeeded"
    # It has published nothing, so the guide has not applied it.
    assert not lost.team.get("ft", "training")


def results_of(pipeline: Object) -> dict[str, Object]:
    """Return the result of each stage that has one, but for the server."""
    stages = {stage["name"]: stage for stage in pipeline["status"]["stages"]}
    return {
        name: stages[name]["result"]
        for name in BEFORE_DEPLOY
        if stages[name].get("result")
    }


def stages_of(driver: PipelineDriver) -> list[str]:
    """Return the stages of all Jobs of a pipeline."""
    return [job["metadata"]["labels"]["finetune.dev/stage"] for job in driver.jobs()]


def uids(team: KubeNamespace) -> dict[str, str]:
    """Return the uid of each claim."""
    return {
        claim["metadata"]["name"]: claim["metadata"]["uid"]
        for claim in backup(team, CLAIMS)
    }
