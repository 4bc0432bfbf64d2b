"""The trainer image as plain Jobs on spot nodes: interrupted training ends with the bytes of a local run."""

import dataclasses
import json
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from e2e.progress import PORT, wait_for_step
from e2e.reference_run import ReferenceRun, upload, upload_material
from testcluster.kube_namespace import (
    KubeNamespace,
    job,
    pod,
    temporary_namespace,
    until,
    watch_pods,
)
from testcluster.provider import Provider
from testcluster.reclaim import reclaim

pytestmark = pytest.mark.skipif(
    os.environ.get("FAULTS") != "all",
    reason="test_quick_start.py has it; set FAULTS=all",
)
CHECKPOINT_STEPS = 20
"""Steps between two periodic checkpoints in the demo's manifest."""


@pytest.fixture(scope="module")
def namespace(
    cluster: Provider,
    reference_run: ReferenceRun,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[KubeNamespace]:
    """A namespace with two claims: the demo's material, and a workspace with the output of `prepare`."""
    with temporary_namespace(cluster.kube, "training-on-spot") as namespace:
        namespace.claim("workspace")
        upload_material(namespace, reference_run, workspace="/workspace")
        prepared = tmp_path_factory.mktemp("prepared")
        shutil.copytree(reference_run.workspace / "prepare", prepared / "prepare")
        upload(namespace, prepared, "/workspace")
        yield namespace


def train(
    namespace: KubeNamespace, reference_run: ReferenceRun, name: str, *, node: str
) -> None:
    """Start one training attempt as a plain Job on a node."""
    template = pod(
        name,
        "",
        node=node,
        image="finetune-trainer-cpu:dev",
        claims={"demo": "/claims/demo", "workspace": "/workspace"},
        command=["python", "-P", "-m", "finetune_trainer", "train"],
        grace=30,
    )
    env = {
        "FINETUNE_CONFIG": reference_run.config,
        "FINETUNE_WORKSPACE": "/workspace",
        "FINETUNE_CLAIMS": "/claims",
        "FINETUNE_TERMINATION_LOG": "/dev/termination-log",
        "FINETUNE_METRICS_PORT": str(PORT),
    }
    container = template["spec"]["containers"][0]
    container["env"] = [{"name": key, "value": value} for key, value in env.items()]
    container["resources"] = {
        "requests": {"cpu": "1", "memory": "1Gi"},
        "limits": {"memory": "4Gi"},
    }
    namespace.create(job(name, template))


def outcome(namespace: KubeNamespace, name: str) -> list[tuple[str, str]]:
    conditions = namespace.get("job", name).get("status", {}).get("conditions", [])
    return [
        (condition["type"], condition.get("reason", ""))
        for condition in conditions
        if condition["status"] == "True"
    ]


def test_training_evicted_then_killed_matches_reference_bytes(
    cluster: Provider, namespace: KubeNamespace, reference_run: ReferenceRun
):
    """The eviction saves the current step; the loss of the node falls back to the last periodic checkpoint."""
    with watch_pods(namespace) as watched:
        train(namespace, reference_run, "train-a1", node="spot-1")
        wait_for_step(namespace, "attempt=train-a1", 70)
        reclaim(cluster, "spot-1", 12.0, "taint")
        until(lambda: watched.is_deleted("train-a1"), 60)
        first = watched.termination("train-a1")
        assert first["code"] == 75
        assert first["disruption"] == "DeletionByTaintManager"
        saved = json.loads(first["message"])["interruption"]["savedStep"]
        assert saved >= 70
        until(
            lambda: ("Failed", "PodFailurePolicy") in outcome(namespace, "train-a1"), 30
        )

        train(namespace, reference_run, "train-a2", node="spot-2")
        second = wait_for_step(
            namespace, "attempt=train-a2", saved + 2 * CHECKPOINT_STEPS + 5
        )
        assert (
            second["startStep"] == saved
        )  # no step is repeated: SIGTERM saved the current step
        cluster.delete("spot-2")
        until(lambda: watched.is_deleted("train-a2"), 120)
        assert watched.termination("train-a2") == {"disruption": "DeletionByPodGC"}

        train(namespace, reference_run, "train-a3", node="spot-3")
        third = wait_for_step(
            namespace, "attempt=train-a3", saved + 2 * CHECKPOINT_STEPS
        )
        until(lambda: outcome(namespace, "train-a3"), 180)
        assert ("Complete", "CompletionsReached") in outcome(namespace, "train-a3")
        # SIGKILL leaves only the last periodic checkpoint.
        assert third["startStep"] % CHECKPOINT_STEPS == 0
        assert saved < third["startStep"] <= second["step"] + CHECKPOINT_STEPS
        result = json.loads(watched.termination("train-a3")["message"])["result"]
        assert result["identity"] == reference_run.identity

    expected_folder = (reference_run.workspace / reference_run.adapter).parent
    actual = namespace.run(
        "exec",
        "filler",
        "--",
        "busybox",
        "sha256sum",
        f"/workspace/{reference_run.adapter}",
    ).split()[0]
    expected = subprocess.run(
        ["sha256sum", str(expected_folder / "adapter_model.safetensors")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert actual == expected.stdout.split()[0]
    for node in ("spot-1", "spot-2"):
        cluster.revive(node)


def test_training_evicted_during_imports_exits_in_time(
    namespace: KubeNamespace, reference_run: ReferenceRun
):
    """SIGTERM arrives before any checkpoint exists: the process exits with 75 within its grace period."""
    identity = f"{reference_run.identity[:-5]}early"  # another identity, so that no earlier checkpoint is found
    early = dataclasses.replace(
        reference_run,
        config=reference_run.config.replace(reference_run.identity, identity),
    )
    with watch_pods(namespace) as watched:
        train(namespace, early, "early", node="ondemand-2")
        until(
            lambda: any(
                seen["status"].get("phase") == "Running"
                for _, seen in watched.events_of("early")
            ),
            60,
        )
        namespace.run("delete", "pod", "-l", "attempt=early", "--wait=false")
        until(
            lambda: watched.is_deleted("early"),
            30,
            "the pod did not end within its grace period",
        )
        assert watched.termination("early")["code"] == 75
