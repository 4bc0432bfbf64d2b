"""One real training on the cluster, to which a test does something, and what became of it."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from e2e.pipelines.chart import Operator
from e2e.pipelines.driver import Object, PipelineDriver, merged
from e2e.pipelines.faults.journal import Entry, read_journal
from testcluster.errors import TimedOut
from testcluster.kube_namespace import KubeNamespace
from testcluster.linux_namespaces import cgroups
from testcluster.linux_namespaces.machine import Machine
from testcluster.linux_namespaces.provider import LinuxNamespaces
from testcluster.nodes import NAME

STEPS = 60
"""Steps of the training."""
EVERY_STEPS = 10
"""Steps between two of its periodic checkpoints."""
SPOT_NODES: Object = {"finetune.dev/capacity": "spot"}
PROGRAM = Path(__file__).with_name("observed_trainer.py").read_text()


def trainer_pod(stage: str) -> Object:
    """Return the pod of a stage that runs the observed trainer."""
    return {
        "command": ["python", "-P", "-c", PROGRAM, stage],
        "env": [
            {"name": "OMP_NUM_THREADS", "value": "1"},
            {"name": "OMP_WAIT_POLICY", "value": "PASSIVE"},
        ],
        "resources": {
            "requests": {"cpu": "200m", "memory": "512Mi"},
            "limits": {"memory": "3Gi"},
        },
    }


def manifest(name: str, claim: str, changes: Object) -> Object:
    """Return a pipeline of prepare and a training of a few seconds on spot nodes, with changes of its spec."""
    on_spot = {"placement": {"capacity": "Spot"}, "pod": {"nodeSelector": SPOT_NODES}}
    spec = {
        "seed": 7,
        "model": {"uri": "pvc://demo/base-model"},
        "datasets": [{"uri": "pvc://demo/data/train.jsonl"}],
        "validation": {"fraction": 0.05},
        "workspace": {"existingClaim": claim},
        "prepare": {"contextLength": 128, "pod": trainer_pod("prepare")},
        "train": {
            "maxSteps": STEPS,
            "microBatchSize": 4,
            "dtype": "FP32",
            "lora": {"rank": 8, "alpha": 16, "dropout": 0.05},
            "optimizer": {"learningRate": 0.005},
            "checkpoint": {"everySteps": EVERY_STEPS, "keep": 2},
            **merged({"pod": trainer_pod("train")}, on_spot),
        },
    }
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTunePipeline",
        "metadata": {"name": name},
        "spec": merged(spec, changes),
    }


@dataclass(frozen=True)
class Workspace:
    """A claim, and a pod that has it mounted at /workspace."""

    namespace: KubeNamespace
    claim: str
    pod: str

    def shell(self, script: str) -> str:
        """Run a script of busybox in the pod and return its output."""
        return self.namespace.run("exec", self.pod, "--", "sh", "-c", script)

    def clear(self, *stages: str) -> None:
        """Remove the output of stages and the files that control the trainer."""
        folders = " ".join(f"/workspace/{name}" for name in (*stages, "control"))
        self.shell(f"busybox rm -rf {folders}; busybox mkdir -p /workspace/control")

    def put(self, name: str, text: str = "") -> None:
        """Write a file that controls the trainer, at once as a whole."""
        path = f"/workspace/control/{name}"
        self.shell(
            f"busybox printf %s {shlex.quote(text)} > {path}.new && busybox mv {path}.new {path}"
        )

    def remove(self, name: str) -> None:
        """Remove a file that controls the trainer."""
        self.shell(f"busybox rm -f /workspace/control/{name}")

    def journal(self) -> list[Entry]:
        """Return what the trainers of all attempts have recorded."""
        return read_journal(
            self.shell("busybox cat /workspace/control/journal 2>/dev/null || true")
        )

    def adapter(self, identity: str) -> str:
        """Return the SHA-256 of the adapter's weights; empty if there are none."""
        path = f"/workspace/train/{identity}/output/adapter_model.safetensors"
        return self.shell(f"busybox sha256sum {path} 2>/dev/null || true").partition(
            " "
        )[0]


@dataclass(frozen=True)
class Site:
    """A cluster with the operator, the material of the demo, and a workspace whose stage prepare has run."""

    cluster: LinuxNamespaces
    operator: Operator
    workspace: Workspace
    reference: str = ""
    """SHA-256 of the adapter of the training that nothing disturbed."""


