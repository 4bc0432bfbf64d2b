"""The chart's admission policies: what the operator builds passes them, and other requests of its account do not."""

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import yaml
from support.operator.admission_cases import (
    CONFIG_MAP,
    HOSTILE_OBJECTS,
    HOSTILE_PATCHES,
    HOSTILE_PODS,
    IMAGE_BY_TAG,
    LEGITIMATE_PATCHES,
    OTHER,
    PIPELINE,
    add_volume,
)
from support.operator.built_objects import (
    MANIFESTS,
    ROOT,
    Object,
    built_objects,
    load_manifest,
    rename,
)
from support.operator.charts import CLUSTER_WIDE, of_kind, render
from support.operator.operator_process import delete_objects, install_crd
from support.operator.scenario import merged
from support.operator.volumes import (
    GROWING,
    create_growing_class,
    create_volume,
    wait_bound,
)

from e2e.pipelines.chart import RELEASE
from finetune_operator.core.settings import Settings
from testcluster.errors import TimedOut
from testcluster.kube_namespace import KubeNamespace, temporary_namespace, until
from testcluster.provider import Provider

OWN = "policy-operator"
"""Namespace of the release."""
POLICY = "ValidatingAdmissionPolicy"
BINDING = "ValidatingAdmissionPolicyBinding"
POLICIES = {
    f"{kind}.{RELEASE}.{OWN}"
    for kind in (
        *("objects", "pods", "services", "claims"),
        *("pipelines", "events", "defaults"),
    )
}
INSTALLED = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", POLICY, BINDING)
DEMO = load_manifest(ROOT / "examples" / "demo" / "pipeline.yaml")
ON_TWO_NODES = merged(
    DEMO,
    {"spec": {"train": {"nodes": 2}, "workspace": {"accessMode": "ReadWriteMany"}}},
)
LABEL = {"app.kubernetes.io/managed-by": "finetune-operator"}


@dataclass(frozen=True)
class Account:
    """The operator's ServiceAccount, or the administrator, in a namespace."""

    namespace: KubeNamespace
    is_operator: bool = True

    def run(self, verb: str, *arguments: str, given: str = "") -> str:
        """Run kubectl with the account's rights."""
        account = f"system:serviceaccount:{OWN}:{RELEASE}"
        options = ["--as", account] if self.is_operator else []
        return self.namespace.run(verb, *options, *arguments, given=given)

    def create(self, *objects: Object, dry: bool = False) -> None:
        """Create objects, or only have the API server check them. Raises TimedOut if it refuses an object."""
        options = ["--dry-run=server"] if dry else []
        self.run("create", *options, "-f", "-", given=yaml.safe_dump_all(objects))

    def patch(self, kind: str, name: str, patch: Object) -> None:
        """Send a merge patch. Raises TimedOut if the API server refuses it."""
        self.run(
            "patch",
            kind,
            name,
            "--type=merge",
            "--dry-run=server",
            "-p",
            json.dumps(patch),
        )


@pytest.fixture(scope="module")
def team(control_plane: Provider) -> Iterator[KubeNamespace]:
    """The namespace of a team, on an API server with the account, the rights and the policies of the chart."""
    kube = control_plane.kube
    installed = of_kind(render(CLUSTER_WIDE, namespace=OWN), *INSTALLED)
    install_crd(kube)
    with (
        temporary_namespace(kube, OWN),
        temporary_namespace(kube, "policy-team") as created,
    ):
        kube.apply(installed)
        create_growing_class(kube)
        created.create({**DEMO, "metadata": {"name": "owner"}})
        account = Account(created)
        until(
            lambda: all("denied" in answer for answer in answers(account)),
            30,
            lambda: str(answers(account)),
        )
        yield created
        delete_objects(kube, installed)


def answers(account: Account) -> list[str]:
    """Return the answers of the API server to one hostile request for each policy."""
    unlabelled = built("prepare")
    job = built("train")
    service = built("service")
    claim = built("claim")
    unlabelled["metadata"]["labels"] = OTHER
    job["spec"]["template"]["spec"]["hostNetwork"] = True
    service["spec"]["type"] = "NodePort"
    claim["spec"]["volumeName"] = "of-another"
    return [answer(account, hostile) for hostile in (unlabelled, job, service, claim)]


def answer(account: Account, manifest: Object) -> str:
    try:
        account.create(manifest, dry=True)
    except TimedOut as error:
        return str(error)
    return "created"


def built(which: str, namespace: str = "policy-team") -> Object:
    """Return one object of the demo on two nodes: the claim, a Service, or the workload of a stage."""
    objects = built_objects(ON_TWO_NODES, namespace)
    services = {"service": objects.service, "headless": objects.headless_service}
    chosen = {"claim": objects.claim, **services, **objects.workloads}[which]
    assert chosen
    return copy.deepcopy(chosen)


