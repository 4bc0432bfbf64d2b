"""A user who may only create and get pipelines: no spec reaches a Secret, node or token beyond the namespace.

The operator runs as its ServiceAccount with the chart's rights, in a namespace that enforces Pod Security "restricted".
tests/unit/kubernetes/test_hostile_specs.py has every combination of field and value; here each value is in all fields
at once that accept it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import ValidationError
from support.operator.charts import CLUSTER_WIDE, render
from support.operator.hostile import (
    VALUES,
    Object,
    Path,
    spec_schema,
    string_fields,
    trainers_spec,
    with_value,
)
from support.operator.operator_process import install_crd, running_operator
from support.operator.pipeline_objects import pipeline_manifest
from support.operator.pod_checker import pod_violations
from support.operator.simulated_kubelet import simulated_kubelet

from finetune_operator.api.spec import PipelineSpec
from testcluster.errors import TimedOut
from testcluster.kube import Kube
from testcluster.kube_namespace import KubeNamespace, temporary_namespace, until
from testcluster.provider import Provider

USER = "mallory"
WORKLOADS = "jobs,deployments,pods,persistentvolumeclaims,services"
MANAGED = "app.kubernetes.io/managed-by=finetune-operator"
NEEDED = {
    *(
        "serviceAccountName",
        "priorityClassName",
        "runtimeClassName",
        "existingClaim",
        "gates",
        "tolerations",
    ),
    *("affinity", "requests", "limits", "prefix", "targets", "expect"),
}
"""Fields in which some values keep a stage from running: the API server refuses its Job or pod, no server can mount
the published model, or no answer has the text. tests/unit/kubernetes/test_hostile_specs.py tries all values in them."""


@dataclass(frozen=True)
class Attacked:
    """The namespaces after all hostile pipelines have run."""

    own: KubeNamespace
    victim: KubeNamespace
    workloads: list[Object]
    """Objects of the kinds in WORKLOADS with the operator's label, from all namespaces."""


def user_rights(namespace: str) -> list[Object]:
    rule = {
        "apiGroups": ["finetune.dev"],
        "resources": ["finetunepipelines"],
        "verbs": ["create", "get"],
    }
    meta = {"name": USER, "namespace": namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": USER}
    api = {"apiVersion": "rbac.authorization.k8s.io/v1"}
    subjects = [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": USER}]
    return [
        {
            **api,
            "kind": "Role",
            "metadata": meta,
            "rules": [rule],
        },
        {
            **api,
            "kind": "RoleBinding",
            "metadata": meta,
            "roleRef": role,
            "subjects": subjects,
        },
    ]


def secret(name: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name},
        "stringData": {"key": "secret"},
    }


@pytest.fixture(scope="module")
def attacked(
    control_plane: Provider, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Attacked]:
    """The namespaces in which the user has run one pipeline for each hostile value."""
    kube = control_plane.kube
    install_crd(kube)
    folder = tmp_path_factory.mktemp("operator")
    with (
        temporary_namespace(kube, "hostile-operator") as operator,
        temporary_namespace(kube, "mine") as own,
        temporary_namespace(kube, "victim") as victim,
    ):
        prepare_namespaces(own, victim)
        objects = render(CLUSTER_WIDE, namespace=operator.name)
        # Other tests on this control plane have left some.
        earlier = {workload["metadata"]["uid"] for workload in workloads(kube)}
        with running_operator(operator, objects, folder) as log, simulated_kubelet(own):
            run_all(own)
            print(log.read_text()[-20_000:])  # pytest shows it only if the test fails
            created = [
                workload
                for workload in workloads(kube)
                if workload["metadata"]["uid"] not in earlier
            ]
            yield Attacked(own, victim, created)
        kube.run("delete", "ft", "--all-namespaces", "--all", "--wait=false")


def prepare_namespaces(own: KubeNamespace, victim: KubeNamespace) -> None:
    own.kube.apply(user_rights(own.name))
    own.create(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "trainer"}}
    )
    priority = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": "batch"},
        "value": 1,
    }
    runtime = {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": "nvidia"},
        "handler": "nvidia",
    }
    own.kube.apply([priority, runtime])
    own.create(secret("hub-token"))
    victim.create(secret("key"))


def run_all(own: KubeNamespace) -> None:
    """Create a pipeline for each value, as the user, and wait until each has finished or cannot go on."""
    manifests = [hostile_pipeline(number, value) for number, value in enumerate(VALUES)]
    content = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
    own.run("create", "--as", USER, "-f", "-", given=content)
    until(
        lambda: all(
            map(has_ended, own.kube.json("get", "ft", "--namespace", own.name)["items"])
        ),
        200,
        lambda: own.run("get", "ft,jobs,pods"),
    )


def has_ended(pipeline: Object) -> bool:
    """Return whether the pipeline has finished, or a stage cannot start: no server can mount the model's volume."""
    status = pipeline.get("status", {})
    conditions = {
        condition["type"]: condition["status"]
        for condition in status.get("conditions", [])
    }
    return conditions.get("Finished") == "True" or any(
        stage.get("reason") == "SpecInvalid" for stage in status.get("stages", ())
    )


