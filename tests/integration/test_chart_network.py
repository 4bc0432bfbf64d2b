"""The chart's network policies as Helm renders them; test_chart_dry_run.py sends them to an API server."""

import pytest
from support.operator.charts import (
    CLUSTER_WIDE,
    EVERYTHING,
    Object,
    of_kind,
    only,
    pod,
    render,
)

from e2e.pipelines.chart import NAMESPACE
from finetune_operator.core.metadata import job_labels
from testcluster.errors import TimedOut

STAGE_LABELS = job_labels("demo", "train", 1, "i").items()
STORE: Object = {
    "to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}],
    "ports": [{"protocol": "TCP", "port": 443}],
}


@pytest.mark.parametrize(
    ("namespaces", "selector"),
    [
        ([], {}),
        (
            ["a", "b"],
            {
                "matchExpressions": [
                    {
                        "key": "kubernetes.io/metadata.name",
                        "operator": "In",
                        "values": ["a", "b"],
                    }
                ]
            },
        ),
    ],
)
def test_network_policy_allows_what_the_operator_needs(namespaces, selector):
    objects = render(
        {
            "networkPolicy": {"enabled": True, "egress": [STORE]},
            "namespaces": namespaces,
        }
    )
    policy = only(objects, "NetworkPolicy")["spec"]
    assert (
        policy["podSelector"]["matchLabels"].items()
        <= pod(objects)["metadata"]["labels"].items()
    )
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["ingress"] == [{"ports": [{"protocol": "TCP", "port": "http"}]}]
    dns, api_server, stages, more = policy["egress"]
    assert more == STORE
    assert {port["port"] for port in dns["ports"]} == {53}
    assert [port["port"] for port in api_server["ports"]] == [443, 6443]
    assert "to" not in api_server
    [peer] = stages["to"]
    assert peer["namespaceSelector"] == selector
    assert peer["podSelector"]["matchLabels"].items() <= STAGE_LABELS
    assert "ports" not in stages


def test_network_policy_limits_who_reads_metrics():
    assert of_kind(render(CLUSTER_WIDE), "NetworkPolicy") == []
    operators, _from_stages, to_stages = of_kind(render(EVERYTHING), "NetworkPolicy")
    (rule,) = operators["spec"]["ingress"]
    assert (
        rule["from"]
        == to_stages["spec"]["ingress"][-1]["from"]
        == [{"podSelector": {}}]
    )


def stage_policies(stages: Object, **values: object) -> list[Object]:
    return of_kind(
        render({"networkPolicy": {"stages": stages}, **values}), "NetworkPolicy"
    )


def test_pods_of_stages_reach_dns_each_other_and_the_list():
    [policy] = stage_policies({"egress": [STORE], "namespaces": ["team-a"]})
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= STAGE_LABELS
    assert policy["spec"]["policyTypes"] == ["Egress"]
    dns, training, store = policy["spec"]["egress"]
    [peer] = training["to"]
    assert peer["podSelector"]["matchLabels"].items() <= STAGE_LABELS
    assert {(port["protocol"], port["port"]) for port in dns["ports"]} == {
        ("UDP", 53),
        ("TCP", 53),
    }
    assert store == STORE


def test_each_namespace_of_pipelines_has_the_policy_of_stages():
    def namespaces(stages: Object, **values: object) -> list[str]:
        return [
            policy["metadata"]["namespace"]
            for policy in stage_policies(stages, **values)
        ]

    assert namespaces({"egress": [STORE]}, namespaces=["team-a", "team-b"]) == [
        "team-a",
        "team-b",
    ]
    assert namespaces(
        {"egress": [STORE], "namespaces": ["team-c"]}, namespaces=["team-a"]
    ) == ["team-c"]
    assert namespaces({"namespaces": ["team-a"]}) == []


def test_pods_of_stages_admit_the_operator_and_each_other():
    stages = {"fromOperator": True, "namespaces": ["team-a"]}
    objects = render({"networkPolicy": {"stages": stages}})
    policy = only(objects, "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["podSelector"]["matchLabels"].items() <= STAGE_LABELS
    operator, training = policy["ingress"]
    [peer] = operator["from"]
    assert (
        peer["podSelector"]["matchLabels"].items()
        <= pod(objects)["metadata"]["labels"].items()
    )
    assert peer["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": NAMESPACE
    }
    [worker] = training["from"]
    assert worker["podSelector"]["matchLabels"].items() <= STAGE_LABELS
    assert (
        not worker["podSelector"]["matchLabels"].items()
        <= job_labels("demo", "evaluate", 1, "i").items()
    )


@pytest.mark.parametrize("stages", [{"egress": [STORE]}, {"fromOperator": True}])
def test_policy_of_stages_without_a_namespace_is_refused(stages):
    with pytest.raises(TimedOut, match=r"set networkPolicy\.stages\.namespaces"):
        stage_policies(stages)
