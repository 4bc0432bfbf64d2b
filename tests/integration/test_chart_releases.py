"""Releases of the chart on an API server: install, upgrade, uninstall, reinstall. KWOK simulates the pods."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from e2e.pipelines.chart import RELEASE, Operator
from testcluster.errors import TimedOut
from testcluster.fixtures import namespace_name
from testcluster.kube import Kube
from testcluster.kube_namespace import KubeNamespace, temporary_namespace, until
from testcluster.provider import Provider

CRD = "finetunepipelines.finetune.dev"
ROOT = Path(__file__).parents[2]
ON_KWOK_NODES = (
    "tolerations[0].key=kwok.x-k8s.io/node",
    "tolerations[0].operator=Exists",
)


def remove_all(operator: Operator) -> None:
    """Uninstall the release and delete the CRD."""
    operator.helm(
        "uninstall", operator.release, "--ignore-not-found", "--wait", "--timeout", "1m"
    )
    operator.kube.run(
        "delete", "crd", CRD, "--ignore-not-found", "--timeout=60s", timeout=70
    )


@pytest.fixture
def operator(control_plane: Provider) -> Iterator[Operator]:
    """A release that is not installed yet; the cluster has no CRD before the test, and none after it."""
    not_installed = Operator(control_plane.kube, namespace="finetune-installed")
    remove_all(not_installed)
    yield not_installed
    remove_all(not_installed)


@pytest.fixture
def release(operator: Operator) -> Operator:
    """An installed release."""
    operator.install(*ON_KWOK_NODES)
    return operator


@pytest.fixture
def team(
    control_plane: Provider, request: pytest.FixtureRequest
) -> Iterator[KubeNamespace]:
    """A team's namespace."""
    with temporary_namespace(
        control_plane.kube, namespace_name(request.node.name)
    ) as created:
        yield created


def crd_uid(kube: Kube) -> str:
    """Return the uid of the CRD; empty if there is none."""
    return kube.run(
        "get", "crd", CRD, "--ignore-not-found", "-o", "jsonpath={.metadata.uid}"
    )


def create_pipeline(namespace: KubeNamespace) -> str:
    """Create the demo's pipeline and return its uid."""
    until(
        lambda: (
            "finetunepipelines"
            in namespace.run("api-resources", "--api-group=finetune.dev")
        ),
        30,
    )
    manifest = yaml.safe_load(
        (ROOT / "examples" / "demo" / "pipeline.yaml").read_text()
    )
    answer = namespace.run(
        "create", "-f", "-", "-o", "json", given=json.dumps(manifest)
    )
    return json.loads(answer)["metadata"]["uid"]


def roles(operator: Operator) -> set[tuple[str, str, str]]:
    """Return the roles and bindings of the release: kind, namespace, name."""
    kinds = "roles,rolebindings,clusterroles,clusterrolebindings"
    selector = "app.kubernetes.io/name=finetune-operator"
    manifests = operator.kube.json("get", kinds, "--all-namespaces", "-l", selector)[
        "items"
    ]
    return {
        (
            manifest["kind"],
            manifest["metadata"].get("namespace", ""),
            manifest["metadata"]["name"],
        )
        for manifest in manifests
    }


def test_upgrade_replaces_both_replicas(release: Operator):
    before = set(release.pods())
    assert len(before) == 2
    release.install(*ON_KWOK_NODES, "podAnnotations.release=next")
    until(lambda: len(release.pods()) == 2 and before.isdisjoint(release.pods()), 60)


def test_reinstall_adopts_existing_crd_and_pipelines(
    release: Operator, team: KubeNamespace
):
    crd = crd_uid(release.kube)
    uid = create_pipeline(team)
    release.uninstall()
    assert release.pods() == [] or until(lambda: not release.pods(), 30)
    assert crd_uid(release.kube) == crd
    assert team.get("ft", "docstrings")["metadata"]["uid"] == uid
    release.install(*ON_KWOK_NODES)
    assert crd_uid(release.kube) == crd
    assert team.get("ft", "docstrings")["metadata"]["uid"] == uid


def test_disabling_crds_keeps_crd_and_pipelines(release: Operator, team: KubeNamespace):
    crd = crd_uid(release.kube)
    uid = create_pipeline(team)
    release.install(*ON_KWOK_NODES, "crds.enabled=false")
    assert crd_uid(release.kube) == crd
    assert team.get("ft", "docstrings")["metadata"]["uid"] == uid


def test_uninstall_deletes_crd_when_keep_is_false(release: Operator):
    release.install(*ON_KWOK_NODES, "crds.keep=false")
    release.uninstall()
    until(lambda: not crd_uid(release.kube), 60)


def test_install_refuses_a_crd_that_helm_does_not_own(operator: Operator):
    """The error names the CRD; with `crds.enabled=false` the release installs beside it."""
    operator.kube.apply((ROOT / "crds" / "finetunepipelines.yaml").read_text())
    with pytest.raises(TimedOut, match=CRD):
        operator.install(*ON_KWOK_NODES)
    operator.install(*ON_KWOK_NODES, "crds.enabled=false")
    assert len(operator.pods()) == 2


def test_roles_follow_a_change_of_namespaces(release: Operator, team: KubeNamespace):
    leader = {
        (kind, release.namespace, f"{RELEASE}-leader")
        for kind in ("Role", "RoleBinding")
    }
    users = {("ClusterRole", "", f"{RELEASE}-{suffix}") for suffix in ("view", "edit")}
    scope = f"{RELEASE}.{release.namespace}"
    cluster_wide = {("ClusterRole", "", RELEASE), ("ClusterRoleBinding", "", RELEASE)}
    # The Lease that tells other releases of this one.
    cluster_wide |= {
        (kind, "kube-public", name)
        for kind in ("Role", "RoleBinding")
        for name in (scope, f"{scope}-reader")
    }
    assert roles(release) == leader | users | cluster_wide
    release.install(
        *ON_KWOK_NODES, f"namespaces={{{team.name}}}", "userRoles.create=false"
    )
    assert roles(release) == leader | {
        (kind, team.name, RELEASE) for kind in ("Role", "RoleBinding")
    }
    release.install(*ON_KWOK_NODES)
    assert roles(release) == leader | users | cluster_wide
