"""The chart's manifests as Helm renders them; test_chart_dry_run.py applies them to an API server."""

import re
import shutil
from collections.abc import Iterator

import pytest
import yaml
from support.charts import (
    CLUSTER_WIDE,
    DIGEST,
    EVERYTHING,
    NAMESPACED,
    RESTRICTED_CONTAINER,
    VARIANTS,
    Object,
    container,
    is_monitoring,
    of_kind,
    only,
    options,
    parsed_options,
    pod,
    render,
    render_text,
)

from e2e.pipelines.chart import CHART, NAMESPACE, RELEASE, helm
from finetune_operator import __main__ as operator
from finetune_operator.api.placement import PlacementDefaults
from finetune_operator.core.settings import Settings
from finetune_operator.crd import generate as crdgen

DNS_LABEL = r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
FORBIDDEN_VERBS = {"*", "escalate", "bind", "impersonate"}
FORBIDDEN_RESOURCES = {
    "*",
    "secrets",
    "pods/exec",
    "pods/attach",
    "pods/portforward",
    "serviceaccounts/token",
}
every_variant = pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)


def names(objects: list[Object], *kinds: str) -> set[str]:
    return {manifest["metadata"]["name"] for manifest in of_kind(objects, *kinds)}


def grants(roles: list[Object]) -> Iterator[tuple[str, str, str]]:
    for rule in (rule for role in roles for rule in role["rules"]):
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                yield from ((group, resource, verb) for verb in rule["verbs"])


# ---- the operator's pods


