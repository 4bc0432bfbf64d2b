"""Node classes, presets and prices in the chart, down to the Job that the operator builds with them."""

import pytest
import yaml
from support.operator.built_objects import Object, built_objects
from support.operator.charts import container, parsed_options, pod, render
from support.operator.scenario import ALL_STAGES, merged

from e2e.pipelines.chart import CHART
from finetune_operator.api.placement import PRESETS
from finetune_operator.controller.manager import Options
from testcluster.errors import TimedOut

GPU = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
DO_NOT_DISRUPT = ("karpenter.sh/do-not-disrupt", "true")


def options(placement: Object) -> Options:
    """Return the options of the operator's process that the chart starts."""
    return parsed_options(render({"placement": placement}))


def workloads(placement: Object, train: Object | None = None) -> dict[str, Object]:
    changes = {
        "train": merged({"pod": GPU, "placement": {"capacity": "Spot"}}, train or {})
    }
    manifest = {
        "metadata": {"name": "demo"},
        "spec": merged(ALL_STAGES, changes),
    }
    return built_objects(manifest, "team", options(placement).settings).workloads


def spec_of(workload: Object) -> Object:
    pod_spec: Object = workload["spec"]["template"]["spec"]
    return pod_spec


def annotations_of(workload: Object) -> Object:
    annotations: Object = workload["spec"]["template"]["metadata"]["annotations"]
    return annotations


def tolerated(workload: Object) -> set[tuple[str, str]]:
    """Return key and value of the tolerated taints, without the taints that every pod tolerates."""
    taints = {
        (toleration["key"], toleration.get("value", ""))
        for toleration in spec_of(workload)["tolerations"]
    }
    return {
        (key, value)
        for key, value in taints
        if not key.startswith(("node.kubernetes.io/", "nvidia.com/"))
    }


def avoided(workload: Object) -> set[tuple[str, str]]:
    """Return key and value of the labels that the node must not have."""
    node = spec_of(workload).get("affinity", {}).get("nodeAffinity", {})
    terms = node.get(REQUIRED, {}).get("nodeSelectorTerms", [{}])
    requirements = [
        (requirement["key"], requirement["operator"], requirement["values"])
        for requirement in terms[0].get("matchExpressions", ())
    ]
    assert all(operator == "NotIn" for _, operator, _ in requirements)
    return {(key, value) for key, _, values in requirements for value in values}


GKE_SPOT = ("cloud.google.com/gke-spot", "true")
AKS_SPOT = ("kubernetes.azure.com/scalesetpriority", "spot")
SPOT_NODES: dict[str, tuple[Object, set[tuple[str, str]]]] = {
    "generic": ({}, {("spot", "true")}),
    "gke": (dict([GKE_SPOT]), {GKE_SPOT}),
    "eks": ({"eks.amazonaws.com/capacityType": "SPOT"}, set()),
    "karpenter": ({"karpenter.sh/capacity-type": "spot"}, set()),
    "aks": (dict([AKS_SPOT]), {AKS_SPOT}),
}
"""Preset -> labels and tolerations of a Spot stage; docs/guides/placement.md names each cloud's page."""
ON_DEMAND_NODES: dict[str, tuple[Object, set[tuple[str, str]]]] = {
    "generic": ({}, set()),
    "gke": ({}, {GKE_SPOT, ("cloud.google.com/gke-preemptible", "true")}),
    "eks": ({"eks.amazonaws.com/capacityType": "ON_DEMAND"}, set()),
    "karpenter": ({"karpenter.sh/capacity-type": "on-demand"}, set()),
    "aks": ({}, set()),
}
"""Preset -> labels of an OnDemand stage's nodes, and labels that they must not have."""
every_preset = pytest.mark.parametrize("preset", PRESETS)


@every_preset
def test_spot_stage_gets_labels_and_tolerations_of_the_preset(preset):
    train = workloads({"preset": preset})["train"]
    assert (spec_of(train)["nodeSelector"], tolerated(train)) == SPOT_NODES[preset]
    assert avoided(train) == set()


