"""A live API server takes every object of the chart: a server-side dry run with strict field validation.

It stands for a check of the manifests against published schemas (kubeconform), and is stronger: the server knows every
field of its own version, refuses those that it does not know, and runs validation, defaulting and admission. Only a
ServiceMonitor is left out, whose definition is not Kubernetes' own.
"""

import json
from contextlib import ExitStack

import pytest
import yaml
from support.charts import CLUSTER_WIDE, EVERYTHING, NAMESPACED, VARIANTS, of, pod, rendered, the

from e2e.pipelines.chart import NAMESPACE, RELEASE
from testcluster.errors import TimedOut
from testcluster.kube import Kube
from testcluster.kube_namespace import temporary_namespace

ACCOUNT = f"system:serviceaccount:{NAMESPACE}:{RELEASE}"
DRY = ("--dry-run=server", "--validate=strict")


@pytest.fixture(scope="module")
def kube(control_plane):
    with ExitStack() as stack:
        for name in (NAMESPACE, "team-a", "team-b"):
            stack.enter_context(temporary_namespace(control_plane.kube, name))
        yield control_plane.kube


def would_be_taken(kube: Kube, *objects) -> str:
    return kube.run("apply", "--server-side", *DRY, "-f", "-", given=yaml.safe_dump_all(objects))


def known(values):
    return [one for one in rendered(values) if one["kind"] != "ServiceMonitor"]


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_every_object_is_taken(kube, values):
    objects = known(values)
    assert len(would_be_taken(kube, *objects).splitlines()) == len(objects)


def test_names_of_the_longest_release_are_taken(kube):
    objects = [one for one in rendered(CLUSTER_WIDE, "r" * 53) if one["kind"] != "CustomResourceDefinition"]
    assert len(would_be_taken(kube, *objects).splitlines()) == len(objects)


@pytest.mark.parametrize("kind", ["Deployment", "Service", "PodDisruptionBudget", "ClusterRole"])
def test_a_field_that_there_is_not_would_have_been_noticed(kube, kind):
    broken = of(rendered(CLUSTER_WIDE), kind)[0]
    broken.get("spec", broken)["repilcas"] = 2
    with pytest.raises(TimedOut, match="repilcas"):
        would_be_taken(kube, broken)


@pytest.mark.parametrize("values", [CLUSTER_WIDE, EVERYTHING], ids=["cluster-wide", "everything"])
def test_the_operators_pod_is_admitted_where_pod_security_is_restricted(kube, values):
    objects = rendered(values)
    kube.apply([the(objects, "ServiceAccount")])
    manifest = {"apiVersion": "v1", "kind": "Pod", **pod(objects)}
    manifest["metadata"] = {**manifest["metadata"], "name": "replica", "namespace": NAMESPACE}
    assert "replica" in kube.run("create", *DRY, "-f", "-", given=json.dumps(manifest))
    manifest["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    with pytest.raises(TimedOut, match="violates PodSecurity"):
        kube.run("create", *DRY, "-f", "-", given=json.dumps(manifest))


def allowed(kube: Kube, place: str, verb: str, resource: str, *, group: str = "", name: str = "") -> bool:
    """Ask the server what the operator's account may do."""
    resource, _, part = resource.partition("/")
    wish = {"namespace": place, "verb": verb, "group": group, "resource": resource, "subresource": part, "name": name}
    spec = {"user": ACCOUNT, "resourceAttributes": wish}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
    told = json.loads(kube.run("create", "-f", "-", "-o", "json", given=json.dumps(review)))
    return bool(told["status"]["allowed"])


@pytest.fixture(scope="module")
def in_two_namespaces(kube):
    kube.apply(of(rendered(NAMESPACED), "ServiceAccount", "Role", "RoleBinding"))
    return kube


@pytest.mark.parametrize("place", ["team-a", "team-b"])
def test_in_its_namespaces_the_operator_may_do_its_work(in_two_namespaces, place):
    ask = in_two_namespaces
    for verb in ("get", "list", "watch", "create", "delete"):
        assert allowed(ask, place, verb, "jobs", group="batch"), verb
    assert allowed(ask, place, "watch", "finetunepipelines", group="finetune.dev")
    assert allowed(ask, place, "update", "finetunepipelines/status", group="finetune.dev")
    assert allowed(ask, place, "watch", "pods")
    assert not allowed(ask, place, "get", "secrets")
    assert not allowed(ask, place, "create", "pods")
    assert not allowed(ask, place, "create", "pods/exec")


def test_elsewhere_it_may_do_nothing_but_keep_its_lease(in_two_namespaces):
    for place in ("default", NAMESPACE):
        for resource, group in (("jobs", "batch"), ("pods", ""), ("finetunepipelines", "finetune.dev")):
            assert not allowed(in_two_namespaces, place, "list", resource, group=group), (place, resource)
    leases = {"verb": "update", "resource": "leases", "group": "coordination.k8s.io"}
    assert allowed(in_two_namespaces, NAMESPACE, **leases, name=RELEASE)
    assert not allowed(in_two_namespaces, NAMESPACE, **leases, name="somebody-elses")
    assert not allowed(in_two_namespaces, "default", **leases, name=RELEASE)
