"""A local run of the demo's manifest without interruptions; tests compare a cluster's output with its bytes."""

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
DONE = 0
BELOW_GATE = 3


@dataclass(frozen=True)
class ReferenceRun:
    """A local run of the manifest up to the end of training."""

    material: Path
    workspace: Path
    config: str
    """FINETUNE_CONFIG of the train stage."""

    def run(self, until: str) -> None:
        """Continue the run up to the end of a stage."""
        run_demo(self.material, self.workspace.parents[1], until)

    @property
    def identity(self) -> str:
        """Identity of the train stage."""
        return str(json.loads(self.config)["identity"])

    @property
    def adapter(self) -> str:
        """Path of the adapter's weights, relative to the workspace."""
        return f"train/{self.identity}/output/adapter_model.safetensors"


@pytest.fixture(scope="session")
def reference_run(tmp_path_factory: pytest.TempPathFactory) -> ReferenceRun:
    """Run the demo's manifest up to the end of training, with a base model trained for one step only to save time."""
    folder = tmp_path_factory.mktemp("reference-run")
    material = folder / "material"
    run = folder / "run"
    make_material(material)
    run_demo(material, run, "train")
    [job] = run.glob("jobs/*-train-a1/job.json")
    config = json.loads(job.read_text())["env"]["FINETUNE_CONFIG"]
    return ReferenceRun(material, run / "volumes" / "workspace", config)


def make_material(folder: Path) -> None:
    """Create the demo's material with a base model trained for one step; raises CalledProcessError."""
    make = f"import material, pathlib; material.make(pathlib.Path({str(folder)!r}), steps=1)"
    subprocess.run(
        [sys.executable, "-c", make], cwd=DEMO, env=environment(), check=True
    )


def run_demo(material: Path, workdir: Path, until: str) -> None:
    """Run the manifest through the command line; raises CalledProcessError."""
    options = [
        "--claim",
        f"demo={material}",
        "--workdir",
        str(workdir),
        "--until",
        until,
    ]
    command = [sys.executable, "-m", "finetune_cli", "run", str(MANIFEST), *options]
    code = subprocess.run(command, env=environment(), check=False).returncode
    if code not in {
        DONE,
        BELOW_GATE,
    }:  # a base model of one step does not pass the manifest's gate
        raise subprocess.CalledProcessError(code, command)


def environment() -> dict[str, str]:
    """Return the environment of a subprocess: only what it needs, nothing of the environment of the test run."""
    path = ":".join(str(ROOT / part) for part in ("operator", "trainer"))
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": "/tmp",
        "PYTHONPATH": path,
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def upload_material(
    namespace: KubeNamespace, reference_run: ReferenceRun, **mounts: str
) -> None:
    """Copy the demo's material to the claim `demo` through the pod `filler`, which keeps running.

    `mounts` are further claims of that pod: {claim: mount path}.
    """
    namespace.claim("demo")
    claims = {"demo": "/claims/demo", **mounts}
    namespace.create(
        pod("filler", "busybox sleep 3600", node="ondemand-1", claims=claims, grace=1)
    )
    namespace.wait_phase("filler", "Running")
    upload(namespace, reference_run.material, "/claims/demo")


def upload(namespace: KubeNamespace, folder: Path, target: str) -> None:
    """Copy a folder to a path in the pod `filler`; raises CalledProcessError."""
    pack = subprocess.Popen(
        ["tar", "-C", str(folder), "-cf", "-", "."], stdout=subprocess.PIPE
    )
    execute = [
        "--kubeconfig",
        str(namespace.kube.kubeconfig),
        "-n",
        namespace.name,
        "exec",
        "-i",
        "filler",
        "--",
    ]
    unpack = ["busybox", "tar", "-C", target, "-xf", "-"]
    subprocess.run(
        [str(namespace.kube.kubectl), *execute, *unpack], stdin=pack.stdout, check=True
    )
    code = pack.wait()
    if code:
        raise subprocess.CalledProcessError(code, pack.args)
