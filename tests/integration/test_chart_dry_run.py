"""An API server accepts every object of the chart: a server-side dry run with strict field validation.

This replaces a check against published schemas (kubeconform), and is stronger. The server refuses fields that its
version does not know, and runs validation, defaulting and admission. Only objects of the Prometheus Operator are left
out, because its CRDs are not part of Kubernetes.
"""

import json
from contextlib import ExitStack

import pytest
import yaml
from support.operator.charts import (
    CLUSTER_WIDE,
    EVERYTHING,
    NAMESPACED,
    every_variant,
    is_monitoring,
    of_kind,
    only,
    pod,
    render,
)

from e2e.pipelines.chart import NAMESPACE, RELEASE
from testcluster.errors import TimedOut
from testcluster.kube import Kube
from testcluster.kube_namespace import temporary_namespace, until

ACCOUNT = f"system:serviceaccount:{NAMESPACE}:{RELEASE}"
DRY = ("--dry-run=server", "--validate=strict")


@pytest.fixture(scope="module")
def kube(control_plane):
    with ExitStack() as stack:
        for name in (NAMESPACE, "team-a", "team-b", EVERYTHING["argocd"]["namespace"]):
            stack.enter_context(temporary_namespace(control_plane.kube, name))
        yield control_plane.kube


def dry_run(kube: Kube, *objects) -> str:
    """Apply objects in a server-side dry run; raises TimedOut if the server refuses an object."""
    return kube.run(
        "apply", "--server-side", *DRY, "-f", "-", given=yaml.safe_dump_all(objects)
    )


def of_kubernetes(values):
    return [manifest for manifest in render(values) if not is_monitoring(manifest)]


@every_variant
def test_api_server_accepts_every_object(kube, values):
    objects = of_kubernetes(values)
    assert len(dry_run(kube, *objects).splitlines()) == len(objects)


def test_api_server_accepts_names_of_the_longest_release(kube):
    objects = [
        manifest
        for manifest in render(CLUSTER_WIDE, "r" * 53)
        if manifest["kind"] != "CustomResourceDefinition"
    ]
    assert len(dry_run(kube, *objects).splitlines()) == len(objects)


@pytest.mark.parametrize(
    "kind", ["Deployment", "Service", "PodDisruptionBudget", "ClusterRole"]
)
def test_dry_run_refuses_an_unknown_field(kube, kind):
    """Proves that the other dry runs of this file would notice a misspelled field."""
    broken = of_kind(render(CLUSTER_WIDE), kind)[0]
    broken.get("spec", broken)["repilcas"] = 2
    with pytest.raises(TimedOut, match="repilcas"):
        dry_run(kube, broken)


@pytest.mark.parametrize(
    "values", [CLUSTER_WIDE, EVERYTHING], ids=["cluster-wide", "everything"]
)
def test_restricted_namespace_admits_the_operator_pod(kube, values):
    objects = render(values)
    kube.apply([only(objects, "ServiceAccount")])
    manifest = {"apiVersion": "v1", "kind": "Pod", **pod(objects)}
    manifest["metadata"] = {
        **manifest["metadata"],
        "name": "replica",
        "namespace": NAMESPACE,
    }
    assert "replica" in kube.run("create", *DRY, "-f", "-", given=json.dumps(manifest))
    manifest["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = (
        True
    )
    with pytest.raises(TimedOut, match="violates PodSecurity"):
        kube.run("create", *DRY, "-f", "-", given=json.dumps(manifest))


def allowed(
    kube: Kube,
    namespace: str,
    verb: str,
    resource: str,
    *,
    group: str = "",
    name: str = "",
) -> bool:
    """Return whether RBAC allows the operator's service account a request; `resource` may be RESOURCE/SUBRESOURCE."""
    resource, _, subresource = resource.partition("/")
    attributes = {
        "namespace": namespace,
        "verb": verb,
        "group": group,
        "resource": resource,
    }
    attributes |= {"subresource": subresource, "name": name}
    spec = {"user": ACCOUNT, "resourceAttributes": attributes}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": spec,
    }
    response = json.loads(
        kube.run("create", "-f", "-", "-o", "json", given=json.dumps(review))
    )
    return bool(response["status"]["allowed"])


@pytest.fixture(scope="module")
def with_namespaced_roles(kube):
    """The API with the roles of a release for team-a and team-b."""
    kube.apply(of_kind(render(NAMESPACED), "ServiceAccount", "Role", "RoleBinding"))
    # RBAC reads the roles from a cache.
    until(
        lambda: all(
            allowed(kube, team, "get", "jobs", group="batch")
            for team in NAMESPACED["namespaces"]
        ),
        30,
    )
    return kube


@pytest.mark.parametrize("namespace", ["team-a", "team-b"])
def test_namespaced_operator_has_its_rights_in_each_namespace(
    with_namespaced_roles, namespace
):
    kube = with_namespaced_roles
    for verb in ("get", "list", "watch", "create", "delete"):
        assert allowed(kube, namespace, verb, "jobs", group="batch"), verb
    assert allowed(kube, namespace, "watch", "finetunepipelines", group="finetune.dev")
    assert allowed(
        kube, namespace, "update", "finetunepipelines/status", group="finetune.dev"
    )
    assert allowed(kube, namespace, "watch", "pods")
    assert not allowed(kube, namespace, "get", "secrets")
    assert not allowed(kube, namespace, "create", "pods")
    assert not allowed(kube, namespace, "create", "pods/exec")


def test_elsewhere_the_operator_may_only_update_its_lease(with_namespaced_roles):
    kube = with_namespaced_roles
    for namespace in ("default", NAMESPACE):
        for resource, group in (
            ("jobs", "batch"),
            ("pods", ""),
            ("finetunepipelines", "finetune.dev"),
        ):
            assert not allowed(kube, namespace, "list", resource, group=group), (
                namespace,
                resource,
            )
    leases = {"verb": "update", "resource": "leases", "group": "coordination.k8s.io"}
    assert allowed(kube, NAMESPACE, **leases, name=RELEASE)
    assert not allowed(kube, NAMESPACE, **leases, name="another-lease")
    assert not allowed(kube, "default", **leases, name=RELEASE)
