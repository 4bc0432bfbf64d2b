"""Build the affinity of a pod that keeps away from nodes with some labels: pure."""

from collections.abc import Iterable
from typing import Any

from finetune_operator.kubernetes.translate.object import Object

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def affinity_without(labels: Iterable[tuple[str, str]], affinity: Object) -> Object:
    """Return the user's affinity for nodes that have none of the labels.

    A malformed affinity stays as it is, because the API server refuses it in its own words.
    """
    excluded = [
        {"key": key, "operator": "NotIn", "values": [value]} for key, value in labels
    ]
    node = affinity.get("nodeAffinity") or {}
    if not excluded or not isinstance(node, dict):
        return affinity
    required = node.get(REQUIRED)
    if required is None:
        required = {"nodeSelectorTerms": [{"matchExpressions": excluded}]}
    elif isinstance(required, dict) and isinstance(
        required.get("nodeSelectorTerms"), list
    ):
        # A node must match only one of the terms, so each term gets the expressions.
        terms = [_narrowed(term, excluded) for term in required["nodeSelectorTerms"]]
        required = {**required, "nodeSelectorTerms": terms}
    return {**affinity, "nodeAffinity": {**node, REQUIRED: required}}


def _narrowed(term: Any, excluded: list[Object]) -> Any:
    """Return the term with more expressions. An empty term stays empty, because it matches no node."""
    if not isinstance(term, dict) or not any(term.values()):
        return term
    expressions = term.get("matchExpressions") or []
    if not isinstance(expressions, list):
        return term
    return {**term, "matchExpressions": [*expressions, *excluded]}
