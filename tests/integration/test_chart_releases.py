"""The chart's releases on a live API server: installed, changed, taken away, put back. The pods run on paper only."""

import json
from pathlib import Path

import pytest
import yaml

from e2e.pipelines.chart import RELEASE, Operator
from testcluster.errors import TimedOut
from testcluster.fixtures import namespace_name
from testcluster.kube import Kube
from testcluster.kube_namespace import temporary_namespace, until

DEFINITION = "finetunepipelines.finetune.dev"
ROOT = Path(__file__).parents[2]
ON_PAPER = ("tolerations[0].key=kwok.x-k8s.io/node", "tolerations[0].operator=Exists")


def away(operator: Operator) -> None:
    operator.helm("uninstall", operator.release, "--ignore-not-found", "--wait", "--timeout", "1m")
    operator.kube.run("delete", "crd", DEFINITION, "--ignore-not-found", "--timeout=60s", timeout=70)


@pytest.fixture
def operator(control_plane):
    """No release, no definition; and none afterwards."""
    made = Operator(control_plane.kube, namespace="finetune-installed")
    away(made)
    yield made
    away(made)


@pytest.fixture
def release(operator: Operator) -> Operator:
    operator.install(*ON_PAPER)
    return operator


@pytest.fixture
def team(control_plane, request):
    with temporary_namespace(control_plane.kube, namespace_name(request.node.name)) as made:
        yield made


def definition(kube: Kube) -> str:
    """Give the definition's uid; empty where there is none."""
    return kube.run("get", "crd", DEFINITION, "--ignore-not-found", "-o", "jsonpath={.metadata.uid}")


def pipeline(namespace) -> str:
    """Create a pipeline and give its uid."""
    until(lambda: "finetunepipelines" in namespace.run("api-resources", "--api-group=finetune.dev"), 30)
    manifest = yaml.safe_load((ROOT / "examples" / "demo" / "pipeline.yaml").read_text())
    return json.loads(namespace.run("create", "-f", "-", "-o", "json", given=json.dumps(manifest)))["metadata"]["uid"]


def roles(operator: Operator) -> set[tuple[str, str, str]]:
    """Give what rights the release has handed out: kind, namespace, name."""
    kinds, ours = "roles,rolebindings,clusterroles,clusterrolebindings", "app.kubernetes.io/name=finetune-operator"
    found = operator.kube.json("get", kinds, "--all-namespaces", "-l", ours)["items"]
    return {(one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"]) for one in found}


def test_two_replicas_come_up_and_an_upgrade_replaces_both(release: Operator):
    before = set(release.pods())
    assert len(before) == 2
    release.install(*ON_PAPER, "podAnnotations.release=next")
    until(lambda: len(release.pods()) == 2 and before.isdisjoint(release.pods()), 60)


def test_pipelines_outlive_the_release_and_the_next_one_takes_them_over(release: Operator, team):
    kept, uid = definition(release.kube), pipeline(team)
    release.uninstall()
    assert release.pods() == [] or until(lambda: not release.pods(), 30)
    assert definition(release.kube) == kept
    assert team.get("ftp", "docstrings")["metadata"]["uid"] == uid
    release.install(*ON_PAPER)
    assert definition(release.kube) == kept
    assert team.get("ftp", "docstrings")["metadata"]["uid"] == uid


def test_a_release_that_gives_the_definition_out_of_its_hands_leaves_it_there(release: Operator, team):
    kept, uid = definition(release.kube), pipeline(team)
    release.install(*ON_PAPER, "crds.enabled=false")
    assert definition(release.kube) == kept
    assert team.get("ftp", "docstrings")["metadata"]["uid"] == uid


def test_who_does_not_want_to_keep_pipelines_is_rid_of_them(release: Operator):
    release.install(*ON_PAPER, "crds.keep=false")
    release.uninstall()
    until(lambda: not definition(release.kube), 60)


def test_a_definition_that_is_there_already_is_not_taken_from_its_owner(operator: Operator):
    operator.kube.apply((ROOT / "crds" / "finetunepipelines.yaml").read_text())
    with pytest.raises(TimedOut, match=DEFINITION):
        operator.install(*ON_PAPER)
    operator.install(*ON_PAPER, "crds.enabled=false")
    assert len(operator.pods()) == 2


def test_rights_follow_when_the_operator_is_narrowed_down_and_widened_again(release: Operator, team):
    leader = {(kind, release.namespace, f"{RELEASE}-leader") for kind in ("Role", "RoleBinding")}
    people = {("ClusterRole", "", f"{RELEASE}-{word}") for word in ("view", "edit")}
    everywhere = {("ClusterRole", "", RELEASE), ("ClusterRoleBinding", "", RELEASE)}
    assert roles(release) == leader | people | everywhere
    release.install(*ON_PAPER, f"namespaces={{{team.namespace}}}", "userRoles.create=false")
    assert roles(release) == leader | {(kind, team.namespace, RELEASE) for kind in ("Role", "RoleBinding")}
    release.install(*ON_PAPER)
    assert roles(release) == leader | people | everywhere