@every_preset
def test_on_demand_stages_stay_away_from_spot_nodes(preset):
    built = workloads({"preset": preset})
    for stage in ("prepare", "evaluate", "push", "deploy"):
        assert (
            spec_of(built[stage])["nodeSelector"],
            avoided(built[stage]),
        ) == ON_DEMAND_NODES[preset], stage
        assert tolerated(built[stage]) == set()


@every_preset
def test_only_karpenter_jobs_are_kept_from_consolidation(preset):
    """A server may be moved: a Deployment starts the new pod before the old pod ends."""
    built = workloads({"preset": preset})
    protected = {
        stage
        for stage, workload in built.items()
        if DO_NOT_DISRUPT in annotations_of(workload).items()
    }
    assert protected == (
        {"prepare", "train", "evaluate", "push"} if preset == "karpenter" else set()
    )
    assert DO_NOT_DISRUPT not in built["train"]["metadata"]["annotations"].items()


def test_users_annotation_replaces_that_of_the_preset():
    own = {"pod": {"annotations": {DO_NOT_DISRUPT[0]: "30m"}}}
    assert (
        annotations_of(workloads({"preset": "karpenter"}, own)["train"])[
            DO_NOT_DISRUPT[0]
        ]
        == "30m"
    )


def test_own_affinity_and_excluded_labels_apply_together():
    expression = {"key": "zone", "operator": "In", "values": ["a"]}
    own = {
        "placement": {"capacity": "OnDemand"},
        "pod": {
            "affinity": {
                "nodeAffinity": {
                    REQUIRED: {
                        "nodeSelectorTerms": [{"matchExpressions": [expression]}]
                    }
                }
            }
        },
    }
    affinity = spec_of(workloads({"preset": "gke"}, own)["train"])["affinity"]
    [term] = affinity["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert [requirement["key"] for requirement in term["matchExpressions"]] == [
        "zone",
        "cloud.google.com/gke-preemptible",
        GKE_SPOT[0],
    ]


def test_own_node_selector_wins_over_an_excluded_label():
    own = {
        "placement": {"capacity": "OnDemand"},
        "pod": {"nodeSelector": dict([GKE_SPOT])},
    }
    train = workloads({"preset": "gke"}, own)["train"]
    assert spec_of(train)["nodeSelector"] == dict([GKE_SPOT])
    assert avoided(train) == {("cloud.google.com/gke-preemptible", "true")}


def test_configured_nodes_replace_those_of_the_preset():
    spot = {
        "nodeSelector": {"cheap": "yes"},
        "excludedLabels": {"zone": "c"},
        "tolerations": [{"key": "cheap", "operator": "Exists"}],
        "annotations": {"kept": "yes"},
    }
    built = workloads({"preset": "karpenter", "spot": spot})
    train = built["train"]
    assert (spec_of(train)["nodeSelector"], tolerated(train), avoided(train)) == (
        {"cheap": "yes"},
        {("cheap", "")},
        {("zone", "c")},
    )
    assert annotations_of(train).items() >= {("kept", "yes")}
    assert DO_NOT_DISRUPT not in annotations_of(train).items()
    assert spec_of(built["prepare"])["nodeSelector"] == {
        "karpenter.sh/capacity-type": "on-demand"
    }


def test_cheapest_node_class_adds_its_own_labels():
    classes = [
        {
            "name": name,
            "capacity": "Spot",
            "accelerator": "nvidia.com/gpu",
            "nodeSelector": {"gpu": name},
        }
        | price
        for name, price in (
            ("unknown", {"price": None}),
            ("b", {"price": "0.90"}),
            ("a", {"price": 0.8}),
        )
    ]
    train = workloads({"preset": "eks", "nodeClasses": classes})["train"]
    assert spec_of(train)["nodeSelector"] == {
        "eks.amazonaws.com/capacityType": "SPOT",
        "gpu": "a",
    }


