"""The roles and bindings of the chart, as Helm renders them."""

import pytest
from support.operator.charts import (
    CLUSTER_WIDE,
    NAMESPACED,
    every_variant,
    grants,
    names,
    of_kind,
    parsed_options,
    pod,
    render,
)

from e2e.pipelines.chart import NAMESPACE, RELEASE

EVERY_ACCOUNT = {
    "apiGroup": "rbac.authorization.k8s.io",
    "kind": "Group",
    "name": "system:serviceaccounts",
}
FORBIDDEN_VERBS = {"*", "escalate", "bind", "impersonate"}
FORBIDDEN_RESOURCES = {
    "*",
    "secrets",
    "pods/exec",
    "pods/attach",
    "pods/portforward",
    "serviceaccounts/token",
}


def test_existing_service_account_is_used_and_bound():
    objects = render({"serviceAccount": {"create": False, "name": "robot"}})
    assert of_kind(objects, "ServiceAccount") == []
    assert pod(objects)["spec"]["serviceAccountName"] == "robot"
    subjects = [
        binding["subjects"][0]["name"]
        for binding in of_kind(objects, "RoleBinding", "ClusterRoleBinding")
    ]
    assert set(subjects) == {"robot", EVERY_ACCOUNT["name"]}


@every_variant
def test_roles_grant_no_forbidden_verb_or_resource(values):
    rights = set(grants(of_kind(render(values), "Role", "ClusterRole")))
    groups = {group for group, _, _ in rights}
    resources = {resource for _, resource, _ in rights}
    verbs = {verb for _, _, verb in rights}
    assert not groups & {"*", "rbac.authorization.k8s.io"}
    assert not resources & FORBIDDEN_RESOURCES
    assert not verbs & FORBIDDEN_VERBS
    removes_lost_pods = bool(values.get("nodeLost"))
    pod_verbs = {"list", "watch"} | ({"delete"} if removes_lost_pods else set())
    assert {verb for _, resource, verb in rights if resource == "pods"} == pod_verbs
    assert {verb for _, resource, verb in rights if resource == "nodes"} <= {
        "list",
        "watch",
    }
    subresources = [
        right for right in rights if right[1].startswith("finetunepipelines/")
    ]
    assert "create" not in {verb for _, _, verb in subresources}


@every_variant
def test_operator_can_neither_create_nor_edit_pipelines(values):
    objects = render(values)
    name = values.get("fullnameOverride", RELEASE)
    own = [
        role
        for role in of_kind(objects, "Role", "ClusterRole")
        if role["metadata"]["name"] == name
    ]
    verbs = {
        verb for _, resource, verb in grants(own) if resource == "finetunepipelines"
    }
    assert verbs == {"get", "list", "watch", "delete"}


def test_cluster_wide_release_has_one_role_for_its_lease():
    objects = render(CLUSTER_WIDE)
    assert names(objects, "ClusterRole") == {
        RELEASE,
        f"{RELEASE}-view",
        f"{RELEASE}-edit",
    }
    assert names(objects, "ClusterRoleBinding") == {RELEASE}
    scope = f"{RELEASE}.{NAMESPACE}"
    own = {f"{RELEASE}-leader", scope, f"{scope}-reader"}
    assert names(objects, "Role", "RoleBinding") == own


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
    own = {"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}
    for binding in of_kind(objects, "RoleBinding", "ClusterRoleBinding"):
        is_reader = binding["metadata"]["name"].endswith("-reader")
        assert binding["subjects"] == [EVERY_ACCOUNT if is_reader else own]
        assert binding["roleRef"]["name"] in names(objects, binding["roleRef"]["kind"])


@pytest.mark.parametrize("release", [RELEASE, "mine"])
def test_replica_may_update_only_its_own_lease(release):
    objects = render(CLUSTER_WIDE, release)
    lease = parsed_options(objects).lease_name
    updating = [
        (role["metadata"]["namespace"], rule["resourceNames"])
        for role in of_kind(objects, "Role")
        for rule in role["rules"]
        if "update" in rule["verbs"]
    ]
    assert updating == [
        ("kube-public", ["finetune-pipelines"]),
        (NAMESPACE, [lease]),
    ]


@every_variant
def test_other_accounts_may_only_read_which_release_leads(values):
    objects = render(values)
    readers = [
        role
        for role in of_kind(objects, "Role")
        if role["metadata"]["name"].endswith("-reader")
    ]
    rights = {("coordination.k8s.io", "leases", "get")}
    assert set(grants(readers)) == (set() if values.get("namespaces") else rights)
    for role in readers:
        assert role["rules"][0]["resourceNames"] == ["finetune-pipelines"]


def test_user_roles_aggregate_to_view_and_edit():
    roles = {
        role["metadata"]["name"]: role
        for role in of_kind(render(CLUSTER_WIDE), "ClusterRole")
    }
    view = roles[f"{RELEASE}-view"]
    edit = roles[f"{RELEASE}-edit"]
    assert (
        view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"]
        == "true"
    )
    assert {verb for *_, verb in grants([view])} == {"get", "list", "watch"}
    # Not finetunepipelines/status: only the operator may write the status.
    assert {resource for _, resource, _ in grants([edit])} == {
        "finetunepipelines",
        "finetunepipelines/scale",
    }
