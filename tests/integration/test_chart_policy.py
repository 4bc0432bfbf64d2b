"""The chart's admission policies as Helm renders them; test_admission_policy.py sends requests to an API server."""

import re

import pytest
from support.operator.charts import (
    CLUSTER_WIDE,
    NAMESPACED,
    Object,
    of_kind,
    render,
    render_text,
)

from e2e.pipelines.chart import RELEASE

OWN = "policy-operator"
"""Namespace of the release."""
POLICY = "ValidatingAdmissionPolicy"
BINDING = "ValidatingAdmissionPolicyBinding"
RULES = "finetunepipelines.finetune.dev"
"""The policy with the rules between fields of a pipeline, which holds for every account."""
POLICIES = {
    RULES,
    *(
        f"{kind}.{RELEASE}.{OWN}"
        for kind in (
            *("objects", "pods", "services", "claims"),
            *("pipelines", "events", "defaults"),
        )
    ),
}


def policies(objects: list[Object]) -> set[str]:
    return {policy["metadata"]["name"] for policy in of_kind(objects, POLICY)}


@pytest.mark.parametrize(
    "values", [CLUSTER_WIDE, NAMESPACED], ids=["cluster-wide", "namespaced"]
)
def test_each_policy_is_bound_and_denies(values):
    objects = render(values, namespace=OWN)
    bindings = {
        binding["spec"]["policyName"]: binding["spec"]["validationActions"]
        for binding in of_kind(objects, BINDING)
    }
    assert policies(objects) == POLICIES
    assert bindings == {name: ["Deny"] for name in POLICIES}


@pytest.mark.parametrize(
    ("enabled", "versions", "rendered"),
    [
        ("auto", ("v1/Pod", f"admissionregistration.k8s.io/v1/{POLICY}"), True),
        ("auto", ("v1/Pod",), False),
        ("auto", (), True),
        (True, ("v1/Pod",), True),
        (False, (), False),
    ],
)
def test_policies_follow_value_and_api_server(enabled, versions, rendered):
    """Without a cluster no kinds are known; then auto renders the policies, which every supported version has."""
    more = [option for version in versions for option in ("--api-versions", version)]
    values = {
        "admissionPolicy": {"enabled": enabled},
        "crds": {"policy": enabled},
    }
    text = render_text(values, RELEASE, OWN, *more)
    assert (POLICY in text) is rendered
    # The rules are in the policy or in the schema, and never in neither. The list about deploy stays: policies do not
    # see the subresource scale.
    lists = text.count("x-kubernetes-validations")
    assert lists == 1 if rendered else lists > 1


def test_policies_limit_the_account_of_the_deployment():
    objects = render({"serviceAccount": {"name": "robot"}}, namespace=OWN)
    limiting = [
        policy
        for policy in of_kind(objects, POLICY)
        if not policy["metadata"]["name"].startswith(("defaults.", RULES))
    ]
    conditions = [
        condition["expression"]
        for policy in limiting
        for condition in policy["spec"]["matchConditions"]
    ]
    assert len(limiting) == len(POLICIES) - 2
    assert set(conditions) == {
        f"request.userInfo.username == 'system:serviceaccount:{OWN}:robot'"
    }


@pytest.mark.parametrize(
    ("values", "denied"),
    [
        (CLUSTER_WIDE, ["kube-system", OWN]),
        ({"admissionPolicy": {"deniedNamespaces": []}}, [OWN]),
        ({"admissionPolicy": {"deniedNamespaces": [OWN]}}, [OWN]),
        ({"namespaces": ["team-a"]}, ["kube-system", OWN]),
        # Pipelines of the operator's own namespace run there.
        ({"namespaces": ["team-a", OWN]}, ["kube-system"]),
    ],
)
def test_own_namespace_is_denied_unless_it_has_pipelines(values, denied):
    text = str(of_kind(render(values, namespace=OWN), POLICY))
    lists = re.findall(r"request\.namespace in \[([^]]*)\]", text)
    assert len(lists) == 2
    for names in lists:
        assert re.findall(r"[a-z-]+", names) == denied


def test_images_of_the_values_and_of_the_chart_are_allowed():
    values = {"admissionPolicy": {"images": ["registry.example/ml/"]}}
    trainer = {"trainer": {"image": {"registry": "registry.example:5000"}}}
    text = str(of_kind(render(values | trainer, namespace=OWN), POLICY))
    (rule,) = re.findall(r"\['registry.example/ml/'.{0,500}", text)
    for image in (
        "'registry.example/ml/'",
        "'registry.example:5000/finetune-trainer'",
        "'registry.example:5000/finetune-trainer-cpu'",
        "'vllm/vllm-openai:v0.11.0'",
    ):
        assert image in rule
    assert "exists(prefix" not in str(of_kind(render({}, namespace=OWN), POLICY))
