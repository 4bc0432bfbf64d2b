"""A training that is evicted, killed or runs out of a resource ends with the bytes of an undisturbed training."""

import os

import pytest

from e2e.pipelines.driver import evict
from e2e.pipelines.faults.fault import chosen
from e2e.pipelines.faults.pod_faults import FULL_DISK, POD_FAULTS
from e2e.pipelines.faults.scene import Scene, Workspace, scene, trainer_pod
from e2e.pipelines.faults.table import MISSING, Row
from testcluster.kube_namespace import pod
from testcluster.nodes import NAME
from testcluster.volume_provisioner import NODE_FOLDER

NODE = "spot-1"
ON_NODE = {"placement": {"capacity": "Spot"}, "pod": {"nodeSelector": {NAME: NODE}}}
CLAIM = "small"
SIZE = "12m"
STAGES = {
    "evaluate": {
        "tasks": [
            {"name": "docstrings", "file": "pvc://demo/data/task.yaml", "limit": 4}
        ],
        "pod": trainer_pod("evaluate"),
    },
    "push": {
        "targets": [{"uri": "pvc://demo/published/matrix", "format": "Adapter"}],
        "pod": trainer_pod("push"),
    },
}
PUBLISHED = "/claims/demo/published/matrix/latest/adapter_model.safetensors"
all_faults = pytest.mark.skipif(
    os.environ.get("FAULTS") != "all", reason="not among the defaults; set FAULTS=all"
)


@pytest.mark.parametrize("fault", chosen(POD_FAULTS), ids=lambda fault: fault.name)
def test_training_survives_a_fault_of_its_pod(site, judge, fault):
    with scene(site, fault.name.replace(" ", "-"), fault.changes) as run:
        fault.inject(run)
        judge(fault, run)


@pytest.fixture
def small_workspace(site):
    """A workspace of a few megabytes on a node."""
    namespace = site.workspace.namespace
    machine = site.cluster.machine(NODE)
    namespace.claim(CLAIM)
    namespace.run_script(
        "busybox true", "binder", node=NODE, claims={CLAIM: "/workspace"}
    )
    folder = f"{NODE_FOLDER}/{namespace.get('pvc', CLAIM)['spec']['volumeName']}"
    machine.run("mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=777", "small", folder)
    namespace.create(
        pod(
            "small-filler",
            "busybox sleep 7200",
            node=NODE,
            claims={CLAIM: "/workspace"},
            grace=1,
        )
    )
    namespace.wait_phase("small-filler", "Running")
    yield Workspace(namespace, CLAIM, "small-filler")
    namespace.run("delete", "pod", "small-filler", "binder")
    machine.run("umount", "--lazy", folder)
    namespace.run("delete", "pvc", CLAIM, "--wait=false")


@all_faults
def test_training_survives_a_full_disk(site, judge, small_workspace):
    changes = {"prepare": ON_NODE, "train": ON_NODE}
    with scene(site, "full-disk", changes, workspace=small_workspace) as run:
        FULL_DISK.inject(run)
        judge(FULL_DISK, run)


@all_faults
@pytest.mark.parametrize("stage", ["prepare", "evaluate", "push"])
def test_stage_survives_an_eviction_before_its_result(site, record_row, stage):
    """The output is written and the result is not: the next attempt makes the same bytes again. Train is above."""
    rerun = {
        "prepare": ("prepare", "train"),
        "evaluate": ("evaluate",),
        "push": ("push",),
    }[stage]
    with scene(site, f"evicted-{stage}", STAGES, rerun=rerun) as run:
        run.workspace.put(f"hold-{stage}")
        run.driver.until(lambda: recorded(run, stage), 300)
        run.strike()
        evict(run.namespace, run.driver.pod(stage).partition("/")[2])
        run.workspace.remove(f"hold-{stage}")
        run.driver.wait_finished(seconds=300)
        first, second = run.driver.stage(stage)["attempts"]
        adapter = run.workspace.shell(f"busybox sha256sum {PUBLISHED}").partition(" ")[
            0
        ]
        record_row(row(run, stage, first, identical=adapter == site.reference))
        assert (first["outcome"], first["exitCode"], second["outcome"]) == (
            "Interrupted",
            75,
            "Succeeded",
        )
        assert "EvictionByEvictionAPI" in first["message"]
        assert (
            run.driver.stage(stage)["failures"],
            run.driver.status["interruptions"],
        ) == (
            0,
            1,
        )
        assert adapter == site.reference


def recorded(run: Scene, stage: str) -> list[float]:
    """Return the times at which a stage had written its output."""
    return [entry.time for entry in run.workspace.journal() if entry.event == stage]


def row(run: Scene, stage: str, first: dict, *, identical: bool) -> Row:
    seconds = max(recorded(run, stage)) - run.struck_at
    cause = first["message"].partition(" on ")[0]
    verdict = f"{first['outcome']}; {cause}"
    attempts = str(len(run.driver.stage(stage)["attempts"]))
    return Row(
        f"eviction in {stage}",
        verdict,
        attempts,
        str(first["exitCode"]),
        MISSING,
        f"{seconds:.1f} to its output",
        "yes" if identical else "no",
    )