def test_two_replicas_have_a_disruption_budget_of_one():
    """A drain evicts one replica at a time."""
    objects = render(CLUSTER_WIDE)
    budget = only(objects, "PodDisruptionBudget")["spec"]
    assert only(objects, "Deployment")["spec"]["replicas"] == 2
    assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
    assert only(render(EVERYTHING), "PodDisruptionBudget")["spec"]["maxUnavailable"] == "50%"
    assert of_kind(render({"podDisruptionBudget": {"enabled": False}}), "PodDisruptionBudget") == []


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
    assert only(objects, "Deployment")["spec"]["selector"]["matchLabels"].items() <= labels
    assert only(objects, "Service")["spec"]["selector"].items() <= labels
    assert only(objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"].items() <= labels


@every_variant
def test_pod_is_unprivileged_and_isolated_from_its_node(values):
    objects = render(values)
    spec = pod(objects)["spec"]
    context = container(objects)["securityContext"]
    assert context == RESTRICTED_CONTAINER
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == values.get("podSecurityContext", {}).get(
        "runAsUser", 65532
    )
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
    assert parsed_options(default).settings.trainer_image == f"finetune-trainer:{version}"
    assert parsed_options(default).settings.trainer_cpu_image == f"finetune-trainer-cpu:{version}"
    assert container(custom)["image"] == f"registry.example/team/operator:1.2.3@{DIGEST}"
    assert (
        parsed_options(custom).settings.trainer_image == f"registry.example/trainer:4.5.6@{DIGEST}"
    )
    assert parsed_options(custom).settings.trainer_cpu_image == f"other.example/cpu:4.5.7@{DIGEST}"
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
    settings = parsed_options(render(CLUSTER_WIDE | {"trainer": {"image": image}})).settings
    assert settings.trainer_cpu_image == "registry.example/team/trainer-cpu:dev"


def test_port_is_the_same_in_container_service_and_probes():
    objects = render(EVERYTHING)
    assert parsed_options(objects).port == 9090
    assert container(objects)["ports"] == [{"name": "http", "containerPort": 9090}]
    assert only(objects, "Service")["spec"]["ports"] == [
        {"name": "http", "port": 9090, "targetPort": "http"}
    ]
    assert {
        container(objects)[f"{kind}Probe"]["httpGet"]["port"] for kind in ("liveness", "readiness")
    } == {"http"}


def test_user_labels_and_annotations_are_added_to_our_own():
    objects = render(EVERYTHING)
    meta = pod(objects)["metadata"]
    assert (meta["labels"]["team"], meta["labels"]["cost-center"]) == ("platform", "ml")
    assert meta["annotations"] == {"scrape": "yes"}
    assert only(objects, "ServiceAccount")["metadata"]["annotations"] == {
        "cloud.example/role": "reader"
    }
    for manifest in objects:
        if manifest["metadata"]["name"] == EVERYTHING["argocd"]["configMap"]:
            continue  # it is Argo CD's, not this release's
        labels = manifest["metadata"]["labels"]
        assert (labels["app.kubernetes.io/instance"], labels["cost-center"]) == (RELEASE, "ml"), (
            manifest["kind"]
        )


def test_version_with_build_metadata_gives_valid_labels(tmp_path):
    """Flux adds the commit to the version: `reconcileStrategy: Revision` of deploy/flux/operator.yaml."""
    copy = shutil.copytree(CHART, tmp_path / CHART.name)
    description = copy / "Chart.yaml"
    description.write_text(
        re.sub(r"(?m)^(version: .*)", r"\1+0123456789ab", description.read_text())
    )
    text = helm("template", RELEASE, str(copy), "--values", "-", given=yaml.safe_dump(EVERYTHING))
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
    for text in render_text({"commonLabels": {"team": "common"}, "metrics": metrics}).split(
        "\n---\n"
    ):
        manifest = yaml.safe_load(text)
        if manifest["kind"] == "ConfigMap" or is_monitoring(manifest):
            assert re.findall(r"^    team: .*", text, re.MULTILINE) == ["    team: own"], text


@pytest.mark.parametrize("word", ["123", "on", "null"])
def test_name_that_yaml_takes_for_another_type_stays_text(word):
    values = {"namespaces": [word], "serviceAccount": {"name": word}, "priorityClassName": word}
    values["networkPolicy"] = {"stages": {"egress": [{}]}}
    objects = render(
        {**EVERYTHING, **values, "argocd": {"customizations": True, "namespace": word}}, word, word
    )
    assert {manifest["metadata"].get("namespace", word) for manifest in objects} == {word}
    assert {pod(objects)["spec"][name] for name in ("serviceAccountName", "priorityClassName")} == {
        word
    }
    assert pod(objects)["metadata"]["labels"]["app.kubernetes.io/instance"] == word
    assert only(objects, "ServiceAccount")["metadata"]["name"] == word


def test_argo_cds_config_map_gets_only_the_customizations():
    objects = render(EVERYTHING)
    [config_map] = [
        manifest
        for manifest in of_kind(objects, "ConfigMap")
        if manifest["metadata"]["name"] == "gitops-cm"
    ]
    patch = yaml.safe_load((CHART.parents[1] / "deploy" / "argocd" / "argocd-cm.yaml").read_text())
    assert config_map["data"] == patch["data"]
    assert (config_map["metadata"]["namespace"], config_map["metadata"].get("labels")) == (
        "gitops",
        None,
    )
    options = config_map["metadata"]["annotations"]["argocd.argoproj.io/sync-options"].split(",")
    assert set(options) == {"ServerSideApply=true", "Prune=false", "Delete=false"}


def test_all_objects_have_the_given_name():
    objects = render(EVERYTHING)
    assert names(
        objects, "Deployment", "PodDisruptionBudget", "ServiceMonitor", "PrometheusRule"
    ) == {"tuner"}
    assert names(objects, "NetworkPolicy") == {"tuner", "tuner-stages", "tuner-to-stages"}
    assert only(objects, "Service")["metadata"]["name"] == "tuner-metrics"
    assert parsed_options(objects).lease_name == "tuner"
    assert not [
        manifest for manifest in objects if manifest["metadata"]["name"].startswith(RELEASE)
    ]


def test_existing_service_account_is_used_and_bound():
    objects = render({"serviceAccount": {"create": False, "name": "robot"}})
    assert of_kind(objects, "ServiceAccount") == []
    assert pod(objects)["spec"]["serviceAccountName"] == "robot"
    subjects = [
        binding["subjects"][0]["name"]
        for binding in of_kind(objects, "RoleBinding", "ClusterRoleBinding")
    ]
    assert set(subjects) == {"robot"}


def test_more_options_and_variables_reach_the_process():
    objects = render(EVERYTHING)
    assert parsed_options(objects).lease_namespace == "leases"
    variables = {variable["name"]: variable.get("value") for variable in container(objects)["env"]}
    assert variables == {
        "POD_NAME": None,
        "POD_NAMESPACE": None,
        "HTTPS_PROXY": "http://proxy.example:3128",
    }


# ---- arguments of the operator


def test_default_placement_equals_the_operators_default():
    assert parsed_options(render(CLUSTER_WIDE)).settings.placement_defaults == PlacementDefaults()


@pytest.mark.parametrize(
    "label",
    ["on-demand", 'a "quoted" word', "it's", "a\\b: {c} # d", "<&>", "é…", "{{ no }}", "%s"],
)
def test_placement_is_passed_unchanged(label):
    """Quoting in the template keeps every character of a label's value."""
    placement = {
        "onDemand": {"nodeSelector": {"kind": label}},
        "spot": {"tolerations": [{"key": "cheap", "value": label}]},
    }
    defaults = parsed_options(render({"placement": placement})).settings.placement_defaults
    assert defaults.on_demand.node_selector == {"kind": label}
    assert defaults.spot.tolerations[0].value == label


def test_grace_period_and_namespaces_are_passed():
    options = parsed_options(render(EVERYTHING))
    assert options.settings.grace_period.total_seconds() == 90
    assert options.namespaces == ("team-a", "team-b")
    assert parsed_options(render(CLUSTER_WIDE)).namespaces == ()


def test_notices_are_passed_and_decide_the_right_on_nodes():
    default = render(CLUSTER_WIDE)
    custom = render({"interruptionNotices": {"metadata": "GCE", "nodes": False}})
    assert (parsed_options(default).metadata_notices, parsed_options(default).node_notices) == (
        "",
        True,
    )
    assert (parsed_options(custom).metadata_notices, parsed_options(custom).node_notices) == (
        "GCE",
        False,
    )
    assert {grant for grant in grants(of_kind(default, "ClusterRole")) if grant[1] == "nodes"} == {
        ("", "nodes", "list"),
        ("", "nodes", "watch"),
    }
    for without in (custom, render(NAMESPACED)):
        assert not [
            grant
            for grant in grants(of_kind(without, "Role", "ClusterRole"))
            if grant[1] == "nodes"
        ]


def test_address_of_troubleshooting_is_passed():
    default, custom = (
        parsed_options(render(values)).settings for values in (CLUSTER_WIDE, EVERYTHING)
    )
    assert default.troubleshooting_url == Settings.troubleshooting_url
    assert custom.troubleshooting_url == "https://wiki.example/troubleshooting"


def test_limits_and_logging_are_passed_as_options():
    default = options(render(CLUSTER_WIDE))
    custom = options(render(EVERYTHING))
    names = ("job-history", "workers", "qps", "burst", "log-level", "log-format")
    assert [default[name] for name in names] == ["2", "20", "500", "1000", "info", "json"]
    assert [custom[name] for name in names] == ["7", "15", "50.5", "70", "debug", "text"]


def test_largest_rate_limit_is_written_without_exponent():
    """Helm reads numbers as floating point, and prints large numbers with an exponent."""
    large = options(render({"apiRateLimit": {"qps": 100_000, "burst": 100_000}}))
    assert (large["qps"], large["burst"]) == ("100000", "100000")


@every_variant
def test_operator_knows_every_argument_of_the_chart(values):
    chosen = operator._parser().parse_args(container(render(values))["args"])
    assert chosen.job_history >= 1


# ---- RBAC


@every_variant
def test_roles_grant_no_forbidden_verb_or_resource(values):
    rules = set(grants(of_kind(render(values), "Role", "ClusterRole")))
    assert not {group for group, _, _ in rules} & {"*", "rbac.authorization.k8s.io"}
    assert not {resource for _, resource, _ in rules} & FORBIDDEN_RESOURCES
    assert not {verb for _, _, verb in rules} & FORBIDDEN_VERBS
    assert {verb for _, resource, verb in rules if resource == "pods"} == {"list", "watch"}
    assert {verb for _, resource, verb in rules if resource == "nodes"} <= {"list", "watch"}
    assert "create" not in {
        verb for _, resource, verb in rules if resource.startswith("finetunepipelines/")
    }


@every_variant
def test_operator_can_neither_create_nor_edit_pipelines(values):
    objects = render(values)
    name = values.get("fullnameOverride", RELEASE)
    own = [
        role for role in of_kind(objects, "Role", "ClusterRole") if role["metadata"]["name"] == name
    ]
    verbs = {verb for _, resource, verb in grants(own) if resource == "finetunepipelines"}
    assert verbs == {"get", "list", "watch", "delete"}


def test_cluster_wide_release_has_one_role_for_its_lease():
    objects = render(CLUSTER_WIDE)
    assert names(objects, "ClusterRole") == {RELEASE, f"{RELEASE}-view", f"{RELEASE}-edit"}
    assert names(objects, "ClusterRoleBinding") == {RELEASE}
    assert names(objects, "Role", "RoleBinding") == {f"{RELEASE}-leader"}


def test_namespaced_release_has_a_role_in_each_namespace():
    """There are no ClusterRoles then."""
    objects = render(NAMESPACED)
    assert of_kind(objects, "ClusterRole", "ClusterRoleBinding") == []
    for kind in ("Role", "RoleBinding"):
        names_in_namespaces = {
            (manifest["metadata"]["namespace"], manifest["metadata"]["name"])
            for manifest in of_kind(objects, kind)
        }
        assert names_in_namespaces == {
            ("team-a", RELEASE),
            ("team-b", RELEASE),
            (NAMESPACE, f"{RELEASE}-leader"),
        }


@every_variant
def test_bindings_name_the_service_account_and_existing_roles(values):
    objects = render(values)
    account = pod(objects)["spec"]["serviceAccountName"]
    assert names(objects, "ServiceAccount") == {account}
    for binding in of_kind(objects, "RoleBinding", "ClusterRoleBinding"):
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}
        ]
        assert binding["roleRef"]["name"] in names(objects, binding["roleRef"]["kind"])


