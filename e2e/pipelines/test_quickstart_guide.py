"""The quickstart's commands for a cluster, extracted from its text and run in a shell, do what it promises."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from e2e.pipelines.chart import Operator
from e2e.pipelines.driver import PipelineDriver
from e2e.reference_run import DEMO, MANIFEST, ROOT
from testcluster.kube import Kube
from testcluster.kube_namespace import KubeNamespace
from testcluster.provider import Provider

GUIDE = ROOT / "docs" / "guides" / "quickstart.md"
MATERIAL = DEMO / "material.yaml"
SKIPPED = ("make ", "helm ", "kubectl get ft --watch")
"""Lines that begin so are not run: fixtures make the images and install the chart, and `--watch` never returns."""


def blocks(section: str) -> list[str]:
    """Return the fenced blocks of a section of the guide, with continued lines joined."""
    text = GUIDE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [block.strip().replace("\\\n", " ") for block in text.split("```")[1::2]]


def make_checkout(folder: Path) -> Path:
    """Return a folder in which the guide's commands find the demo's files.

    Without FAULTS=all they train the base model for one step, which takes seconds instead of minutes, and the gate is
    open: such a model does not pass it.
    """
    demo = folder / DEMO.relative_to(ROOT)
    shutil.copytree(DEMO, demo)
    if os.environ.get("FAULTS") != "all":
        _replace(demo / "material.py", "\nSTEPS = 600\n", "\nSTEPS = 1\n")
        _replace(demo / "pipeline.yaml", "value: 0.5", "value: 0.0")
    return folder


def _replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, f"{file} has {text.count(old)} times {old!r}"
    file.write_text(text.replace(old, new))


def run_block(block: str, kube: Kube, folder: Path = ROOT) -> str:
    """Run a block in bash until the first error, and return its output; raises CalledProcessError."""
    lines = [line for line in block.splitlines() if not line.startswith(SKIPPED)]
    script = "\n".join(["trap 'kill $(jobs -p) 2> /dev/null || true' EXIT", *lines])
    # `finetune` is beside the interpreter: `make test` activates no virtual environment.
    path = os.pathsep.join(
        [str(kube.kubectl.parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    environment = os.environ | {"KUBECONFIG": str(kube.kubeconfig), "PATH": path}
    shell = ["bash", "-e", "-c", script]
    completed = subprocess.run(
        shell,
        cwd=folder,
        env=environment,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
    )
    print(completed.stdout)
    completed.check_returncode()
    return completed.stdout


@pytest.fixture(scope="module")
def docstrings(
    cluster: Provider, operator: Operator, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PipelineDriver]:
    """The demo's pipeline, applied with the guide's commands to the namespace `default`."""
    namespace = KubeNamespace(cluster.kube, "default")
    _, apply, _ = blocks("On a cluster")
    try:
        run_block(
            apply, cluster.kube, make_checkout(tmp_path_factory.mktemp("checkout"))
        )
        yield PipelineDriver(
            namespace, yaml.safe_load(MANIFEST.read_text())["metadata"]["name"]
        )
    finally:
        namespace.run(
            "delete",
            "-f",
            str(MANIFEST),
            "-f",
            str(MATERIAL),
            "--wait=false",
            "--ignore-not-found",
        )
        namespace.run("delete", "configmap", "demo-material", "--ignore-not-found")


def test_quickstart_commands_run_the_demo_to_success(docstrings: PipelineDriver):
    status = docstrings.status
    assert status["phase"] == "Succeeded", docstrings.describe()
    assert status["gatesPassed"]


def test_quickstart_request_returns_the_models_answer(
    docstrings: PipelineDriver, cluster: Provider
):
    *_, request = blocks("On a cluster")
    output = run_block(request, cluster.kube)
    [line] = [line for line in output.splitlines() if line.startswith("{")]
    assert (
        json.loads(line)["choices"][0]["text"]
        == docstrings.stage("deploy")["result"]["answer"]
    )
