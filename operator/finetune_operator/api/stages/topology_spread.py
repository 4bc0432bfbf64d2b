"""How the pods of a stage spread over zones or nodes, with fields of core/v1.

There is no labelSelector: the pods of the same attempt are spread, such as the replicas of one server.
"""

from typing import Annotated, Literal

from pydantic import Field

from finetune_operator.api.names import LabelKey
from finetune_trainer.contract import ContractModel


class TopologySpreadConstraint(ContractModel):
    """How evenly the pods of an attempt are over zones or nodes."""

    # More pods of a stage than any cluster has.
    max_skew: Annotated[int, Field(ge=1, le=10_000)]
    """Largest difference between the numbers of pods in two domains."""
    topology_key: LabelKey
    """Label of nodes whose values are the domains, such as topology.kubernetes.io/zone."""
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]
    """DoNotSchedule: the pod waits. ScheduleAnyway: the scheduler prefers the better domain."""
    node_taints_policy: Literal["Honor", "Ignore"] | None = None
    """Honor: nodes with taints that the pod does not tolerate are no domain. Absent: Ignore."""
