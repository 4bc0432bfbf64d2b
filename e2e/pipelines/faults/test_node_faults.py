"""A training whose node is taken away, hangs or comes back ends with the bytes of an undisturbed training."""

import pytest

from e2e.pipelines.faults.fault import chosen
from e2e.pipelines.faults.node_faults import NODE_FAULTS
from e2e.pipelines.faults.scene import scene


@pytest.mark.parametrize("fault", chosen(NODE_FAULTS), ids=lambda fault: fault.name)
def test_training_survives_a_fault_of_its_node(site, judge, fault):
    with scene(site, fault.name.replace(" ", "-"), fault.changes) as run:
        fault.inject(run)
        judge(fault, run)
