"""The API server is away for more than a minute, in the middle of everything; a namespace goes with what is in it."""

import time

from e2e.pipelines.chart import Operator
from e2e.pipelines.driver import PipelineDriver, pipeline
from testcluster.kube_namespace import KubeNamespace, until
from testcluster.nodes import CONTROL_PLANE
from testcluster.provider import Provider

AWAY_SECONDS = 75.0


def restarts(operator: Operator) -> dict[str, int]:
    """Count, by pod, how often its process was started again."""
    found = operator.objects.run(
        *("get", "pods", "-l", "app.kubernetes.io/name=finetune-operator"),
        *("-o", r"jsonpath={range .items[*]}{.metadata.uid} {.status.containerStatuses[0].restartCount}{'\n'}{end}"),
    )
    return {uid: int(count) for uid, count in (line.split() for line in found.splitlines())}


def test_the_operator_outlives_an_api_server_that_does_not_answer(
    operator: Operator, namespace: KubeNamespace, cluster: Provider
):
    before = restarts(operator)
    story = PipelineDriver.start(namespace, pipeline("patient", steps={"train": 200}))
    story.wait_state("train", "Running")
    cluster.pause(CONTROL_PLANE)
    try:
        time.sleep(AWAY_SECONDS)
    finally:
        cluster.resume(CONTROL_PLANE)
    story.wait_finished(seconds=150)
    for stage in ("prepare", "train", "evaluate"):
        assert len(story.jobs(stage)) == 1  # what ended meanwhile was read, and nothing was done twice
    assert story.status["interruptions"] == 0
    assert restarts(operator) == before
    until(lambda: operator.leader() in operator.pods(), 60)


def test_a_namespace_goes_with_a_pipeline_that_runs(operator: Operator, namespace: KubeNamespace):
    story = PipelineDriver.start(namespace, pipeline("leaving", steps={"train": 500}))
    story.wait_state("train", "Running")
    namespace.kube.run("delete", "namespace", namespace.name, "--wait=false")
    until(lambda: not namespace.kube.run("get", "namespace", namespace.name, "--ignore-not-found"), 120)
    assert operator.leader() in operator.pods()
