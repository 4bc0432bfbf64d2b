"""The chart's manifests as Helm renders them; test_chart_dry_run.py applies them to an API server."""

import re
import shutil

import pytest
import yaml
from support.operator.charts import (
    CLUSTER_WIDE,
    DIGEST,
    EVERYTHING,
    RESTRICTED_CONTAINER,
    container,
    every_variant,
    is_monitoring,
    names,
    of_kind,
    only,
    parsed_options,
    pod,
    render,
    render_text,
)

from e2e.pipelines.chart import CHART, RELEASE, helm
from finetune_operator.crd import generate as crdgen

DNS_LABEL = r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?"


# ---- the operator's pods


def test_two_replicas_have_a_disruption_budget_of_one():
    """A drain evicts one replica at a time."""
    objects = render(CLUSTER_WIDE)
    budget = only(objects, "PodDisruptionBudget")["spec"]
    assert only(objects, "Deployment")["spec"]["replicas"] == 2
    assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (
        1,
        "AlwaysAllow",
    )
    assert (
        only(render(EVERYTHING), "PodDisruptionBudget")["spec"]["maxUnavailable"]
        == "50%"
    )
    assert (
        of_kind(
            render({"podDisruptionBudget": {"enabled": False}}), "PodDisruptionBudget"
        )
        == []
    )


def test_single_replica_has_no_disruption_budget():
    """A budget for a single replica would block a drain forever."""
    objects = render({"replicaCount": 1})
    assert only(objects, "Deployment")["spec"]["replicas"] == 1
    assert of_kind(objects, "PodDisruptionBudget") == []


def test_replicas_prefer_different_nodes_by_default():
    """`affinity` in the values replaces that preference."""
    anti_affinity = pod(render(CLUSTER_WIDE))["spec"]["affinity"]["podAntiAffinity"]
    (term,) = anti_affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    assert pod(render(EVERYTHING))["spec"]["affinity"] == EVERYTHING["affinity"]


