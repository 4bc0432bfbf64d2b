"""Two replicas: when the leader is lost, the other replica takes over and no stage runs twice."""

import time

from e2e.pipelines.chart import Operator
from e2e.pipelines.driver import ORDER, PipelineDriver, pipeline
from finetune_operator.controller.leader_election import LEASE_DURATION
from testcluster.kube_namespace import KubeNamespace, until


def test_losing_the_leader_in_every_stage_reruns_nothing(
    operator: Operator, namespace: KubeNamespace
):
    """The leader is force-deleted and evicted in turn, once in each stage."""
    namespace.claim("models")
    driver = PipelineDriver.start(
        namespace, pipeline("led", steps=dict.fromkeys(ORDER, 9000), pushes=True)
    )
    for index, stage in enumerate(ORDER):
        driver.wait_state(stage, "Running", seconds=90)
        operator.lose_leader(gracefully=bool(index % 2))
        driver.finish(stage)
    driver.wait_finished(seconds=120)
    for stage in ORDER:
        assert len(driver.jobs(stage)) == 1
        assert len(driver.stage(stage)["attempts"]) == 1
    until(lambda: len(operator.pods()) == 2, 60)


def test_new_leader_starts_stages_within_30_seconds(
    operator: Operator, namespace: KubeNamespace
):
    operator.wait_ready()
    time.sleep(
        LEASE_DURATION
    )  # a replica that has just started watches the Lease so long before it may lead
    leader = operator.leader()
    operator.objects.run("delete", "pod", leader, "--grace-period=0", "--force")
    killed_at = time.monotonic()
    driver = PipelineDriver.start(namespace, pipeline("soon"))
    driver.wait_state("prepare", "Running", "Succeeded", seconds=30)
    print(f"first Job {time.monotonic() - killed_at:.1f} s after the leader was killed")
