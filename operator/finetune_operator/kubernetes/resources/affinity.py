"""Build the affinity of a pod that keeps away from nodes with some labels: pure."""

from collections.abc import Iterable
from typing import Any

from finetune_operator.core.attempts.suspect_nodes import AvoidedNodes
from finetune_operator.core.job_template import REQUIRED_AFFINITY
from finetune_operator.kubernetes.translate.object import Object

PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def affinity_without(labels: Iterable[tuple[str, str]], affinity: Object) -> Object:
    """Return the user's affinity for nodes that have none of the labels.

    A malformed affinity stays as it is, because the API server refuses it in its own words.
    """
    excluded = [
        {"key": key, "operator": "NotIn", "values": [value]} for key, value in labels
    ]
    return _narrowed(affinity, "matchExpressions", excluded)


def affinity_avoiding(nodes: AvoidedNodes, affinity: Object) -> Object:
    """Return the affinity for other nodes than the faulty nodes, and rather for other nodes than the unlucky nodes."""
    narrowed = _narrowed(affinity, "matchFields", _other_than(nodes.faulty))
    if not nodes.unlucky:
        return narrowed
    node = narrowed.get("nodeAffinity") or {}
    if not isinstance(node, dict):
        return narrowed
    preferred = node.get(PREFERRED) or []
    if not isinstance(preferred, list):
        return narrowed
    # The largest weight that Kubernetes allows.
    term = {"weight": 100, "preference": {"matchFields": _other_than(nodes.unlucky)}}
    return {**narrowed, "nodeAffinity": {**node, PREFERRED: [*preferred, term]}}


def _other_than(nodes: Iterable[str]) -> list[Object]:
    # Kubernetes allows this field only, and one value in each. A label may differ from the node's name.
    return [
        {"key": "metadata.name", "operator": "NotIn", "values": [node]}
        for node in nodes
    ]


def _narrowed(affinity: Object, field: str, requirements: list[Object]) -> Object:
    """Return the affinity for nodes that also meet the requirements of this field of a term."""
    node = affinity.get("nodeAffinity") or {}
    if not requirements or not isinstance(node, dict):
        return affinity
    required = node.get(REQUIRED_AFFINITY)
    if required is None:
        required = {"nodeSelectorTerms": [{field: requirements}]}
    elif isinstance(required, dict) and isinstance(
        required.get("nodeSelectorTerms"), list
    ):
        # A node must match only one of the terms, so each term gets the requirements.
        terms = [
            _narrowed_term(term, field, requirements)
            for term in required["nodeSelectorTerms"]
        ]
        required = {**required, "nodeSelectorTerms": terms}
    return {**affinity, "nodeAffinity": {**node, REQUIRED_AFFINITY: required}}


def _narrowed_term(term: Any, field: str, requirements: list[Object]) -> Any:
    """Return the term with more requirements. An empty term stays empty, because it matches no node."""
    if not isinstance(term, dict) or not any(term.values()):
        return term
    own = term.get(field) or []
    if not isinstance(own, list):
        return term
    return {**term, field: [*own, *requirements]}
