"""A stage that loses its node or its right to run is interrupted and not failed, and goes on where it was."""

import json
from typing import Any

from e2e.pipelines.chart import Operator
from e2e.pipelines.driver import PipelineDriver, pipeline
from testcluster.kube_namespace import KubeNamespace
from testcluster.nodes import NAME
from testcluster.provider import Provider
from testcluster.reclaim import reclaim

SPOT = {"placement": {"capacity": "spot", "nodeSelector": {"finetune.dev/capacity": "spot"}}}


def interrupted(story: PipelineDriver) -> bool:
    return story.stage("train")["attempts"][0]["outcome"] == "Interrupted"


def host_of(story: PipelineDriver) -> dict[str, Any]:
    """Give the metadata of the Node object that trains."""
    pod = story.pod("train").partition("/")[2]
    metadata: dict[str, Any] = story.namespace.get("node", story.namespace.get("pod", pod)["spec"]["nodeName"])[
        "metadata"
    ]
    return metadata


def node_of(story: PipelineDriver) -> str:
    """Give the node's name by which the cluster's verbs know it."""
    return str(host_of(story)["labels"][NAME])


def evict(namespace: KubeNamespace, pod: str) -> None:
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    path = f"/api/v1/namespaces/{namespace.name}/pods/{pod}/eviction"
    namespace.kube.run("create", "--raw", path, "-f", "-", given=json.dumps(body))


def test_the_eviction_api(operator: Operator, namespace: KubeNamespace):
    story = PipelineDriver.start(namespace, pipeline("evicted", steps={"train": 60}, train=SPOT))
    story.wait_state("train", "Running")
    evict(namespace, story.pod("train").partition("/")[2])
    story.until(lambda: interrupted(story))
    status = story.wait_finished()
    first, second = status["stages"]["train"]["attempts"]
    assert "EvictionByEvictionAPI" in first["message"]
    assert "saved at step" in first["message"]
    assert (first["exitCode"], second["outcome"]) == (75, "Succeeded")
    assert (status["interruptions"], status["stages"]["train"]["failures"]) == (1, 0)
    assert "AttemptInterrupted" in namespace.run("describe", "ftp", "evicted")


def test_a_spot_node_that_is_reclaimed_with_notice(operator: Operator, namespace: KubeNamespace, cluster: Provider):
    story = PipelineDriver.start(namespace, pipeline("reclaimed", steps={"train": 100}, train=SPOT))
    story.wait_state("train", "Running")
    node = node_of(story)
    reclaim(cluster, node, 8.0, "taint")
    try:
        story.wait_finished(seconds=120)
        first = story.stage("train")["attempts"][0]
        assert "DeletionByTaintManager" in first["message"]
        assert first["exitCode"] == 75
        assert node_of(story) != node
    finally:
        cluster.revive(node)


def test_a_spot_node_that_is_gone_without_notice(operator: Operator, namespace: KubeNamespace, cluster: Provider):
    story = PipelineDriver.start(namespace, pipeline("lost", steps={"train": 100}, train=SPOT))
    story.wait_state("train", "Running")
    node = node_of(story)
    cluster.delete(node)
    try:
        story.until(lambda: interrupted(story), 150)
        first = story.stage("train")["attempts"][0]
        assert "DeletionByPodGC" in first["message"]
        assert "exitCode" not in first
        story.wait_finished(seconds=120)
        assert story.stage("train")["failures"] == 0
    finally:
        cluster.revive(node)


def test_a_node_that_is_silent_is_named_until_somebody_acts(
    operator: Operator, namespace: KubeNamespace, cluster: Provider
):
    story = PipelineDriver.start(namespace, pipeline("silent", steps={"train": 100}, train=SPOT))
    story.wait_state("train", "Running")
    node, host = node_of(story), host_of(story)["name"]
    cluster.kill(node)
    try:
        story.until(lambda: story.stage("train").get("reason") == "NodeLost", 240)
        assert f"its node {host} does not answer" in story.condition("Ready")["message"]
        assert len(story.jobs("train")) == 1  # a second writer on the volume is worse than waiting
        cluster.kube.delete_node(host)
        story.wait_finished(seconds=150)
        assert story.status["interruptions"] == 1
    finally:
        cluster.revive(node)


def test_a_pod_that_somebody_deletes(operator: Operator, namespace: KubeNamespace):
    story = PipelineDriver.start(namespace, pipeline("deleted-pod", steps={"train": 60}, train=SPOT))
    story.wait_state("train", "Running")
    namespace.run("delete", story.pod("train"), "--wait=false")
    story.until(lambda: interrupted(story))
    story.wait_finished()
    assert story.stage("train")["failures"] == 0


def test_a_job_that_somebody_deletes(operator: Operator, namespace: KubeNamespace):
    story = PipelineDriver.start(namespace, pipeline("deleted-job", steps={"train": 60}, train=SPOT))
    story.wait_state("train", "Running")
    namespace.run("delete", "job", story.stage("train")["attempts"][0]["job"], "--wait=false")
    story.until(lambda: interrupted(story))
    story.wait_finished()
    log = {job["metadata"]["labels"]["finetune.dev/attempt"] for job in story.jobs("train")}
    assert log == {"2"}
