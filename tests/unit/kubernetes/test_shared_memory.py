"""/dev/shm is in memory for a pod that may have a device of any vendor."""

import pytest
from support.operator.scenario import Scenario, a_pipeline


def shares_memory(**pod: object) -> bool:
    """Return whether the pod of train has a volume at /dev/shm."""
    scenario = Scenario(a_pipeline(train={"pod": pod})).run("prepare")
    return scenario.cluster.jobs[scenario.attempt("train").job].template.shares_memory


@pytest.mark.parametrize(
    "pod",
    [
        {"runtimeClassName": "nvidia"},
        *(
            {"resources": {"limits": {name: 1}}}
            for name in (
                *("nvidia.com/gpu", "amd.com/gpu", "google.com/tpu"),
                *("aws.amazon.com/neuron", "huawei.com/Ascend910"),
            )
        ),
    ],
    ids=str,
)
def test_pod_with_a_device_shares_memory(pod):
    assert shares_memory(**pod)


@pytest.mark.parametrize(
    "limits", [{}, {"cpu": 2, "memory": "4Gi"}, {"google.com/tpu": 0}], ids=str
)
def test_pod_without_a_device_shares_none(limits):
    assert not shares_memory(resources={"limits": limits})