@pytest.mark.parametrize("release", [RELEASE, "mine"])
def test_replica_may_update_only_its_own_lease(release):
    objects = render(CLUSTER_WIDE, release)
    (role,) = of_kind(objects, "Role")
    lease = parsed_options(objects).lease_name
    updating = [rule for rule in role["rules"] if "update" in rule["verbs"]]
    assert [rule["resourceNames"] for rule in updating] == [[lease]]
    assert role["metadata"]["namespace"] == NAMESPACE


def test_user_roles_aggregate_to_view_and_edit():
    roles = {
        role["metadata"]["name"]: role for role in of_kind(render(CLUSTER_WIDE), "ClusterRole")
    }
    view = roles[f"{RELEASE}-view"]
    edit = roles[f"{RELEASE}-edit"]
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert {verb for *_, verb in grants([view])} == {"get", "list", "watch"}
    # Not finetunepipelines/status: only the operator may write the status.
    assert {resource for _, resource, _ in grants([edit])} == {"finetunepipelines"}


# ---- the CRD, names, notes


def test_chart_crd_equals_the_generated_crd():
    rendered_crd = only(render(CLUSTER_WIDE), "CustomResourceDefinition")
    generated_crd = yaml.safe_load(crdgen.FILE.read_text())
    assert rendered_crd["spec"] == generated_crd["spec"]
    assert rendered_crd["metadata"]["name"] == generated_crd["metadata"]["name"]


