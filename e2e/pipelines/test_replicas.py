"""Two replicas: whatever happens to the one that works, no stage runs twice and work goes on."""

import time

from e2e.pipelines.chart import Operator
from e2e.pipelines.driver import ORDER, PipelineDriver, pipeline
from e2e.pipelines.test_evictions import evict
from testcluster.kube_namespace import KubeNamespace, until


def test_the_leader_is_lost_in_every_stage(operator: Operator, namespace: KubeNamespace):
    namespace.claim("models")
    story = PipelineDriver.start(namespace, pipeline("led", steps=dict.fromkeys(ORDER, 25), pushes=True))
    for at, stage in enumerate(ORDER):
        story.wait_state(stage, "Running", seconds=90)
        leader = operator.leader()
        if at % 2:
            evict(operator.objects, leader)
        else:
            operator.objects.run("delete", "pod", leader, "--grace-period=0", "--force")
        until(lambda gone=leader: operator.leader() not in {"", gone}, 30, operator.logs)
    story.wait_finished(seconds=120)
    for stage in ORDER:
        assert len(story.jobs(stage)) == 1
        assert len(story.stage(stage)["attempts"]) == 1
    until(lambda: len(operator.pods()) == 2, 60)


def test_work_goes_on_soon_after_a_leader_is_gone(operator: Operator, namespace: KubeNamespace):
    leader = operator.leader()
    operator.objects.run("delete", "pod", leader, "--grace-period=0", "--force")
    began = time.monotonic()
    story = PipelineDriver.start(namespace, pipeline("soon"))
    story.wait_state("prepare", "Running", "Succeeded", seconds=30)
    print(f"first Job {time.monotonic() - began:.1f} s after the leader was killed")