def adopted(team: KubeNamespace, manifest: Object) -> Object:
    """Return the object with an existing pipeline as its owner, so that the garbage collector keeps it."""
    existing = {"name": "owner", "uid": team.get("ft", "owner")["metadata"]["uid"]}
    owners = [
        {**owner, **existing} for owner in manifest["metadata"]["ownerReferences"]
    ]
    return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": owners}}


def test_api_server_finds_no_mistake_in_the_policies(team: KubeNamespace):
    """The controller of the policies checks each expression against the types of the matched resources."""

    def type_checked() -> dict[str, Object]:
        policies = {
            policy["metadata"]["name"]: policy
            for policy in team.kube.json("get", "validatingadmissionpolicies")["items"]
        }
        return {
            name: policies[name]["status"]
            for name in POLICIES
            if "typeChecking" in policies[name].get("status", {})
        }

    until(lambda: type_checked().keys() == POLICIES, 60)
    assert [
        status
        for status in type_checked().values()
        if status["typeChecking"].get("expressionWarnings")
    ] == []


@pytest.mark.parametrize(
    "path", MANIFESTS, ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_every_object_that_the_operator_builds_passes(team: KubeNamespace, path):
    objects = list(built_objects(load_manifest(path), team.name))
    Account(team).create(*(adopted(team, manifest) for manifest in objects))
    for manifest in objects:
        assert team.get(manifest["kind"], manifest["metadata"]["name"]), manifest[
            "metadata"
        ]["name"]


def test_pods_without_a_user_pass(team: KubeNamespace):
    objects = built_objects(DEMO, team.name, Settings(sets_user=False))
    for stage, manifest in objects.workloads.items():
        # The objects of the manifest itself exist already.
        rename(manifest, f"without-user-{stage}")
        assert answer(Account(team), manifest) == "created"


def has_image_volumes(team: KubeNamespace) -> bool:
    return int(team.kube.json("version")["serverVersion"]["minor"]) >= 35


def test_image_by_digest_passes_as_a_volume(team: KubeNamespace):
    server = built("deploy")
    rename(server, "with-image")
    reference = f"registry.test:5000/team/bot@sha256:{'0' * 64}"
    add_volume(image={"reference": reference})(server["spec"]["template"]["spec"])
    assert answer(Account(team), server) == "created"


@pytest.mark.parametrize("which", ["train", "deploy"])
@pytest.mark.parametrize(("rule", "change"), HOSTILE_PODS.values(), ids=HOSTILE_PODS)
def test_hostile_pod_is_refused_by_the_rules_name(
    team: KubeNamespace, which, rule, change
):
    if change is IMAGE_BY_TAG and not has_image_volumes(team):
        pytest.skip(
            "this API server makes an emptyDir of an image volume: Kubernetes has them since 1.35"
        )
    hostile = built(which)
    change(hostile["spec"]["template"]["spec"])
    hostile["metadata"]["name"] = "hostile"
    assert_only_operator_is_refused(team, hostile, rule)


def assert_only_operator_is_refused(
    team: KubeNamespace, hostile: Object, rule: str
) -> None:
    """Check that the rule refuses the object; an administrator may create it, so nothing else is wrong with it."""
    Account(team, is_operator=False).create(hostile, dry=True)
    with pytest.raises(
        TimedOut, match=f"ValidatingAdmissionPolicy .*denied request: {rule}: "
    ):
        Account(team).create(hostile, dry=True)


@pytest.mark.parametrize(
    ("which", "rule", "change"), HOSTILE_OBJECTS.values(), ids=HOSTILE_OBJECTS
)
def test_hostile_object_is_refused_by_the_rules_name(
    team: KubeNamespace, which, rule, change
):
    hostile = built(which)
    hostile["metadata"]["name"] = "hostile"
    change(hostile)
    assert_only_operator_is_refused(team, hostile, rule)


@pytest.mark.parametrize("which", ["claim", "train", "deploy", "service"])
def test_object_in_kube_system_is_refused(team: KubeNamespace, which):
    system = KubeNamespace(team.kube, "kube-system")
    assert_only_operator_is_refused(system, built(which, "kube-system"), "namespace")


# ---- patches and deletions


@pytest.fixture(scope="module")
def claim(team: KubeNamespace) -> str:
    """A bound claim of the operator, with metadata of others, which the operator adds to none."""
    manifest = built("claim")
    manifest["metadata"].update(name="workspace", finalizers=["example.com/backup"])
    manifest["metadata"]["labels"] |= {"team": "nlp"}
    manifest["metadata"]["annotations"] |= {"example.com/backup": "daily"}
    manifest["spec"]["storageClassName"] = GROWING
    create_volume(team, "workspace")
    Account(team, is_operator=False).create(manifest)
    wait_bound(team, "workspace")
    Account(team, is_operator=False).run(
        "label", "pvc", "workspace", "example.com/cost=7"
    )
    return "workspace"


@pytest.fixture(scope="module")
def pending_claim(team: KubeNamespace) -> str:
    """A claim of the operator that no volume is bound to."""
    manifest = built("claim")
    manifest["metadata"]["name"] = "pending"
    manifest["spec"]["storageClassName"] = GROWING
    Account(team).create(manifest)
    return "pending"


@pytest.fixture(scope="module")
def foreign_claim(team: KubeNamespace) -> str:
    """A claim of a user."""
    create_volume(team, "database")
    team.claim("database", storage_class=GROWING)
    wait_bound(team, "database")
    return "database"


@pytest.mark.parametrize("patch", LEGITIMATE_PATCHES.values(), ids=LEGITIMATE_PATCHES)
def test_operators_patch_of_its_claim_passes(team: KubeNamespace, claim, patch):
    Account(team).patch("pvc", claim, patch)


@pytest.mark.parametrize(
    ("rule", "patch"), HOSTILE_PATCHES.values(), ids=HOSTILE_PATCHES
)
def test_other_patch_of_its_claim_is_refused(team: KubeNamespace, claim, rule, patch):
    assert_only_operators_patch_is_refused(team, claim, rule, patch)


def assert_only_operators_patch_is_refused(
    team: KubeNamespace, name: str, rule: str, patch: Object
) -> None:
    if (
        rule != "spec"
    ):  # the API server itself refuses some of these, after the policies
        Account(team, is_operator=False).patch("pvc", name, patch)
    with pytest.raises(
        TimedOut, match=f"ValidatingAdmissionPolicy .*denied request: {rule}: "
    ):
        Account(team).patch("pvc", name, patch)


def test_pending_claim_gets_no_volume_of_another(team: KubeNamespace, pending_claim):
    assert_only_operators_patch_is_refused(
        team, pending_claim, "spec", {"spec": {"volumeName": "of-another"}}
    )


@pytest.mark.parametrize("patch", LEGITIMATE_PATCHES.values(), ids=LEGITIMATE_PATCHES)
def test_foreign_claim_accepts_no_patch_of_the_operator(
    team: KubeNamespace, foreign_claim, patch
):
    """An owner that does not exist would make the garbage collector delete the claim with its data."""
    labelled = {**patch, "metadata": {**patch.get("metadata", {}), "labels": LABEL}}
    assert_only_operators_patch_is_refused(team, foreign_claim, "foreign", labelled)


def test_owner_of_another_kind_stays(team: KubeNamespace):
    manifest = built("claim")
    manifest["metadata"].update(
        name="shared-owner",
        ownerReferences=[CONFIG_MAP],
        finalizers=["example.com/keep"],
    )
    Account(team, is_operator=False).create(manifest)

    patch = {"metadata": {"ownerReferences": [PIPELINE]}}
    assert_only_operators_patch_is_refused(team, "shared-owner", "deletion", patch)


@pytest.fixture(scope="module")
def foreign_service(team: KubeNamespace) -> str:
    """A Service of a user."""
    team.run("create", "service", "clusterip", "database", "--tcp=80")
    return "database"


def test_foreign_service_accepts_no_patch(team: KubeNamespace, foreign_service):
    patch = {
        "metadata": {"labels": LABEL},
        "spec": {"selector": {"finetune.dev/server": "mine"}},
    }
    Account(team, is_operator=False).patch("service", foreign_service, patch)
    with pytest.raises(TimedOut, match=r"denied request: (foreign|selector): "):
        Account(team).patch("service", foreign_service, patch)


def test_own_service_follows_the_newest_server(team: KubeNamespace):
    service = built("service")
    service["metadata"]["name"] = "patched"
    Account(team).create(adopted(team, service))
    team.run("label", "service", "patched", "app.kubernetes.io/managed-by-")
    patch = {
        "metadata": {"labels": LABEL},
        "spec": {"selector": {"finetune.dev/server": "next"}},
    }
    Account(team).patch("service", "patched", patch)


def test_foreign_objects_are_not_deleted(team: KubeNamespace, foreign_service):
    foreign = built("deploy")
    foreign["metadata"] = {"name": "foreign"}
    Account(team, is_operator=False).create(foreign)
    for kind, name in (("service", foreign_service), ("deployment", "foreign")):
        with pytest.raises(TimedOut, match="denied request: foreign: "):
            Account(team).run("delete", kind, name)


@pytest.mark.parametrize("which", ["train", "deploy", "service"])
def test_own_object_is_deleted(team: KubeNamespace, which):
    own = built(which)
    rename(own, f"deleted-{which}")
    Account(team).create(adopted(team, own))
    Account(team).run("delete", own["kind"], own["metadata"]["name"], "--wait=false")


def test_other_accounts_are_not_limited(team: KubeNamespace):
    hostile = built("train")
    hostile["metadata"]["labels"] = OTHER
    hostile["metadata"]["name"] = "of-a-user"
    team.run("create", "--dry-run=server", "-f", "-", given=json.dumps(hostile))