def test_example_of_the_values_file_is_valid():
    lines = (CHART / "values.yaml").read_text().splitlines()
    first, last = (
        next(i for i, line in enumerate(lines) if text in line)
        for text in ("- name: h100-spot", "Classes: [")
    )
    example = "\n".join(line.removeprefix("  # ") for line in lines[first:last])
    placement = {"nodeClasses": yaml.safe_load(example)}
    defaults = options(placement).settings.placement_defaults
    assert defaults
    classes = defaults.node_classes
    assert [(node_class.name, str(node_class.price)) for node_class in classes] == [
        ("h100-spot", "0.80"),
        ("h100", "3.10"),
    ]


# ---- wrong values

A_CLASS = {"name": "h100", "capacity": "Spot"}


@pytest.mark.parametrize(
    ("placement", "error"),
    [
        ({"preset": "gcp"}, "/placement/preset'.*'gke'"),
        ({"currency": ""}, "/placement/currency'"),
        (
            {"shortStageSeconds": "1h"},
            "/placement/shortStageSeconds': got string, want integer",
        ),
        ({"restartSeconds": 0}, "/placement/restartSeconds'.*minimum"),
        ({"returnSeconds": 1.5}, "/placement/returnSeconds': got number, want integer"),
        (
            {"priceConfigMap": "GPU prices"},
            "/placement/priceConfigMap'.*does not match",
        ),
        ({"onDemand": {"taints": []}}, "/placement/onDemand': .*'taints' not allowed"),
        (
            {"spot": {"annotations": {"a": 1}}},
            "/placement/spot/annotations/a': got number",
        ),
        (
            {"nodeClasses": [{"capacity": "Spot"}]},
            "/placement/nodeClasses/0': missing property 'name'",
        ),
        (
            {"nodeClasses": [{"name": "h100"}]},
            "/placement/nodeClasses/0': missing property 'capacity'",
        ),
        (
            {"nodeClasses": [{**A_CLASS, "name": "H 100"}]},
            "/placement/nodeClasses/0/name'.*does not match",
        ),
        (
            {"nodeClasses": [{**A_CLASS, "capacity": "Auto"}]},
            "/placement/nodeClasses/0/capacity'.*'OnDemand'",
        ),
        (
            {"nodeClasses": [{**A_CLASS, "price": "$1"}]},
            "/placement/nodeClasses/0/price'.*does not match",
        ),
        (
            {"nodeClasses": [{**A_CLASS, "price": -1}]},
            "/placement/nodeClasses/0/price'.*minimum",
        ),
        (
            {"nodeClasses": [{**A_CLASS, "priceDate": "May"}]},
            "/placement/nodeClasses/0/priceDate'.*does not match",
        ),
        (
            {"nodeClasses": [{**A_CLASS, "cost": "1"}]},
            "/placement/nodeClasses/0': .*'cost' not allowed",
        ),
        (
            {"nodeClasses": [A_CLASS, A_CLASS]},
            "placement.nodeClasses: the name h100 is not unique: rename one of them",
        ),
    ],
    ids=str,
)
def test_wrong_placement_is_refused_when_rendered(placement, error):
    with pytest.raises(TimedOut, match=error):
        render({"placement": placement})


# ---- the price list


def test_price_list_is_mounted_where_the_operator_reads_it():
    objects = render({"placement": {"priceConfigMap": "gpu-prices"}})
    chosen = parsed_options(objects)
    [mount] = [
        mount
        for mount in container(objects)["volumeMounts"]
        if mount["name"] == "prices"
    ]
    assert mount == {
        "name": "prices",
        "mountPath": str(chosen.prices),
        "readOnly": True,
    }
    [volume] = [
        volume
        for volume in pod(objects)["spec"]["volumes"]
        if volume["name"] == "prices"
    ]
    assert volume["configMap"] == {"name": "gpu-prices", "optional": True}


def test_nothing_is_mounted_without_a_price_list():
    objects = render({})
    assert [volume["name"] for volume in pod(objects)["spec"]["volumes"]] == ["tmp"]
    assert parsed_options(objects).prices is None
