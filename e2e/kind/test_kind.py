"""What holds on a cluster of kind: the tests of volumes, names, images, evictions and lost nodes that other files have.

A node is a Docker container here, so its network, its image store and the way it dies are others.
"""

from e2e.pipelines.chart import Operator
from e2e.pipelines.driver import PipelineDriver, pipeline
from e2e.pipelines.test_evictions import (
    test_eviction_api_interrupts_and_training_resumes,
    test_node_deleted_without_notice_is_an_interruption,
    test_unreachable_node_blocks_until_it_is_deleted,
)
from e2e.test_smoke import (
    test_image_pushed_to_the_registry_is_pulled_by_a_node,
    test_operator_image_reads_api_with_service_account,
    test_pods_run_on_on_demand_and_spot_nodes,
    test_service_name_resolves_from_another_node,
    test_volume_keeps_data_for_a_pod_on_another_node,
)
from testcluster.kube_namespace import KubeNamespace

__all__ = [
    "test_eviction_api_interrupts_and_training_resumes",
    "test_image_pushed_to_the_registry_is_pulled_by_a_node",
    "test_node_deleted_without_notice_is_an_interruption",
    "test_operator_image_reads_api_with_service_account",
    "test_pods_run_on_on_demand_and_spot_nodes",
    "test_service_name_resolves_from_another_node",
    "test_unreachable_node_blocks_until_it_is_deleted",
    "test_volume_keeps_data_for_a_pod_on_another_node",
]


def test_pipeline_of_all_stages_succeeds(operator: Operator, namespace: KubeNamespace):
    namespace.claim("models")
    driver = PipelineDriver.start(namespace, pipeline("whole", pushes=True))
    driver.wait_finished()
    states = {name: stage["state"] for name, stage in driver.status["stages"].items()}
    done = dict.fromkeys(("prepare", "train", "evaluate", "push"), "Succeeded")
    assert states == {**done, "deploy": "Skipped"}
