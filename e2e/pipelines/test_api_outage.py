"""Pipelines survive an outage of the API server; deleting a namespace deletes its pipelines."""

import os
import time

import pytest

from e2e.pipelines.chart import Operator
from e2e.pipelines.driver import PipelineDriver, pipeline
from testcluster.kube_namespace import KubeNamespace, until
from testcluster.nodes import CONTROL_PLANE
from testcluster.provider import Provider

OUTAGE_SECONDS = 75.0
"""More than a minute, and longer than a Lease is valid (15 s), so that the leader loses its Lease, too."""


def restarts(operator: Operator) -> dict[str, int]:
    """Return the restart count of each operator pod, by pod uid."""
    output = operator.objects.run(
        *("get", "pods", "-l", "app.kubernetes.io/name=finetune-operator"),
        *(
            "-o",
            r"jsonpath={range .items[*]}{.metadata.uid} {.status.containerStatuses[0].restartCount}{'\n'}{end}",
        ),
    )
    return {
        uid: int(count) for uid, count in (line.split() for line in output.splitlines())
    }


@pytest.mark.skipif(
    os.environ.get("FAULTS") != "all",
    reason="an outage of 75 s, and tests/integration/faults has the operator's answers to errors; set FAULTS=all",
)
def test_operator_survives_an_api_server_outage(
    operator: Operator, namespace: KubeNamespace, cluster: Provider
):
    """Results of stages that end during the outage are read after it; no stage runs twice and no replica restarts."""
    before = restarts(operator)
    driver = PipelineDriver.start(namespace, pipeline("patient", steps={"train": 200}))
    driver.wait_state("train", "Running")
    cluster.pause(CONTROL_PLANE)
    try:
        time.sleep(OUTAGE_SECONDS)
    finally:
        cluster.resume(CONTROL_PLANE)
    cluster.kube.wait_api(60)
    driver.wait_finished(seconds=150)
    for stage in ("prepare", "train", "evaluate"):
        assert len(driver.jobs(stage)) == 1
    assert driver.status["interruptions"] == 0
    assert restarts(operator) == before
    until(lambda: operator.leader() in operator.pods(), 60)


def test_namespace_with_a_running_pipeline_can_be_deleted(
    operator: Operator, namespace: KubeNamespace
):
    driver = PipelineDriver.start(namespace, pipeline("leaving", steps={"train": 500}))
    driver.wait_state("train", "Running")
    namespace.kube.run("delete", "namespace", namespace.name, "--wait=false")
    until(
        lambda: (
            not namespace.kube.run(
                "get", "namespace", namespace.name, "--ignore-not-found"
            )
        ),
        120,
    )
    assert operator.leader() in operator.pods()
