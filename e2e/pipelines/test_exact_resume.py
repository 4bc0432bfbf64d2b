"""A pipeline whose training loses its nodes ends with the bytes of an uninterrupted local run."""

import hashlib
import os

import pytest
import yaml

from e2e.pipelines.chart import Operator
from e2e.pipelines.driver import Object, PipelineDriver, merged
from e2e.pipelines.test_evictions import SPOT, node_of
from e2e.progress import wait_for_step
from e2e.reference_run import MANIFEST, ReferenceRun, upload_material
from testcluster.kube_namespace import KubeNamespace
from testcluster.provider import Provider
from testcluster.reclaim import reclaim

CHECKPOINT_STEPS = yaml.safe_load(MANIFEST.read_text())["spec"]["train"]["checkpoint"][
    "everySteps"
]
pytestmark = pytest.mark.skipif(
    os.environ.get("FAULTS") != "all",
    reason="test_several_nodes.py loses a node, test_quick_start.py compares with a local run; set FAULTS=all",
)


def training() -> Object:
    """Return the demo's manifest up to the end of training, with training on spot nodes only."""
    manifest: Object = yaml.safe_load(MANIFEST.read_text())
    spec = manifest["spec"]
    kept = {
        key: spec[key]
        for key in (
            "seed",
            "model",
            "datasets",
            "validation",
            "workspace",
            "prepare",
            "train",
        )
    }
    return {**manifest, "spec": {**kept, "train": merged(spec["train"], SPOT)}}


def wait_for_attempt_step(driver: PipelineDriver, attempt: int, step: int) -> Object:
    """Wait until an attempt of the train stage has reached a step; return its progress."""
    driver.until(lambda: len(driver.stage("train").get("attempts", [])) == attempt, 120)
    job = driver.stage("train")["attempts"][-1]["job"]
    return wait_for_step(driver.namespace, f"batch.kubernetes.io/job-name={job}", step)


def test_reclaimed_and_lost_training_matches_reference_bytes(
    operator: Operator,
    namespace: KubeNamespace,
    cluster: Provider,
    reference_run: ReferenceRun,
    lost_nodes: list[str],
):
    """The first node is reclaimed with notice, the second is deleted without; the third attempt finishes."""
    upload_material(namespace, reference_run)
    driver = PipelineDriver.start(namespace, training())
    wait_for_attempt_step(driver, 1, 70)
    lost_nodes.append(node_of(driver))
    reclaim(cluster, lost_nodes[-1], 12.0, "taint")
    first = driver.stage("train")["attempts"][0]
    assert (first["outcome"], first["exitCode"]) == ("Interrupted", 75), (
        driver.describe()
    )
    assert "DeletionByTaintManager" in first["message"]
    saved = first["lastStep"]
    assert saved >= 70
    assert f"saved at step {saved}" in first["message"]

    progress = wait_for_attempt_step(driver, 2, saved + 2 * CHECKPOINT_STEPS + 5)
    assert progress["startStep"] == saved
    lost_nodes.append(node_of(driver))
    cluster.delete(lost_nodes[-1])
    wait_for_attempt_step(driver, 3, saved + CHECKPOINT_STEPS)
    status = driver.wait_finished(seconds=180)
    first, second, third = status["stages"]["train"]["attempts"]
    assert [attempt["outcome"] for attempt in (first, second, third)] == [
        "Interrupted",
        "Interrupted",
        "Succeeded",
    ]
    assert "DeletionByPodGC" in second["message"]
    assert "exitCode" not in second
    # The deleted node's pod got no SIGTERM, so the third attempt resumes at the last periodic checkpoint.
    assert third["startStep"] % CHECKPOINT_STEPS == 0
    assert (
        saved + CHECKPOINT_STEPS < third["startStep"]
    )  # it trains on while its node is deleted
    assert (status["interruptions"], status["stages"]["train"]["failures"]) == (2, 0)
    assert namespace.run("get", "events").count("AttemptInterrupted") == 2

    expected = hashlib.sha256(
        (reference_run.workspace / reference_run.adapter).read_bytes()
    ).hexdigest()
    identity = status["stages"]["train"]["identity"]
    adapter = reference_run.adapter.replace(reference_run.identity, identity)
    weights = f"/workspace/{adapter}"
    actual = namespace.run_script(
        f"busybox sha256sum {weights}", claims={"docstrings-workspace": "/workspace"}
    )
    assert actual.split()[0] == expected
