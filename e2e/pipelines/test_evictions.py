"""A stage that is evicted, deleted or loses its node is interrupted, not failed, and resumes at its last step."""

import os
from typing import Any

import pytest

from e2e.pipelines.chart import Operator
from e2e.pipelines.driver import PipelineDriver, evict, pipeline
from testcluster.kube_namespace import KubeNamespace
from testcluster.nodes import NAME
from testcluster.provider import Provider
from testcluster.reclaim import reclaim
from testcluster.volume_provisioner import STRICT

SPOT = {
    "placement": {"capacity": "Spot"},
    "pod": {"nodeSelector": {"finetune.dev/capacity": "spot"}},
}


def interrupted(driver: PipelineDriver) -> bool:
    return driver.stage("train")["attempts"][0]["outcome"] == "Interrupted"


def host_of(driver: PipelineDriver) -> dict[str, Any]:
    """Return the metadata of the Node object on which the train stage runs."""
    pod = driver.pod("train").partition("/")[2]
    metadata: dict[str, Any] = driver.namespace.get(
        "node", driver.namespace.get("pod", pod)["spec"]["nodeName"]
    )["metadata"]
    return metadata


def node_of(driver: PipelineDriver) -> str:
    """Return the name of that node as the methods of Provider take it; the Node object may have another name."""
    return str(host_of(driver)["labels"][NAME])


def test_eviction_api_interrupts_and_training_resumes(
    operator: Operator, namespace: KubeNamespace
):
    driver = PipelineDriver.start(
        namespace, pipeline("evicted", steps={"train": 60}, train=SPOT)
    )
    driver.wait_state("train", "Running")
    evict(namespace, driver.pod("train").partition("/")[2])
    driver.until(lambda: interrupted(driver))
    status = driver.wait_finished()
    first, second = status["stages"]["train"]["attempts"]
    assert "EvictionByEvictionAPI" in first["message"]
    assert "saved at step" in first["message"]
    assert (first["exitCode"], second["outcome"]) == (75, "Succeeded")
    assert (status["interruptions"], status["stages"]["train"]["failures"]) == (1, 0)
    assert "AttemptInterrupted" in namespace.run("describe", "ft", "evicted")


def test_node_reclaimed_with_notice_saves_and_resumes(
    operator: Operator, namespace: KubeNamespace, cluster: Provider
):
    driver = PipelineDriver.start(
        namespace, pipeline("reclaimed", steps={"train": 100}, train=SPOT)
    )
    driver.wait_state("train", "Running")
    node = node_of(driver)
    reclaim(cluster, node, 20.0, "taint")
    try:
        driver.wait_finished(seconds=120)
        first = driver.stage("train")["attempts"][0]
        assert "DeletionByTaintManager" in first["message"]
        assert first["exitCode"] == 75
        assert node_of(driver) != node
    finally:
        cluster.revive(node)


@pytest.mark.skipif(
    os.environ.get("FAULTS") != "all" and not os.environ.get("KIND"),
    reason="test_several_nodes.py deletes a node, and e2e/kind runs this test; set FAULTS=all",
)
def test_node_deleted_without_notice_is_an_interruption(
    operator: Operator, namespace: KubeNamespace, cluster: Provider
):
    driver = PipelineDriver.start(
        namespace, pipeline("lost", steps={"train": 100}, train=SPOT)
    )
    driver.wait_state("train", "Running")
    node = node_of(driver)
    cluster.delete(node)
    try:
        driver.until(lambda: interrupted(driver), 150)
        first = driver.stage("train")["attempts"][0]
        assert "DeletionByPodGC" in first["message"]
        assert "exitCode" not in first
        driver.wait_finished(seconds=120)
        assert driver.stage("train")["failures"] == 0
    finally:
        cluster.revive(node)


@pytest.mark.skipif(
    "all" not in {os.environ.get("FAULTS"), os.environ.get("KIND")},
    reason="waits four minutes, as the partitioned zombie of test_node_faults.py does; set FAULTS=all",
)
def test_unreachable_node_blocks_until_it_is_deleted(
    operator: Operator, namespace: KubeNamespace, cluster: Provider
):
    """`NodeLost` names the Node object; deleting that object interrupts the attempt, and another resumes."""
    driver = PipelineDriver.start(
        namespace, pipeline("silent", steps={"train": 100}, train=SPOT)
    )
    driver.wait_state("train", "Running")
    node = node_of(driver)
    host = host_of(driver)["name"]
    cluster.kill(node)
    try:
        driver.until(lambda: driver.stage("train").get("reason") == "NodeLost", 240)
        assert f"node {host} does not answer" in driver.condition("Ready")["message"]
        assert (
            len(driver.jobs("train")) == 1
        )  # the old pod may still write: a second writer could corrupt the volume
        cluster.kube.delete_node(host)
        driver.wait_finished(seconds=150)
        assert driver.status["interruptions"] == 1
    finally:
        cluster.revive(node)


@pytest.mark.skipif(
    os.environ.get("FAULTS") != "all",
    reason="waits four minutes, and test_rbac_usage.py has it without nodes; set FAULTS=all",
)
def test_attempt_on_a_silent_node_is_replaced(
    release: Operator,
    namespace: KubeNamespace,
    cluster: Provider,
    lost_nodes: list[str],
):
    """A volume for a single pod keeps the old process out. The Node object stays."""
    release.install("nodeLost.replaceAfterSeconds=5")
    workspace = {"accessMode": "ReadWriteOncePod", "storageClassName": STRICT}
    manifest = pipeline(
        "replaced", steps={"train": 100}, train=SPOT, workspace=workspace
    )
    driver = PipelineDriver.start(namespace, manifest)
    driver.wait_state("train", "Running")
    host = host_of(driver)["name"]
    lost = driver.pod("train")
    lost_nodes.append(node_of(driver))
    cluster.kill(lost_nodes[0])
    driver.until(lambda: interrupted(driver), 300)
    driver.wait_finished(seconds=150)
    assert namespace.get("node", host)
    assert lost not in namespace.run("get", "pods", "-o", "name")
    stage = driver.stage("train")
    assert (stage["interruptions"], stage["failures"]) == (1, 0)
    assert "DeletionByTaintManager" in stage["attempts"][0]["message"]


def test_deleted_pod_is_an_interruption(operator: Operator, namespace: KubeNamespace):
    driver = PipelineDriver.start(
        namespace, pipeline("deleted-pod", steps={"train": 60}, train=SPOT)
    )
    driver.wait_state("train", "Running")
    namespace.run("delete", driver.pod("train"), "--wait=false")
    driver.until(lambda: interrupted(driver))
    driver.wait_finished()
    assert driver.stage("train")["failures"] == 0


def test_deleted_job_is_an_interruption(operator: Operator, namespace: KubeNamespace):
    driver = PipelineDriver.start(
        namespace, pipeline("deleted-job", steps={"train": 60}, train=SPOT)
    )
    driver.wait_state("train", "Running")
    namespace.run(
        "delete", "job", driver.stage("train")["attempts"][0]["job"], "--wait=false"
    )
    driver.until(lambda: interrupted(driver))
    driver.wait_finished()
    attempts = {
        job["metadata"]["labels"]["finetune.dev/attempt"]
        for job in driver.jobs("train")
    }
    assert attempts == {"2"}
