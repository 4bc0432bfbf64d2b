"""The rules of the CRD on an API server: in the schema, or in a policy."""

from typing import Any

from finetune_operator.crd import generate
from finetune_operator.crd.policy import NAME
from testcluster.kube import Kube

Object = dict[str, Any]
PLACES = ("schema", "policy")
"""Where an API server may have the rules."""


def objects_with_rules(place: str) -> list[Object]:
    """Return the objects that hold the rules: the CRD, and for `policy` the policy and its binding."""
    if place == "schema":
        return [generate.definition()]
    return [generate.definition(rules=False), *generate.rules_policy()]


def delete_policies(kube: Kube) -> None:
    """Delete the policy and its binding, if they exist."""
    for policy in generate.rules_policy():
        kube.run("delete", "--ignore-not-found", policy["kind"], NAME)
