"""The trainer's image on spot nodes: evicted, lost with its machine, and still the bytes of a laptop's training."""

import dataclasses
import json
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from e2e.progress import PORT, wait_for_step
from e2e.reference_run import ReferenceRun, material_for, send
from testcluster.kube_namespace import KubeNamespace, job, pod, temporary_namespace, until, watching
from testcluster.provider import Provider
from testcluster.reclaim import reclaim

EVERY = 20
"""Steps between checkpoints, as the demo's manifest has it."""


@pytest.fixture(scope="module")
def namespace(
    cluster: Provider, laptop: ReferenceRun, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KubeNamespace]:
    """A namespace with two volumes: the demo's material, and a workspace in which `prepare` is done."""
    with temporary_namespace(cluster.kube, "training-on-spot") as namespace:
        namespace.claim("workspace")
        material_for(namespace, laptop, workspace="/workspace")
        prepared = tmp_path_factory.mktemp("prepared")
        shutil.copytree(laptop.workspace / "prepare", prepared / "prepare")
        send(namespace, prepared, "/workspace")
        yield namespace


def train(namespace: KubeNamespace, laptop: ReferenceRun, name: str, *, node: str) -> None:
    """Start one attempt as a plain Job; the second that wants the same node finds it gone and waits for another."""
    template = pod(
        name,
        "",
        node=node,
        image="finetune-trainer:dev",
        claims={"demo": "/claims/demo", "workspace": "/workspace"},
        command=["python", "-P", "-m", "finetune_trainer", "train"],
        grace=30,
    )
    env = {
        "FINETUNE_CONFIG": laptop.config,
        "FINETUNE_WORKSPACE": "/workspace",
        "FINETUNE_CLAIMS": "/claims",
        "FINETUNE_TERMINATION_LOG": "/dev/termination-log",
        "FINETUNE_METRICS_PORT": str(PORT),
    }
    container = template["spec"]["containers"][0]
    container["env"] = [{"name": key, "value": value} for key, value in env.items()]
    container["resources"] = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "4Gi"}}
    namespace.create(job(name, template))


def outcome(namespace: KubeNamespace, name: str) -> list[tuple[str, str]]:
    conditions = namespace.get("job", name).get("status", {}).get("conditions", [])
    return [(one["type"], one.get("reason", "")) for one in conditions if one["status"] == "True"]


def test_evicted_then_lost_with_its_machine_training_ends_with_the_laptops_bytes(
    cluster: Provider, namespace: KubeNamespace, laptop: ReferenceRun
):
    with watching(namespace) as watched:
        train(namespace, laptop, "train-a1", node="spot-1")
        wait_for_step(namespace, "attempt=train-a1", 70)
        reclaim(cluster, "spot-1", 12.0, "taint")
        until(lambda: watched.gone("train-a1"), 60)
        first = watched.termination("train-a1")
        assert first["code"] == 75
        assert first["disruption"] == "DeletionByTaintManager"
        saved = json.loads(first["message"])["interruption"]["savedStep"]
        assert saved >= 70
        until(lambda: ("Failed", "PodFailurePolicy") in outcome(namespace, "train-a1"), 30)

        train(namespace, laptop, "train-a2", node="spot-2")
        second = wait_for_step(namespace, "attempt=train-a2", saved + 2 * EVERY + 5)
        assert second["startStep"] == saved  # nothing was lost: the eviction saved where it stood
        cluster.delete("spot-2")
        until(lambda: watched.gone("train-a2"), 120)
        assert watched.termination("train-a2") == {"disruption": "DeletionByPodGC"}

        train(namespace, laptop, "train-a3", node="spot-3")
        third = wait_for_step(namespace, "attempt=train-a3", saved + 2 * EVERY)
        until(lambda: outcome(namespace, "train-a3"), 180)
        assert ("Complete", "CompletionsReached") in outcome(namespace, "train-a3")
        # SIGKILL leaves what the last periodic checkpoint had.
        assert third["startStep"] % EVERY == 0
        assert saved < third["startStep"] <= second["step"] + EVERY
        result = json.loads(watched.termination("train-a3")["message"])["result"]
        assert result["identity"] == laptop.identity

    ours = (laptop.workspace / laptop.adapter).parent
    theirs = namespace.run("exec", "filler", "--", "busybox", "sha256sum", f"/workspace/{laptop.adapter}").split()[0]
    expected = subprocess.run(
        ["sha256sum", str(ours / "adapter_model.safetensors")], capture_output=True, text=True, check=True
    )
    assert theirs == expected.stdout.split()[0]
    for lost in ("spot-1", "spot-2"):
        cluster.revive(lost)


def test_a_training_that_is_evicted_while_it_still_imports_ends_in_time_and_says_so(
    namespace: KubeNamespace, laptop: ReferenceRun
):
    early = dataclasses.replace(laptop, config=laptop.config.replace(laptop.identity, f"{laptop.identity[:-5]}early"))
    with watching(namespace) as watched:
        train(namespace, early, "early", node="ondemand-2")
        until(lambda: any(told["status"].get("phase") == "Running" for _, told in watched.of("early")), 60)
        namespace.run("delete", "pod", "-l", "attempt=early", "--wait=false")
        until(lambda: watched.gone("early"), 30, "it did not end within its grace period")
        assert watched.termination("early")["code"] == 75
