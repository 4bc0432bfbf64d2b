"""The chart's manifests, rendered by Helm and read; test_chart_is_taken.py asks a live API server about them."""

import copy
import re
from collections.abc import Iterator

import pytest
import yaml
from support.charts import (
    CLUSTER_WIDE,
    EVERYTHING,
    NAMESPACED,
    VARIANTS,
    Object,
    container,
    of,
    pod,
    rendered,
    text,
    the,
)

from e2e.pipelines.chart import CHART, NAMESPACE, RELEASE, helm
from finetune_operator import __main__ as operator
from finetune_operator.api.placement import PlacementDefaults
from finetune_operator.crd import generate as crdgen
from testcluster.errors import TimedOut

DNS_LABEL = r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
FORBIDDEN_VERBS = {"*", "escalate", "bind", "impersonate"}
FORBIDDEN_RESOURCES = {"*", "secrets", "pods/exec", "pods/attach", "pods/portforward", "serviceaccounts/token", "nodes"}
every_variant = pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)


def names(objects: list[Object], *kinds: str) -> set[str]:
    return {one["metadata"]["name"] for one in of(objects, *kinds)}


def granted(roles: list[Object]) -> Iterator[tuple[str, str, str]]:
    for rule in (rule for role in roles for rule in role["rules"]):
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                yield from ((group, resource, verb) for verb in rule["verbs"])


def understood(objects: list[Object]):
    """What the operator's own process makes of the arguments that the chart gives it."""
    return operator._options(container(objects)["args"])


def leaves(values: Object, *path: str) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, *path, key)
        else:
            yield (*path, key)


def at(values: Object, path: tuple[str, ...]) -> object:
    for key in path:
        values = values[key]
    return values


DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
LEAVES = list(leaves(DEFAULTS))


# ---- values


@every_variant
def test_helm_has_no_complaints(values):
    said = helm("lint", "--strict", str(CHART), "--values", "-", given=yaml.safe_dump(values))
    assert "0 chart(s) failed" in said
    assert "[WARNING]" not in said


def test_what_these_tests_call_everything_is_everything():
    alike = {path for path in LEAVES if at(EVERYTHING, path) == at(DEFAULTS, path)}
    assert alike == {("crds", "enabled")}


