"""The README's commands on a cluster, taken from its text: whoever copies them sees what it promises."""

import json
import os
import subprocess
from collections.abc import Iterator

import pytest
import yaml

from e2e.pipelines.chart import Operator
from e2e.pipelines.driver import PipelineDriver
from e2e.reference_run import DEMO, MANIFEST, ROOT
from testcluster.kube import Kube
from testcluster.kube_namespace import KubeNamespace
from testcluster.provider import Provider

MATERIAL = DEMO / "material.yaml"
BY_HAND = ("make ", "helm ", "kubectl get ftp --watch")
"""What the fixtures do, and what ends only when somebody has seen enough."""


def blocks(section: str) -> list[str]:
    """Give the commands of a section's fenced blocks, a line each."""
    text = (ROOT / "README.md").read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [block.strip().replace("\\\n", " ") for block in text.split("```")[1::2]]


def typed(block: str, kube: Kube) -> str:
    """Type a block into a shell, as whoever reads it; raises CalledProcessError."""
    lines = [line for line in block.splitlines() if not line.startswith(BY_HAND)]
    script = "\n".join(["trap 'kill $(jobs -p) 2> /dev/null || true' EXIT", *lines])
    path = f"{kube.kubectl.parent}:{os.environ['PATH']}"
    environment = os.environ | {"KUBECONFIG": str(kube.kubeconfig), "PATH": path}
    shell = ["bash", "-e", "-c", script]
    done = subprocess.run(shell, cwd=ROOT, env=environment, check=False, text=True, stdout=subprocess.PIPE)
    print(done.stdout)
    done.check_returncode()
    return done.stdout


@pytest.fixture(scope="module")
def docstrings(cluster: Provider, operator: Operator) -> Iterator[PipelineDriver]:
    """The demo, as the README has it applied, in the namespace in which one types."""
    namespace = KubeNamespace(cluster.kube, "default")
    apply, _ = blocks("On a cluster")
    try:
        typed(apply, cluster.kube)
        yield PipelineDriver(namespace, yaml.safe_load(MANIFEST.read_text())["metadata"]["name"])
    finally:
        namespace.run("delete", "-f", str(MANIFEST), "-f", str(MATERIAL), "--wait=false", "--ignore-not-found")
        namespace.run("delete", "configmap", "demo-material", "--ignore-not-found")


def test_the_demo_passes_its_gate_on_a_cluster(docstrings: PipelineDriver):
    status = docstrings.status
    assert status["phase"] == "Succeeded", docstrings.told()
    assert status["gate"]["passed"]


def test_the_model_answers_whoever_asks_as_it_is_written(docstrings: PipelineDriver, cluster: Provider):
    _, ask = blocks("On a cluster")
    said = typed(ask, cluster.kube)
    [line] = [line for line in said.splitlines() if line.startswith("{")]
    assert json.loads(line)["choices"][0]["text"] == docstrings.stage("deploy")["result"]["answer"]
