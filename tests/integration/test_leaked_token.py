"""What a leaked token of the operator can do: every verb on every resource of a real API server, as a table.

Run with `-s` to print the table.
"""

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from support.operator.admission_cases import HOSTILE_OBJECTS, HOSTILE_PODS, IMAGE_BY_TAG
from support.operator.built_fields import (
    FIELDS_OF_OBJECTS,
    FIELDS_OF_PODS,
    STAYS_POSSIBLE,
)
from support.operator.built_objects import (
    ROOT,
    Object,
    built_objects,
    load_manifest,
    rename,
)
from support.operator.charts import CLUSTER_WIDE, of_kind, render
from support.operator.operator_process import delete_objects, install_crd
from support.operator.scenario import merged
from support.operator.thief import METHODS, Right, Thief

from e2e.pipelines.chart import RELEASE
from testcluster.kube_namespace import (
    KubeNamespace,
    pod,
    temporary_namespace,
    until,
)
from testcluster.provider import Provider

# The most rights that the chart grants.
VALUES: Object = {**CLUSTER_WIDE, "nodeLost": {"replaceAfterSeconds": 600}}
OWN = "thief-operator"
TEAM = "thief-team"
INSTALLED = (
    *("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"),
    *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
)
BUILT = "the operator builds it; the rules of the policies hold for it"
EVERY_ACCOUNT = "Kubernetes lets every account ask about itself"
PIPELINES = "finetunepipelines"
ALLOWED: dict[tuple[str, str], tuple[str, str]] = {
    ("finetune.dev", PIPELINES): (
        "get list watch delete",
        "it reads pipelines, and deletes finished ones with whenExpired: Delete",
    ),
    ("finetune.dev", f"{PIPELINES}/status"): (
        "update patch",
        "it writes the status of every pipeline",
    ),
    ("batch", "jobs"): ("get list watch create delete", BUILT),
    ("apps", "deployments"): ("get list watch create patch delete", BUILT),
    ("", "services"): ("get list watch create patch delete", BUILT),
    ("", "persistentvolumeclaims"): ("get list watch create patch", BUILT),
    ("", "pods"): (
        "list watch delete",
        "it reads them, and deletes its own on lost nodes (nodeLost.replaceAfterSeconds)",
    ),
    ("", "events"): ("list watch create", "its Events are about pipelines"),
    ("", "nodes"): ("list watch", "it reads the taints that announce a node's end"),
    ("", "configmaps"): ("list watch", "only finetune-defaults"),
    ("coordination.k8s.io", "leases"): ("list", "only finetune-pipelines"),
}
"""(group, resource) -> the verbs that the account may use in a team's namespace, and the reason."""
OWN_NAMESPACE: dict[tuple[str, str], tuple[str, str]] = {
    ("coordination.k8s.io", "leases"): ("create list", "the Lease of its replicas"),
}
"""The same in the operator's namespace, if it differs."""
PUBLIC_NAMESPACE: dict[tuple[str, str], tuple[str, str]] = {
    ("coordination.k8s.io", "leases"): (
        "create get list update",
        "finetune-pipelines: which release reconciles all namespaces",
    ),
}
DEMO = merged(
    load_manifest(ROOT / "examples" / "demo" / "pipeline.yaml"),
    {"spec": {"train": {"nodes": 2}, "workspace": {"accessMode": "ReadWriteMany"}}},
)


@dataclass(frozen=True)
class Scene:
    """An API server with the chart's account, rights and policies, and a team's pipelines."""

    thief: Thief
    user: Thief
    team: KubeNamespace


