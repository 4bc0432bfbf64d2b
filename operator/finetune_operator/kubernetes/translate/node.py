"""The notices on a Node that announce its end: pure."""

from finetune_operator.kubernetes.translate.object import Object

TAINTS = frozenset(
    {
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",  # before v1
        "aws-node-termination-handler/spot-itn",
        "aws-node-termination-handler/rebalance-recommendation",
        "aws-node-termination-handler/scheduled-maintenance",
        "aws-node-termination-handler/asg-lifecycle-termination",
        "cloud.google.com/impending-node-termination",
        "remediator.kubernetes.azure.com/unschedulable",
        "ToBeDeletedByClusterAutoscaler",
    }
)
"""Keys of taints that a node gets before its end.

Karpenter taints a node that it will replace, before it creates the replacement and drains the node. The AWS node
termination handler taints with `taintNode: true`, and its README names the four keys. GKE taints before the maintenance
of a host that cannot be migrated, such as one with GPUs. AKS taints a spot node at a scheduled event (its page on node
auto-drain). The cluster autoscaler taints a node that it removes. node.kubernetes.io/out-of-service is none of them: it
says that the node is off already. Nor is node.kubernetes.io/unschedulable, which any administrator's cordon adds.
"""
LABELS = {"cloud.google.com/active-node-maintenance": "ONGOING"}
"""Labels and their announcing value: GKE sets this label when the maintenance of the host begins to stop workloads."""
CONDITIONS = frozenset({"VMEventScheduled"})
"""Conditions that are True: the node problem detector of AKS reports Azure's scheduled events with this condition."""


def notices_of(node: Object) -> frozenset[str]:
    """Return the notices of a node's end: names of taints, labels and conditions."""
    labels = node["metadata"].get("labels") or {}
    taints = (node.get("spec") or {}).get("taints") or []
    conditions = (node.get("status") or {}).get("conditions") or []
    keys = {str(taint.get("key")) for taint in taints}
    true_conditions = {
        str(condition.get("type"))
        for condition in conditions
        if condition.get("status") == "True"
    }
    set_labels = {name for name, value in LABELS.items() if labels.get(name) == value}
    return frozenset((keys & TAINTS) | set_labels | (true_conditions & CONDITIONS))
