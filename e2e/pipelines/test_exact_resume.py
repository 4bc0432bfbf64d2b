"""Through the operator, too, a training that lost its nodes ends with the bytes of one that nobody disturbed."""

import hashlib
from collections.abc import Iterator

import pytest
import yaml

from e2e.pipelines.chart import Operator
from e2e.pipelines.driver import Object, PipelineDriver
from e2e.pipelines.test_evictions import SPOT, node_of
from e2e.progress import wait_for_step
from e2e.reference_run import MANIFEST, ReferenceRun, material_for
from testcluster.kube_namespace import KubeNamespace
from testcluster.provider import Provider
from testcluster.reclaim import reclaim

EVERY = yaml.safe_load(MANIFEST.read_text())["spec"]["train"]["checkpoint"]["everySteps"]


def training() -> Object:
    """The demo's manifest up to the end of training, on spot nodes only."""
    manifest: Object = yaml.safe_load(MANIFEST.read_text())
    spec = manifest["spec"]
    manifest["spec"] = {key: spec[key] for key in ("seed", "model", "dataset", "workspace", "prepare", "train")}
    spec["train"].update(SPOT)
    return manifest


def at_step(story: PipelineDriver, attempt: int, step: int) -> Object:
    """Wait until an attempt has done so many steps, and give its progress then."""
    story.until(lambda: len(story.stage("train").get("attempts", [])) == attempt, 120)
    job = story.stage("train")["attempts"][-1]["job"]
    return wait_for_step(story.namespace, f"batch.kubernetes.io/job-name={job}", step)


@pytest.fixture
def taken(cluster: Provider) -> Iterator[list[str]]:
    """Nodes that the test takes away; they come back after it."""
    nodes: list[str] = []
    yield nodes
    for node in nodes:
        cluster.revive(node)


def test_reclaimed_and_then_lost_with_its_node_it_ends_with_the_laptops_bytes(
    operator: Operator, namespace: KubeNamespace, cluster: Provider, laptop: ReferenceRun, taken: list[str]
):
    material_for(namespace, laptop)
    story = PipelineDriver.start(namespace, training())
    at_step(story, 1, 70)
    taken.append(node_of(story))
    reclaim(cluster, taken[-1], 12.0, "taint")
    first = story.stage("train")["attempts"][0]
    assert (first["outcome"], first["exitCode"]) == ("Interrupted", 75), story.told()
    assert "DeletionByTaintManager" in first["message"]
    saved = first["lastStep"]
    assert saved >= 70
    assert f"saved at step {saved}" in first["message"]

    seen = at_step(story, 2, saved + 2 * EVERY + 5)
    assert seen["startStep"] == saved
    taken.append(node_of(story))
    cluster.delete(taken[-1])
    at_step(story, 3, saved + EVERY)
    status = story.wait_finished(seconds=180)
    first, second, third = status["stages"]["train"]["attempts"]
    assert [one["outcome"] for one in (first, second, third)] == ["Interrupted", "Interrupted", "Succeeded"]
    assert "DeletionByPodGC" in second["message"]
    assert "exitCode" not in second
    # Nobody asked it to save: it goes on at the last periodic checkpoint.
    assert third["startStep"] % EVERY == 0
    assert saved < third["startStep"] <= seen["step"] + EVERY
    assert (status["interruptions"], status["stages"]["train"]["failures"]) == (2, 0)
    assert namespace.run("get", "events").count("AttemptInterrupted") == 2

    ours = hashlib.sha256((laptop.workspace / laptop.adapter).read_bytes()).hexdigest()
    weights = f"/workspace/{laptop.adapter.replace(laptop.identity, status['stages']['train']['identity'])}"
    theirs = namespace.run_script(f"busybox sha256sum {weights}", claims={"docstrings-workspace": "/workspace"})
    assert theirs.split()[0] == ours
