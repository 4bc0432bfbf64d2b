"""The demo's manifest on this machine, undisturbed: what a cluster's bytes are compared with."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from testcluster.kube_namespace import KubeNamespace, pod

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "examples" / "demo"
MANIFEST = DEMO / "pipeline.yaml"
DONE, BELOW_GATE = 0, 3


@dataclass(frozen=True)
class ReferenceRun:
    """A run of the manifest up to the end of training."""

    material: Path
    workspace: Path
    config: str
    """That training was started with."""

    def run(self, until: str) -> None:
        """Go on with it, up to the end of a stage."""
        run_demo(self.material, self.workspace.parents[1], until)

    @property
    def identity(self) -> str:
        """Of the training."""
        return str(json.loads(self.config)["identity"])

    @property
    def adapter(self) -> str:
        """Where its weights are, below the workspace."""
        return f"train/{self.identity}/output/adapter_model.safetensors"


@pytest.fixture(scope="session")
def reference_run(tmp_path_factory: pytest.TempPathFactory) -> ReferenceRun:
    """Run the demo's manifest up to the end of training; its base model has read next to nothing."""
    folder = tmp_path_factory.mktemp("laptop")
    material, run = folder / "material", folder / "run"
    make = f"import material, pathlib; material.make(pathlib.Path({str(material)!r}), steps=1)"
    subprocess.run([sys.executable, "-c", make], cwd=DEMO, env=environment(), check=True)
    run_demo(material, run, "train")
    [order] = run.glob("jobs/*-train-a1/job.json")
    return ReferenceRun(
        material, run / "volumes" / "workspace", json.loads(order.read_text())["env"]["FINETUNE_CONFIG"]
    )


def run_demo(material: Path, workdir: Path, until: str) -> None:
    """Run the manifest as a user does."""
    where = ["--claim", f"demo={material}", "--workdir", str(workdir), "--until", until]
    command = [sys.executable, "-m", "finetune_cli", "run", str(MANIFEST), *where]
    code = subprocess.run(command, env=environment(), check=False).returncode
    if code not in {DONE, BELOW_GATE}:  # its base model has read too little for the manifest's gate
        raise subprocess.CalledProcessError(code, command)


def environment() -> dict[str, str]:
    """Give what a process of ours needs, and nothing of whoever tests."""
    path = ":".join(str(ROOT / part) for part in ("operator", "trainer"))
    return {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "PYTHONPATH": path, "OMP_WAIT_POLICY": "PASSIVE"}


def material_for(namespace: KubeNamespace, laptop: ReferenceRun, **more: str) -> None:
    """Put the demo's material on a claim, by a pod that stays there; more: {claim: where it is mounted}."""
    namespace.claim("demo")
    claims = {"demo": "/claims/demo", **more}
    namespace.create(pod("filler", "busybox sleep 3600", node="ondemand-1", claims=claims, grace=1))
    namespace.wait_phase("filler", "Running")
    send(namespace, laptop.material, "/claims/demo")


def send(namespace: KubeNamespace, folder: Path, to: str) -> None:
    """Copy a folder into the filler's pod; raises CalledProcessError."""
    packed = subprocess.Popen(["tar", "-C", str(folder), "-cf", "-", "."], stdout=subprocess.PIPE)
    into = ["--kubeconfig", str(namespace.kube.kubeconfig), "-n", namespace.name, "exec", "-i", "filler", "--"]
    unpack = ["busybox", "tar", "-C", to, "-xf", "-"]
    subprocess.run([str(namespace.kube.kubectl), *into, *unpack], stdin=packed.stdout, check=True)
    if code := packed.wait():
        raise subprocess.CalledProcessError(code, packed.args)