@pytest.fixture(scope="module")
def scene(
    control_plane: Provider, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    kube = control_plane.kube
    installed = of_kind(render(VALUES, namespace=OWN), *INSTALLED)
    install_crd(kube)
    folder = tmp_path_factory.mktemp("thief")
    account = f"system:serviceaccount:{OWN}:{RELEASE}"
    with temporary_namespace(kube, OWN), temporary_namespace(kube, TEAM) as team:
        kube.apply(installed)
        for name, changes in PIPELINE_SPECS.items():
            spec = DEMO["spec"] | changes
            team.create(
                {
                    **DEMO,
                    "metadata": {"name": name},
                    "spec": spec,
                }
            )
        created = Scene(
            Thief(kube.kubeconfig, account, folder),
            Thief(kube.kubeconfig, "", folder),
            team,
        )
        until(lambda: all_policies_are_active(created), 60)
        yield created
        delete_objects(kube, installed)


WITHOUT_SERVER: Object = {"deploy": None, "ttlSecondsAfterFinished": 1}
PIPELINE_SPECS: dict[str, Object] = {
    "of-a-tenant": {},
    "kept": WITHOUT_SERVER,
    "expiring": WITHOUT_SERVER | {"whenExpired": "Delete"},
    "expired": WITHOUT_SERVER | {"whenExpired": "Delete"},
}


def all_policies_are_active(scene: Scene) -> bool:
    """Return whether the API server refuses a request by each policy that no request has changed yet."""
    hostile = [built("prepare"), built("train"), built("service"), built("claim")]
    hostile[0]["metadata"]["labels"] = {"app": "other"}
    hostile[1]["spec"]["template"]["spec"]["hostNetwork"] = True
    hostile[2]["spec"]["type"] = "NodePort"
    hostile[3]["spec"]["volumeName"] = "of-another"
    answers = [create(scene.thief, manifest) for manifest in hostile]
    answers.append(delete(scene.thief, "of-a-tenant"))
    answers.append(create(scene.thief, event_about("Pod")))
    return all("denied request" in answer for answer in answers)


def built(which: str, namespace: str = TEAM) -> Object:
    objects = built_objects(DEMO, namespace)
    services = {"service": objects.service, "headless": objects.headless_service}
    chosen = {"claim": objects.claim, **services, **objects.workloads}[which]
    assert chosen
    return copy.deepcopy(chosen)


def event_about(kind: str, namespace: str = TEAM) -> Object:
    about = {"apiVersion": "finetune.dev/v1alpha1", "kind": kind, "name": "x"}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "told", "namespace": namespace},
        "involvedObject": {**about, "namespace": namespace},
        "reason": "Told",
        "message": "told",
        "type": "Normal",
    }


def create(account: Thief, manifest: Object) -> str:
    """Return the message of the API server's answer to a creation in dry-run; empty if it would create the object."""
    group = manifest["apiVersion"]
    root = f"/apis/{group}" if "/" in group else f"/api/{group}"
    plural = f"{manifest['kind'].lower()}s"
    namespace = manifest["metadata"]["namespace"]
    path = f"{root}/namespaces/{namespace}/{plural}?dryRun=All"
    status, answer = account.send("POST", path, manifest)
    return "" if status == 201 else str(answer.get("message"))


def pipeline_path(name: str) -> str:
    return f"/apis/finetune.dev/v1alpha1/namespaces/{TEAM}/{PIPELINES}/{name}"


def delete(account: Thief, name: str) -> str:
    """Return the message of the API server's answer to the deletion of a pipeline in dry-run; empty: it would."""
    status, answer = account.send("DELETE", pipeline_path(name) + "?dryRun=All")
    return "" if status == 200 else str(answer.get("message"))


def rights_in(scene: Scene, namespace: str) -> set[Right]:
    """Return what the account may do to an object of another; no right depends on a name of its own."""
    rights = set()
    for resource in scene.thief.resources():
        verbs = {*resource.verbs} & METHODS.keys()
        if resource.name == "configmaps":
            name = "finetune-defaults"
        elif resource.name == "leases":
            name = "finetune-pipelines"
        else:
            name = "x"
        for verb in verbs:
            if scene.thief.may(resource, verb, namespace, name):
                rights.add((resource.group, resource.name, verb))
    return rights


def expected(*tables: dict[tuple[str, str], tuple[str, str]]) -> dict[Right, str]:
    merged_table: dict[tuple[str, str], tuple[str, str]] = {}
    for table in tables:
        merged_table |= table
    return {
        (group, resource, verb): reason
        for (group, resource), (verbs, reason) in merged_table.items()
        for verb in verbs.split()
    }


@pytest.mark.parametrize(
    ("namespace", "reasons"),
    [
        (TEAM, expected(ALLOWED)),
        (OWN, expected(ALLOWED, OWN_NAMESPACE)),
        ("kube-public", expected(ALLOWED, PUBLIC_NAMESPACE)),
        ("kube-system", expected(ALLOWED)),
    ],
    ids=["team", "own", "kube-public", "kube-system"],
)
def test_token_has_exactly_these_rights(
    scene: Scene, namespace: str, reasons: dict[Right, str]
) -> None:
    rights = {
        right
        for right in rights_in(scene, namespace)
        if not right[0].startswith(("authentication.", "authorization."))
    }
    for group, resource, verb in sorted(rights):
        reason = reasons.get((group, resource, verb), "NOT EXPECTED")
        print(f"{namespace}: {verb} {resource}.{group}: allowed: {reason}")
    assert rights == reasons.keys()


