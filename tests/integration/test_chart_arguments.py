"""The arguments and variables that the chart gives to the operator's process, as the process reads them."""

from datetime import timedelta

import pytest
from support.operator.charts import (
    CLUSTER_WIDE,
    EVERYTHING,
    NAMESPACED,
    container,
    every_variant,
    grants,
    names,
    of_kind,
    options,
    parsed_options,
    pod,
    render,
)

from finetune_operator import __main__ as operator
from finetune_operator.api.placement import PlacementDefaults
from finetune_operator.core.settings import Settings


def test_more_options_and_variables_reach_the_process():
    objects = render(EVERYTHING)
    assert parsed_options(objects).lease_namespace == "leases"
    variables = {
        variable["name"]: variable.get("value")
        for variable in container(objects)["env"]
    }
    assert variables == {
        "POD_NAME": None,
        "POD_NAMESPACE": None,
        "HTTPS_PROXY": "http://proxy.example:3128",
    }


def test_pods_name_no_user_if_the_cluster_chooses_it():
    """Neither the operator's pods nor the pods of stages then have what OpenShift's restricted-v2 refuses."""
    objects = render({"podSecurity": {"setUser": False}})
    assert not parsed_options(objects).settings.sets_user
    pods = [pod(objects)["spec"], of_kind(objects, "Pod")[0]["spec"]]
    for spec in pods:
        assert spec["securityContext"] == {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    assert parsed_options(render(CLUSTER_WIDE)).settings.sets_user


def test_default_placement_equals_the_operators_default():
    assert (
        parsed_options(render(CLUSTER_WIDE)).settings.placement_defaults
        == PlacementDefaults()
    )


@pytest.mark.parametrize("label", ["on-demand", "true", "null", "010", "1_000", ""])
def test_placement_is_passed_unchanged(label):
    """A label's value stays a string, though YAML reads it as another type without quotes."""
    placement = {
        "onDemand": {"nodeSelector": {"kind": label}},
        "spot": {"tolerations": [{"key": "cheap", "value": label}]},
    }
    defaults = parsed_options(
        render({"placement": placement})
    ).settings.placement_defaults
    assert defaults.on_demand.node_selector == {"kind": label}
    assert defaults.spot.tolerations[0].value == label


@pytest.mark.parametrize(
    "text",
    ['a "quoted" word', "it's", "a\\b: {c} # d", "<&>", "é…", "{{ no }}", "%s"],
)
def test_variable_is_passed_unchanged(text):
    """Quoting in the template keeps every character of free text."""
    defaults = {"podDefaults": {"env": [{"name": "TEXT", "value": text}]}}
    settings = parsed_options(render({"defaults": defaults})).settings
    [variable] = settings.defaults.pod_defaults.env
    assert variable.name == "TEXT"
    assert variable.value == text


def test_grace_period_and_namespaces_are_passed():
    options = parsed_options(render(EVERYTHING))
    assert options.settings.grace_period.total_seconds() == 90
    assert options.namespaces == ("team-a", "team-b")
    assert parsed_options(render(CLUSTER_WIDE)).namespaces == ()


def test_notices_are_passed_and_decide_the_right_on_nodes():
    default = render(CLUSTER_WIDE)
    custom = render({"interruptionNotices": {"metadata": "GCE", "nodes": False}})
    assert (
        parsed_options(default).metadata_notices,
        parsed_options(default).node_notices,
    ) == (
        "",
        True,
    )
    assert (
        parsed_options(custom).metadata_notices,
        parsed_options(custom).node_notices,
    ) == (
        "GCE",
        False,
    )
    assert {
        grant
        for grant in grants(of_kind(default, "ClusterRole"))
        if grant[1] == "nodes"
    } == {
        ("", "nodes", "list"),
        ("", "nodes", "watch"),
    }
    for without in (custom, render(NAMESPACED)):
        assert not [
            grant
            for grant in grants(of_kind(without, "Role", "ClusterRole"))
            if grant[1] == "nodes"
        ]


def test_lost_nodes_are_passed_and_decide_the_right_on_pods():
    right = ("", "pods", "delete")
    for namespaces in ([], ["team-a"]):
        values = {"namespaces": namespaces}
        default = render(values)
        custom = render({**values, "nodeLost": {"replaceAfterSeconds": 600}})
        assert parsed_options(default).settings.replace_lost_after is None
        assert parsed_options(custom).settings.replace_lost_after == timedelta(
            seconds=600
        )
        assert right not in grants(of_kind(default, "Role", "ClusterRole"))
        assert right in grants(of_kind(custom, "Role", "ClusterRole"))
        policies = {"lost-pods.finetune-operator.finetune-system"}
        kind = "ValidatingAdmissionPolicy"
        assert names(custom, kind) - names(default, kind) == policies


def test_address_of_troubleshooting_is_passed():
    default, custom = (
        parsed_options(render(values)).settings for values in (CLUSTER_WIDE, EVERYTHING)
    )
    assert default.troubleshooting_url == Settings.troubleshooting_url
    assert custom.troubleshooting_url == "https://wiki.example/troubleshooting"


def test_limits_and_logging_are_passed_as_options():
    default = options(render(CLUSTER_WIDE))
    custom = options(render(EVERYTHING))
    limits = ("job-history", "workers", "qps", "burst", "log-level", "log-format")
    assert [default[name] for name in limits] == [
        "2",
        "20",
        "500",
        "1000",
        "info",
        "json",
    ]
    assert [custom[name] for name in limits] == [
        "7",
        "15",
        "50.5",
        "70",
        "debug",
        "text",
    ]


def test_largest_rate_limit_is_written_without_exponent():
    """Helm reads numbers as floating point, and prints large numbers with an exponent."""
    large = options(render({"apiRateLimit": {"qps": 100_000, "burst": 100_000}}))
    assert large["qps"] == "100000"
    assert large["burst"] == "100000"


@every_variant
def test_operator_knows_every_argument_of_the_chart(values):
    chosen = operator._parser().parse_args(container(render(values))["args"])
    assert chosen.job_history >= 1


def test_proxies_of_meshes_are_kept_out_of_pods_that_end():
    settings = parsed_options(render(CLUSTER_WIDE)).settings
    assert settings.job_defaults.labels["sidecar.istio.io/inject"] == "false"
    assert settings.job_defaults.annotations["linkerd.io/inject"] == "disabled"
    own = {"labels": {"sidecar.istio.io/inject": None, "team": "a"}}
    changed = parsed_options(render({"jobMetadata": own})).settings.job_defaults
    assert changed.labels == {"kuma.io/sidecar-injection": "disabled", "team": "a"}