@pytest.mark.parametrize("path", [path for path in LEAVES if path != ("crds", "enabled")], ids=".".join)
def test_no_value_is_accepted_and_ignored(path):
    values = copy.deepcopy(EVERYTHING)
    *parents, last = path
    at(values, tuple(parents))[last] = at(DEFAULTS, path)
    assert text(values) != text(EVERYTHING)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"replica": 2}, "'replica' not allowed"),
        ({"replicas": "two"}, "/replicas': got string, want integer"),
        ({"replicas": 0}, "/replicas'.*minimum"),
        ({"image": {"tga": "1"}}, "/image': .*'tga' not allowed"),
        ({"image": {"tag": 1.2}}, "/image/tag': got number, want string"),
        ({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy'.*'IfNotPresent'"),
        ({"imagePullSecrets": ["pull"]}, "/imagePullSecrets/0': got string, want object"),
        ({"namespaces": "team-a"}, "/namespaces': got string, want array"),
        ({"namespaces": ["Team A"]}, "/namespaces/0'.*'Team A'"),
        ({"placement": {"cheap": {}}}, "/placement': .*'cheap' not allowed"),
        ({"placement": {"pools": {"gpu": {}}}}, "/placement/pools': .*'gpu' not allowed"),
        ({"placement": {"spot": {"nodeSelector": {"spot": True}}}}, "/placement/spot/nodeSelector/spot': got boolean"),
        ({"placement": {"spot": {"tolerations": [{"operator": "Exists"}]}}}, "tolerations/0': missing property 'key'"),
        ({"graceSeconds": 5}, "/graceSeconds'.*minimum"),
        ({"crds": {"enabled": "no"}}, "/crds/enabled': got string, want boolean"),
        ({"serviceAccount": {"create": True}}, "/serviceAccount': .*'create' not allowed"),
        ({"serviceAccount": {"annotations": {"a": 1}}}, "/serviceAccount/annotations/a': got number"),
        ({"metrics": {"port": 80}}, "/metrics/port'.*minimum"),
        ({"metrics": {"serviceMonitor": {"enable": True}}}, "/metrics/serviceMonitor': .*'enable' not allowed"),
        ({"resources": {"limit": {}}}, "/resources': .*'limit' not allowed"),
        ({"nodeSelector": {"gpu": 1}}, "/nodeSelector/gpu': got number, want string"),
        ({"podAnnotations": {"scrape": True}}, "/podAnnotations/scrape': got boolean, want string"),
        ({"podLabels": {"app.kubernetes.io/name": "mine"}}, "/podLabels/app.kubernetes.io~1name'"),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_right_is_refused_by_its_name(values, words):
    with pytest.raises(TimedOut, match=words):
        rendered(values)


def test_a_value_may_be_taken_back_to_nothing():
    gone = {"namespaces": None, "priorityClassName": None, "placement": {"spot": None}, "imagePullSecrets": None}
    assert understood(rendered(gone)).namespaces == ()


# ---- the operator's pods


def test_there_are_two_replicas_and_a_drain_takes_one_at_a_time():
    objects = rendered(CLUSTER_WIDE)
    budget = the(objects, "PodDisruptionBudget")["spec"]
    assert the(objects, "Deployment")["spec"]["replicas"] == 2
    assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")


def test_one_replica_alone_never_holds_up_a_drain():
    objects = rendered({"replicas": 1})
    assert the(objects, "Deployment")["spec"]["replicas"] == 1
    assert of(objects, "PodDisruptionBudget") == []


def test_replicas_would_rather_not_share_a_node_unless_the_user_has_other_plans():
    wish = pod(rendered(CLUSTER_WIDE))["spec"]["affinity"]["podAntiAffinity"]
    (term,) = wish["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    assert pod(rendered(EVERYTHING))["spec"]["affinity"] == EVERYTHING["affinity"]


@every_variant
def test_whoever_selects_the_operators_pods_finds_them(values):
    objects = rendered(values)
    labels = pod(objects)["metadata"]["labels"].items()
    assert the(objects, "Deployment")["spec"]["selector"]["matchLabels"].items() <= labels
    assert the(objects, "Service")["spec"]["selector"].items() <= labels
    assert the(objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"].items() <= labels


@every_variant
def test_the_pod_can_do_nothing_to_its_node(values):
    objects = rendered(values)
    spec, inside = pod(objects)["spec"], container(objects)["securityContext"]
    assert inside == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == 65532
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not [key for key in spec if key.startswith("host")]
    assert [set(volume) for volume in spec["volumes"]] == [{"name", "emptyDir"}]


def test_images_are_the_charts_own_version_unless_a_tag_is_given():
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    plain, mine = rendered(CLUSTER_WIDE), rendered(EVERYTHING)
    assert container(plain)["image"] == f"finetune-operator:{version}"
    assert understood(plain).settings.trainer_image == f"finetune-trainer:{version}"
    assert container(mine)["image"] == "registry.example/operator:1.2.3"
    assert understood(mine).settings.trainer_image == "registry.example/trainer:4.5.6"
    assert pod(mine)["spec"]["imagePullSecrets"] == [{"name": "pull"}]


def test_the_port_is_one_port_everywhere():
    objects = rendered(EVERYTHING)
    assert understood(objects).port == 9090
    assert container(objects)["ports"] == [{"name": "http", "containerPort": 9090}]
    assert the(objects, "Service")["spec"]["ports"] == [{"name": "http", "port": 9090, "targetPort": "http"}]
    assert {container(objects)[f"{kind}Probe"]["httpGet"]["port"] for kind in ("liveness", "readiness")} == {"http"}


def test_labels_and_annotations_of_the_user_are_beside_our_own():
    objects = rendered(EVERYTHING)
    meta = pod(objects)["metadata"]
    assert meta["labels"]["team"] == "platform"
    assert meta["annotations"] == {"scrape": "yes"}
    assert the(objects, "ServiceAccount")["metadata"]["annotations"] == {"cloud.example/role": "reader"}
    for one in objects:
        assert one["metadata"]["labels"]["app.kubernetes.io/instance"] == RELEASE, one["kind"]


# ---- what the operator is told


def test_without_a_word_from_the_user_the_chart_and_the_operator_mean_the_same_by_spot():
    assert understood(rendered(CLUSTER_WIDE)).settings.placement_defaults == PlacementDefaults()


@pytest.mark.parametrize(
    "word", ["on-demand", 'a "quoted" word', "it's", "a\\b: {c} # d", "<&>", "é…", "{{ no }}", "%s"]
)
def test_placement_reaches_the_operator_unharmed(word):
    wish = {"onDemand": {"nodeSelector": {"kind": word}}, "spot": {"tolerations": [{"key": "cheap", "value": word}]}}
    preset = understood(rendered({"placement": wish})).settings.placement_defaults
    assert preset.on_demand.node_selector == {"kind": word}
    assert preset.spot.tolerations[0].value == word


def test_grace_and_namespaces_reach_the_operator():
    options = understood(rendered(EVERYTHING))
    assert options.settings.grace_period.total_seconds() == 90
    assert options.namespaces == ("team-a", "team-b")
    assert understood(rendered(CLUSTER_WIDE)).namespaces == ()


# ---- rights


@every_variant
def test_nobody_gets_more_than_the_work_needs(values):
    rights = set(granted(of(rendered(values), "Role", "ClusterRole")))
    assert not {group for group, _, _ in rights} & {"*", "rbac.authorization.k8s.io"}
    assert not {resource for _, resource, _ in rights} & FORBIDDEN_RESOURCES
    assert not {verb for _, _, verb in rights} & FORBIDDEN_VERBS
    assert {verb for _, resource, verb in rights if resource == "pods"} == {"list", "watch"}
    assert "create" not in {verb for _, resource, verb in rights if resource.startswith("finetunepipelines/")}


@every_variant
def test_the_operator_itself_can_neither_make_nor_edit_pipelines(values):
    objects = rendered(values)
    own = [role for role in of(objects, "Role", "ClusterRole") if role["metadata"]["name"] == RELEASE]
    verbs = {verb for _, resource, verb in granted(own) if resource == "finetunepipelines"}
    assert verbs == {"get", "list", "watch", "delete"}


def test_cluster_wide_means_one_cluster_role_and_no_role_but_the_leases():
    objects = rendered(CLUSTER_WIDE)
    assert names(objects, "ClusterRole") == {RELEASE, f"{RELEASE}-view", f"{RELEASE}-edit"}
    assert names(objects, "ClusterRoleBinding") == {RELEASE}
    assert names(objects, "Role", "RoleBinding") == {f"{RELEASE}-leader"}


def test_in_some_namespaces_only_there_is_a_role_in_each_and_none_for_the_cluster():
    objects = rendered(NAMESPACED)
    assert of(objects, "ClusterRole", "ClusterRoleBinding") == []
    for kind in ("Role", "RoleBinding"):
        there = {(one["metadata"]["namespace"], one["metadata"]["name"]) for one in of(objects, kind)}
        assert there == {("team-a", RELEASE), ("team-b", RELEASE), (NAMESPACE, f"{RELEASE}-leader")}


@every_variant
def test_every_binding_is_for_the_pods_own_account_and_a_role_that_is_there(values):
    objects = rendered(values)
    account = pod(objects)["spec"]["serviceAccountName"]
    assert names(objects, "ServiceAccount") == {account}
    for binding in of(objects, "RoleBinding", "ClusterRoleBinding"):
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}]
        assert binding["roleRef"]["name"] in names(objects, binding["roleRef"]["kind"])


@pytest.mark.parametrize("release", [RELEASE, "mine"])
def test_a_replica_may_renew_the_lease_it_looks_for_and_no_other(release):
    objects = rendered(CLUSTER_WIDE, release)
    (role,) = of(objects, "Role")
    lease = understood(objects).lease_name
    renewing = [rule for rule in role["rules"] if "update" in rule["verbs"]]
    assert [rule["resourceNames"] for rule in renewing] == [[lease]]
    assert role["metadata"]["namespace"] == NAMESPACE


def test_people_who_may_view_or_edit_may_do_so_with_pipelines():
    roles = {role["metadata"]["name"]: role for role in of(rendered(CLUSTER_WIDE), "ClusterRole")}
    view, edit = roles[f"{RELEASE}-view"], roles[f"{RELEASE}-edit"]
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert {verb for *_, verb in granted([view])} == {"get", "list", "watch"}
    assert {resource for _, resource, _ in granted([edit])} == {"finetunepipelines"}  # status is the operator's


# ---- the definition, the monitor, names


def test_the_definition_is_the_one_that_the_models_make():
    mine, plain = the(rendered(CLUSTER_WIDE), "CustomResourceDefinition"), yaml.safe_load(crdgen.FILE.read_text())
    assert mine["spec"] == plain["spec"]
    assert mine["metadata"]["name"] == plain["metadata"]["name"]


@pytest.mark.parametrize(("keep", "policy"), [(True, "keep"), (False, None)])
def test_pipelines_outlive_the_chart_unless_the_user_says_otherwise(keep, policy):
    definition = the(rendered({"crds": {"keep": keep}}), "CustomResourceDefinition")
    assert definition["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == policy


def test_somebody_else_may_look_after_the_definition():
    assert of(rendered({"crds": {"enabled": False}}), "CustomResourceDefinition") == []


def test_a_monitor_is_there_when_it_is_asked_for():
    assert of(rendered(CLUSTER_WIDE), "ServiceMonitor") == []
    objects = rendered(EVERYTHING)
    monitor = the(objects, "ServiceMonitor")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert monitor["metadata"]["labels"]["watched-by"] == "prometheus"
    assert monitor["spec"]["endpoints"] == [{"port": "http", "interval": "5s"}]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= the(objects, "Service")["metadata"]["labels"].items()


@pytest.mark.parametrize("release", ["r" * 53, "r" * 52 + "0", f"{'r' * 36}-{'r' * 16}", "a.b", "x"])
def test_every_name_fits_however_long_the_release_is_called(release):
    objects = rendered(EVERYTHING | {"serviceAccount": {}, "namespaces": [], "userRoles": {"create": True}}, release)
    for one in objects:
        if one["kind"] != "CustomResourceDefinition":
            assert re.fullmatch(DNS_LABEL, one["metadata"]["name"]), (one["kind"], one["metadata"]["name"])


def test_two_long_releases_have_two_names():
    one, other = (the(rendered(CLUSTER_WIDE, "r" * 52 + end), "Deployment") for end in "ab")
    assert one["metadata"]["name"] != other["metadata"]["name"]


def test_the_notes_say_what_uninstalling_would_delete():
    said = [
        helm("install", RELEASE, str(CHART), "--dry-run=client", "--set", f"crds.keep={keep}")
        for keep in ("true", "false")
    ]
    assert "deletes every FineTunePipeline" not in said[0]
    assert "deletes every FineTunePipeline" in said[1]
    assert "in all namespaces" in said[0]