@every_variant
def test_every_selector_matches_the_operator_pods(values):
    objects = render(values)
    labels = pod(objects)["metadata"]["labels"].items()
    assert (
        only(objects, "Deployment")["spec"]["selector"]["matchLabels"].items() <= labels
    )
    assert only(objects, "Service")["spec"]["selector"].items() <= labels
    assert (
        only(objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"].items()
        <= labels
    )


@every_variant
def test_pod_is_unprivileged_and_isolated_from_its_node(values):
    objects = render(values)
    spec = pod(objects)["spec"]
    context = container(objects)["securityContext"]
    assert context == RESTRICTED_CONTAINER
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == values.get(
        "podSecurityContext", {}
    ).get("runAsUser", 65532)
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not [key for key in spec if key.startswith("host")]
    assert {key for volume in spec["volumes"] for key in volume} <= {
        "name",
        "emptyDir",
        "configMap",
    }


def test_image_tags_default_to_the_app_version():
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    default = render(CLUSTER_WIDE)
    custom = render(EVERYTHING)
    assert container(default)["image"] == f"finetune-operator:{version}"
    assert (
        parsed_options(default).settings.trainer_image == f"finetune-trainer:{version}"
    )
    assert (
        parsed_options(default).settings.trainer_cpu_image
        == f"finetune-trainer-cpu:{version}"
    )
    assert (
        container(custom)["image"] == f"registry.example/team/operator:1.2.3@{DIGEST}"
    )
    assert (
        parsed_options(custom).settings.trainer_image
        == f"registry.example/trainer:4.5.6@{DIGEST}"
    )
    assert (
        parsed_options(custom).settings.trainer_cpu_image
        == f"other.example/cpu:4.5.7@{DIGEST}"
    )
    assert (
        parsed_options(custom).settings.engine_images["VLLM"]
        == f"registry.example/vllm:7.8.9@{DIGEST}"
    )
    assert pod(custom)["spec"]["imagePullSecrets"] == [{"name": "pull"}]


def test_image_without_cuda_lies_beside_the_other_one():
    image = {
        "registry": "registry.example",
        "repository": "team/trainer",
        "tag": "dev",
        "digest": DIGEST,
    }
    settings = parsed_options(
        render(CLUSTER_WIDE | {"trainer": {"image": image}})
    ).settings
    assert settings.trainer_cpu_image == "registry.example/team/trainer-cpu:dev"


def test_port_is_the_same_in_container_service_and_probes():
    objects = render(EVERYTHING)
    assert parsed_options(objects).port == 9090
    assert container(objects)["ports"] == [{"name": "http", "containerPort": 9090}]
    assert only(objects, "Service")["spec"]["ports"] == [
        {"name": "http", "port": 9090, "targetPort": "http"}
    ]
    assert {
        container(objects)[f"{kind}Probe"]["httpGet"]["port"]
        for kind in ("liveness", "readiness")
    } == {"http"}


def test_user_labels_and_annotations_are_added_to_our_own():
    objects = render(EVERYTHING)
    meta = pod(objects)["metadata"]
    assert meta["labels"]["team"] == "platform"
    assert meta["labels"]["cost-center"] == "ml"
    assert meta["annotations"] == {"scrape": "yes"}
    assert only(objects, "ServiceAccount")["metadata"]["annotations"] == {
        "cloud.example/role": "reader"
    }
    for manifest in objects:
        if manifest["metadata"]["name"] == EVERYTHING["argocd"]["configMap"]:
            continue  # it is Argo CD's, not this release's
        labels = manifest["metadata"]["labels"]
        assert (labels["app.kubernetes.io/instance"], labels["cost-center"]) == (
            RELEASE,
            "ml",
        ), manifest["kind"]


def test_version_with_build_metadata_gives_valid_labels(tmp_path):
    """Flux adds the commit to the version: `reconcileStrategy: Revision` of deploy/flux/operator.yaml."""
    copy = shutil.copytree(CHART, tmp_path / CHART.name)
    description = copy / "Chart.yaml"
    description.write_text(
        re.sub(r"(?m)^(version: .*)", r"\1+0123456789ab", description.read_text())
    )
    text = helm(
        "template",
        RELEASE,
        str(copy),
        "--values",
        "-",
        given=yaml.safe_dump(EVERYTHING),
    )
    labels = {
        value
        for manifest in yaml.safe_load_all(text)
        if manifest
        for value in manifest["metadata"].get("labels", {}).values()
    }
    assert any(value.endswith("_0123456789ab") for value in labels)
    assert [
        value
        for value in labels
        if not re.fullmatch(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", value)
    ] == []


def test_label_of_a_monitor_replaces_the_common_label():
    """Flux refuses a manifest that has a key twice."""
    parts = ("serviceMonitor", "podMonitor", "prometheusRule", "dashboards")
    metrics = {part: {"enabled": True, "labels": {"team": "own"}} for part in parts}
    for text in render_text(
        {"commonLabels": {"team": "common"}, "metrics": metrics}
    ).split("\n---\n"):
        manifest = yaml.safe_load(text)
        if manifest["kind"] == "ConfigMap" or is_monitoring(manifest):
            assert re.findall(r"^    team: .*", text, re.MULTILINE) == [
                "    team: own"
            ], text


@pytest.mark.parametrize("word", ["123", "on", "null"])
def test_name_that_yaml_takes_for_another_type_stays_text(word):
    values = {
        "namespaces": [word],
        "serviceAccount": {"name": word},
        "priorityClassName": word,
    }
    values["networkPolicy"] = {"stages": {"egress": [{}]}}
    objects = render(
        {
            **EVERYTHING,
            **values,
            "argocd": {"customizations": True, "namespace": word},
        },
        word,
        word,
    )
    assert {manifest["metadata"].get("namespace", word) for manifest in objects} == {
        word
    }
    assert {
        pod(objects)["spec"][name]
        for name in ("serviceAccountName", "priorityClassName")
    } == {word}
    assert pod(objects)["metadata"]["labels"]["app.kubernetes.io/instance"] == word
    assert only(objects, "ServiceAccount")["metadata"]["name"] == word


def test_argo_cds_config_map_gets_only_the_customizations():
    objects = render(EVERYTHING)
    [config_map] = [
        manifest
        for manifest in of_kind(objects, "ConfigMap")
        if manifest["metadata"]["name"] == "gitops-cm"
    ]
    patch = yaml.safe_load(
        (CHART.parents[1] / "deploy" / "argocd" / "argocd-cm.yaml").read_text()
    )
    assert config_map["data"] == patch["data"]
    assert (
        config_map["metadata"]["namespace"],
        config_map["metadata"].get("labels"),
    ) == (
        "gitops",
        None,
    )
    options = config_map["metadata"]["annotations"][
        "argocd.argoproj.io/sync-options"
    ].split(",")
    assert set(options) == {"ServerSideApply=true", "Prune=false", "Delete=false"}


def test_all_objects_have_the_given_name():
    objects = render(EVERYTHING)
    assert names(
        objects, "Deployment", "PodDisruptionBudget", "ServiceMonitor", "PrometheusRule"
    ) == {"tuner"}
    assert names(objects, "NetworkPolicy") == {
        "tuner",
        "tuner-stages",
        "tuner-to-stages",
    }
    assert only(objects, "Service")["metadata"]["name"] == "tuner-metrics"
    assert parsed_options(objects).lease_name == "tuner"
    assert not [
        manifest
        for manifest in objects
        if manifest["metadata"]["name"].startswith(RELEASE)
    ]


# ---- the CRD, names, notes


@pytest.mark.parametrize("policy", [True, False])
def test_chart_crd_equals_the_generated_crd(policy):
    objects = render({"crds": {"policy": policy}})
    expected = [crdgen.definition(rules=not policy)]
    if policy:
        expected += crdgen.rules_policy()
    own = [
        manifest
        for manifest in objects
        if manifest["metadata"]["name"] == expected[0]["metadata"]["name"]
    ]
    assert [(manifest["kind"], manifest["spec"]) for manifest in own] == [
        (manifest["kind"], manifest["spec"]) for manifest in expected
    ]


@pytest.mark.parametrize(("keep", "policy"), [(True, "keep"), (False, None)])
def test_crds_keep_sets_the_resource_policy(keep, policy):
    """A CRD that stays without its rules would accept what the operator cannot run."""
    objects = render({"crds": {"keep": keep}})
    kept = {
        manifest["metadata"].get("annotations", {}).get("helm.sh/resource-policy")
        for manifest in objects
        if manifest["metadata"]["name"] == "finetunepipelines.finetune.dev"
    }
    assert kept == {policy}


def test_crds_enabled_false_renders_no_crd():
    names = {
        manifest["metadata"]["name"]
        for manifest in render({"crds": {"enabled": False}})
    }
    assert "finetunepipelines.finetune.dev" not in names


@pytest.mark.parametrize(
    "release", ["r" * 53, "r" * 52 + "0", f"{'r' * 36}-{'r' * 16}", "a.b", "x"]
)
def test_names_are_valid_for_any_release_name(release):
    objects = render(
        EVERYTHING
        | {"serviceAccount": {}, "namespaces": [], "userRoles": {"create": True}},
        release,
    )
    for manifest in objects:
        # The names of others may have dots: these contain the name and the namespace of the release.
        if (
            manifest["kind"] not in {"CustomResourceDefinition", "FlowSchema"}
            and not manifest["kind"].startswith("ValidatingAdmissionPolicy")
            and manifest["metadata"].get("namespace") != "kube-public"
        ):
            assert re.fullmatch(DNS_LABEL, manifest["metadata"]["name"]), (
                manifest["kind"],
                manifest["metadata"]["name"],
            )


def test_two_long_release_names_give_different_names():
    first, second = (
        only(render(CLUSTER_WIDE, "r" * 52 + end), "Deployment") for end in "ab"
    )
    assert first["metadata"]["name"] != second["metadata"]["name"]


def test_notes_warn_when_uninstall_deletes_pipelines():
    kept, deleted = (
        helm(
            "install",
            RELEASE,
            str(CHART),
            "--dry-run=client",
            "--set",
            f"crds.keep={keep}",
        )
        for keep in ("true", "false")
    )
    assert "deletes every FineTunePipeline" not in kept
    assert "deletes every FineTunePipeline" in deleted
    assert "in all namespaces" in kept