@dataclass
class Scene:
    """One pipeline on the site."""

    site: Site
    workspace: Workspace
    driver: PipelineDriver
    undo: ExitStack
    """What is undone at the end, whatever happens before."""
    struck_at: float = 0.0
    """When the fault happened, by the clock of this machine, which all pods share."""
    notes: list[str] = field(default_factory=list)
    """What the row of the fault says beside the verdict."""
    problems: list[str] = field(default_factory=list)
    """What went wrong although the pipeline finished."""

    @property
    def namespace(self) -> KubeNamespace:
        """The namespace of the pipeline."""
        return self.workspace.namespace

    @property
    def cluster(self) -> LinuxNamespaces:
        """The cluster."""
        return self.site.cluster

    def strike(self) -> None:
        """Note that the fault happens now."""
        self.struck_at = time.time()

    # The attempts of train.

    @property
    def attempts(self) -> list[Object]:
        """The attempts of the train stage, as the status has them."""
        attempts: list[Object] = self.driver.stage("train").get("attempts", [])
        return attempts

    def wait_attempt(self, number: int, seconds: float = 240) -> Object:
        """Wait until the status has an attempt, and return it."""
        self.driver.until(lambda: len(self.attempts) >= number, seconds)
        return self.attempts[number - 1]

    def wait_ended(self, number: int, seconds: float = 240) -> Object:
        """Wait until an attempt has ended, and return it."""
        self.driver.until(
            lambda: (
                len(self.attempts) >= number
                and self.attempts[number - 1].get("finishedAt")
            ),
            seconds,
        )
        return self.attempts[number - 1]

    def entries(self, number: int, event: str) -> list[Entry]:
        """Return the entries of an event that the pod of an attempt has recorded."""
        job = self.attempts[number - 1]["job"]
        return [
            entry
            for entry in self.workspace.journal()
            if entry.pod.startswith(f"{job}-") and entry.event == event
        ]

    def wait_entry(
        self, number: int, event: str, least: int, seconds: float = 240
    ) -> Entry:
        """Wait until an attempt has recorded an event with at least this value, and return the newest."""
        self.wait_attempt(number, seconds)

        def reached() -> list[Entry]:
            return [
                entry for entry in self.entries(number, event) if entry.value >= least
            ]

        entries: list[Entry] = self.driver.until(reached, seconds)
        return entries[-1]

    def wait_step(
        self, number: int, step: int = EVERY_STEPS + 2, seconds: float = 240
    ) -> Entry:
        """Wait until an attempt has made a step; by default the second after a checkpoint."""
        return self.wait_entry(number, "step", step, seconds)

    # The pod and the node of the newest attempt.

    @property
    def pod(self) -> str:
        """The name of the pod of the newest attempt of train."""
        return self.driver.pod("train").partition("/")[2]

    @property
    def host(self) -> Object:
        """The metadata of the Node object on which that pod runs."""
        name = self.namespace.get("pod", self.pod)["spec"]["nodeName"]
        metadata: Object = self.namespace.get("node", name)["metadata"]
        return metadata

    @property
    def node(self) -> str:
        """The name of that node as the methods of the cluster take it."""
        return str(self.host["labels"][NAME])

    def processes(self, machine: Machine, pod: str) -> list[int]:
        """Return the ids of the processes of a pod on a machine."""
        return [pid for pid in cgroups.members(machine.cgroup) if _is_of_pod(pid, pod)]

    def kill(self, machine: Machine, pod: str) -> None:
        """Send SIGKILL to every process of a pod on a machine. Raise AssertionError if there is none."""
        processes = self.processes(machine, pod)
        assert processes, f"{pod} has no process on {machine.name}"  # noqa: S101
        for pid in processes:
            os.kill(pid, signal.SIGKILL)


def _is_of_pod(pid: int, pod: str) -> bool:
    try:
        return f"HOSTNAME={pod}".encode() in Path(
            f"/proc/{pid}/environ"
        ).read_bytes().split(b"\0")
    except OSError:
        return False


@contextmanager
def scene(
    site: Site,
    name: str,
    changes: Object,
    *,
    rerun: tuple[str, ...] = ("train",),
    workspace: Workspace | None = None,
) -> Iterator[Scene]:
    """Start a pipeline whose stages `rerun` do not find their earlier results; undo its faults at the end."""
    used = workspace or site.workspace
    used.clear(*rerun)
    with ExitStack() as undo:
        driver = PipelineDriver.start(
            used.namespace, manifest(name, used.claim, changes)
        )
        undo.callback(
            used.namespace.run, "delete", "ft", name, "--wait=true", timeout=180
        )
        yield Scene(site, used, driver, undo)


def wait_gone(scene: Scene, machine: Machine, pod: str, seconds: float = 60) -> None:
    """Wait until no process of a pod is left on a machine."""
    deadline = time.monotonic() + seconds
    while scene.processes(machine, pod):
        if time.monotonic() > deadline:
            raise TimedOut(f"{pod} has processes on {machine.name} after {seconds:g} s")
        time.sleep(0.2)