@pytest.mark.parametrize(("keep", "policy"), [(True, "keep"), (False, None)])
def test_crds_keep_sets_the_resource_policy(keep, policy):
    crd = only(render({"crds": {"keep": keep}}), "CustomResourceDefinition")
    assert crd["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == policy


def test_crds_enabled_false_renders_no_crd():
    assert of_kind(render({"crds": {"enabled": False}}), "CustomResourceDefinition") == []


@pytest.mark.parametrize(
    "release", ["r" * 53, "r" * 52 + "0", f"{'r' * 36}-{'r' * 16}", "a.b", "x"]
)
def test_names_are_valid_for_any_release_name(release):
    objects = render(
        EVERYTHING | {"serviceAccount": {}, "namespaces": [], "userRoles": {"create": True}},
        release,
    )
    for manifest in objects:
        if manifest["kind"] != "CustomResourceDefinition" and not manifest["kind"].startswith(
            "ValidatingAdmissionPolicy"
        ):
            assert re.fullmatch(DNS_LABEL, manifest["metadata"]["name"]), (
                manifest["kind"],
                manifest["metadata"]["name"],
            )


def test_two_long_release_names_give_different_names():
    first, second = (only(render(CLUSTER_WIDE, "r" * 52 + end), "Deployment") for end in "ab")
    assert first["metadata"]["name"] != second["metadata"]["name"]


def test_notes_warn_when_uninstall_deletes_pipelines():
    kept, deleted = (
        helm("install", RELEASE, str(CHART), "--dry-run=client", "--set", f"crds.keep={keep}")
        for keep in ("true", "false")
    )
    assert "deletes every FineTunePipeline" not in kept
    assert "deletes every FineTunePipeline" in deleted
    assert "in all namespaces" in kept