def is_readable_by_pods(path: Path, value: str) -> bool:
    """Return whether the API server accepts the value as a URI: a local run reads paths of its machine, too."""
    # The text of a template is no path.
    if path[-1] == "chatTemplate" and "{{" in value:
        return True
    scheme = value.partition("://")[0]
    schemes = (
        {"pvc"}
        if {"tasks", "tensorboard", "chatTemplate"} & set(path)
        else {"hf", "s3", "gs", "az", "oci", "pvc", "https"}
    )
    return scheme in schemes and ".." not in value.split("/")


def hostile_pipeline(number: int, value: str) -> Object:
    """Return a pipeline with the value in every field that accepts it beside the others."""
    spec = trainers_spec()
    del spec["evaluate"]["gates"], spec["deploy"]["smokeTest"]["expect"]
    spec["push"]["when"] = "Always"
    for path in string_fields(spec_schema(), spec):
        if NEEDED & set(map(str, path)) or (
            path[-1] in {"uri", "file", "chatTemplate"}
            and not is_readable_by_pods(path, value)
        ):
            continue
        changed = with_value(spec, path, value)
        if is_valid(changed):
            spec = changed
    # Numbers as numbers: the models also read 2e-4, which is text in YAML.
    sent = PipelineSpec.model_validate(spec).model_dump(
        mode="json", by_alias=True, exclude_none=True
    )
    return pipeline_manifest(f"p{number}", sent)


def is_valid(spec: Object) -> bool:
    try:
        PipelineSpec.model_validate(spec)
    except ValidationError:
        return False
    return True


def workloads(kube: Kube) -> list[Object]:
    items: list[Object] = kube.json(
        "get", WORKLOADS, "--all-namespaces", "-l", MANAGED
    )["items"]
    return items


def pods_of(attacked: Attacked) -> list[tuple[str, Object]]:
    """Return name and pod spec of each Job, Deployment and pod."""
    with_template = [
        workload
        for workload in attacked.workloads
        if workload["kind"] in {"Job", "Deployment"}
    ]
    templates = [
        (workload["metadata"]["name"], workload["spec"]["template"]["spec"])
        for workload in with_template
    ]
    pods = [
        (workload["metadata"]["name"], workload["spec"])
        for workload in attacked.workloads
        if workload["kind"] == "Pod"
    ]
    return [*templates, *pods]


def test_user_has_no_other_right_in_the_namespace(attacked: Attacked):
    for verb, kind in (
        ("create", "pods"),
        ("create", "jobs"),
        ("get", "secrets"),
        ("list", "pods"),
        ("delete", "ft"),
    ):
        with pytest.raises(TimedOut):
            attacked.own.run("auth", "can-i", verb, kind, "--as", USER)


def test_hostile_values_reach_every_stage(attacked: Attacked):
    """Without this the other tests of this file might check nothing."""
    stages = {
        workload["metadata"]["labels"].get("finetune.dev/stage")
        for workload in attacked.workloads
    } - {None}
    assert stages == {"prepare", "train", "evaluate", "push", "deploy"}
    assert {workload["kind"] for workload in attacked.workloads} == {
        *("Job", "Deployment", "Pod", "PersistentVolumeClaim", "Service")
    }
    for number, value in enumerate(VALUES):
        pipeline = attacked.own.get("ft", f"p{number}")
        assert len([text for text in strings(pipeline["spec"]) if text == value]) > 5, (
            value
        )
        jobs = [
            workload
            for workload in attacked.workloads
            if owner_of(workload) == f"p{number}" and workload["kind"] == "Job"
        ]
        # The API server refuses the Job of some values, for example as the name of a variable.
        assert jobs or pipeline["status"]["refusals"], value


def strings(content: Any) -> Iterator[str]:
    """Yield all strings of a JSON value, and all names of its objects."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for child in content:
            yield from strings(child)
    elif isinstance(content, dict):
        for name, child in content.items():
            yield name
            yield from strings(child)


def owner_of(workload: Object) -> str:
    return str(workload["metadata"].get("ownerReferences", [{"name": ""}])[0]["name"])


def test_no_pod_reaches_beyond_its_namespace(attacked: Attacked):
    violations = {name: list(pod_violations(pod)) for name, pod in pods_of(attacked)}
    assert {name: texts for name, texts in violations.items() if texts} == {}


def test_no_object_is_created_elsewhere(attacked: Attacked):
    assert {workload["metadata"]["namespace"] for workload in attacked.workloads} == {
        attacked.own.name
    }
    assert attacked.victim.run("get", WORKLOADS, "-o", "name") == ""


def test_every_object_is_owned_by_a_pipeline_or_is_a_workspace(attacked: Attacked):
    for workload in attacked.workloads:
        owners = {
            owner["kind"] for owner in workload["metadata"].get("ownerReferences", [])
        }
        assert owners <= {"FineTunePipeline", "Job", "ReplicaSet"}, workload[
            "metadata"
        ]["name"]
        assert owners or workload["kind"] == "PersistentVolumeClaim", workload[
            "metadata"
        ]["name"]


def test_services_lead_to_own_servers_only(attacked: Attacked):
    services = [
        workload["spec"]
        for workload in attacked.workloads
        if workload["kind"] == "Service"
    ]
    assert {service["type"] for service in services} == {"ClusterIP"}
    own = {
        frozenset({"finetune.dev/server"}),
        frozenset({"finetune.dev/pipeline", "finetune.dev/stage"}),
    }
    assert {frozenset(service["selector"]) for service in services} == own
    assert not any(
        service.keys() & {"externalIPs", "externalName"} for service in services
    )