def attempts() -> Iterator[tuple[str, Object, str]]:
    """Yield what a thief would create, and the rule that refuses it."""
    for which in ("train", "deploy"):
        for name, (rule, change) in (HOSTILE_PODS | FIELDS_OF_PODS).items():
            if change is IMAGE_BY_TAG:
                continue
            hostile = built(which)
            change(hostile["spec"]["template"]["spec"])
            yield f"{hostile['kind']} with {name}", hostile, rule
    for name, (which, rule, change) in (HOSTILE_OBJECTS | FIELDS_OF_OBJECTS).items():
        hostile = built(which)
        change(hostile)
        yield name, hostile, rule
    for namespace in ("kube-system", OWN):
        for which in ("claim", "train", "deploy", "service"):
            yield f"{which} in {namespace}", built(which, namespace), "namespace"
        event = event_about("FineTunePipeline", namespace)
        yield f"Event in {namespace}", event, "namespace"
    for kind in ("Pod", "Node", "Deployment"):
        yield f"Event about a {kind}", event_about(kind), "subject"


def test_token_creates_what_users_of_pipelines_choose(scene: Scene) -> None:
    answers = {}
    for reason, (which, change) in STAYS_POSSIBLE.items():
        manifest = built(which)
        change(manifest)
        rename(manifest, "of-a-thief")
        print(f"create {which}: allowed because {reason}")
        answers[reason] = create(scene.thief, manifest)
    assert answers == dict.fromkeys(STAYS_POSSIBLE, "")


def test_token_creates_only_what_the_operator_builds(scene: Scene) -> None:
    wrong = []
    for name, manifest, rule in attempts():
        rename(manifest, "of-a-thief")
        answer = create(scene.thief, manifest)
        print(f"create {name}: refused by {rule}")
        if f"denied request: {rule}: " not in answer:
            wrong.append(f"{name}: {answer or 'CREATED'}")
    assert wrong == []
    for which in ("claim", "prepare", "train", "deploy", "service", "headless"):
        assert create(scene.thief, built(which)) == ""
    assert create(scene.thief, event_about("FineTunePipeline")) == ""


def finish(scene: Scene, name: str) -> None:
    """Write the end of a pipeline into its status, with the right of the account itself."""
    status = {"finishedAt": "2026-01-01T00:00:00Z"}
    path = pipeline_path(name) + "/status"
    code, answer = scene.thief.send("PATCH", path, {"status": status})
    assert code == 200, json.dumps(answer)


def test_token_deletes_only_pipelines_whose_user_wants_it(scene: Scene) -> None:
    for name in ("of-a-tenant", "kept", "expired"):
        finish(scene, name)
    answers = {name: delete(scene.thief, name) for name in PIPELINE_SPECS}
    for name, answer in answers.items():
        print(f"delete pipeline {name}: {answer or 'allowed'}")
    for name in ("of-a-tenant", "kept", "expiring"):
        assert "denied request: expiry: " in answers[name]
    assert answers["expired"] == ""


def kept_pod(name: str, label: str) -> Object:
    """Return a pod that exists until its finalizer is removed."""
    manifest = pod(name, "sleep 1")
    labels = {"app.kubernetes.io/managed-by": label}
    manifest["metadata"] |= {"labels": labels, "finalizers": ["example.com/kept"]}
    return manifest


def test_token_deletes_only_own_pods_that_end_already(scene: Scene) -> None:
    labels = {"running": RELEASE, "of-another": "another", "lost": RELEASE}
    for name, label in labels.items():
        scene.team.create(kept_pod(name, label))
    for name in ("of-another", "lost"):
        scene.team.run("delete", "pod", name, "--wait=false")
    root = f"/api/v1/namespaces/{TEAM}/pods"
    now = {"gracePeriodSeconds": 0}

    def answer(name: str) -> str:
        path = f"{root}/{name}?dryRun=All"
        return str(scene.thief.send("DELETE", path, now)[1].get("message", ""))

    until(lambda: "denied request: lost: " in answer("running"), 30)
    for name in labels:
        print(f"delete pod {name}: {answer(name) or 'allowed'}")
    assert "denied request: lost: " in answer("of-another")
    assert "denied" not in answer("lost")
    for name in labels:
        patch = '{"metadata":{"finalizers":null}}'
        scene.team.run("patch", "pod", name, "--type=merge", "-p", patch)


def test_status_holds_no_field_of_the_spec(scene: Scene) -> None:
    """A write of the status changes neither the spec nor the metadata."""
    path = pipeline_path("of-a-tenant")
    before = scene.thief.send("GET", path)[1]
    change = {
        "spec": {"suspend": True},
        "metadata": {
            "annotations": {"finetune.dev/cancel": "1"},
            "finalizers": ["a/b"],
        },
    }
    status, _ = scene.thief.send("PATCH", f"{path}/status", change)
    assert status == 200
    after = scene.thief.send("GET", path)[1]
    for key in ("annotations", "finalizers", "labels", "ownerReferences"):
        assert after["metadata"].get(key) == before["metadata"].get(key)
    assert after["spec"] == before["spec"]
    assert scene.thief.send("PATCH", path, change)[0] == 403


def test_rules_hold_for_nobody_else(scene: Scene) -> None:
    assert delete(scene.user, "of-a-tenant") == ""
