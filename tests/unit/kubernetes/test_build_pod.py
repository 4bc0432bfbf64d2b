"""The user's pod in the Job and in the Deployment: both are built from it, and the operator's own fields win."""

from typing import Any

import pytest
from support.operator.built_objects import Object, built_objects
from support.operator.scenario import ALL_STAGES, merged

FULL: dict[str, Any] = {
    "imagePullPolicy": "IfNotPresent",
    "imagePullSecrets": [{"name": "registry"}],
    "resources": {"requests": {"cpu": "2"}, "limits": {"memory": "16Gi"}},
    "env": [
        {"name": "PLAIN", "value": "$(A) 1"},
        {
            "name": "TOKEN",
            "valueFrom": {
                "secretKeyRef": {"name": "hub", "key": "token", "optional": True}
            },
        },
        {
            "name": "PLACE",
            "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "place"}},
        },
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ],
    "envFrom": [
        {"secretRef": {"name": "hub"}},
        {"prefix": "S_", "configMapRef": {"name": "settings", "optional": True}},
    ],
    "nodeSelector": {"pool": "big"},
    "tolerations": [
        {
            "key": "dedicated",
            "operator": "Equal",
            "value": "nlp",
            "effect": "NoSchedule",
        }
    ],
    "affinity": {"podAntiAffinity": {}},
    "labels": {
        "kueue.x-k8s.io/queue-name": "nlp",
        "app.kubernetes.io/managed-by": "me",
    },
    "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"},
    "serviceAccountName": "trainer",
    "priorityClassName": "batch",
    "schedulerName": "binpack",
    "runtimeClassName": "nvidia",
}
WAYS = {
    "as defaults": {"podDefaults": FULL},
    "as own pod": {"train": {"pod": FULL}, "deploy": {"pod": FULL}},
}


def workload(stage: str, **changes: Any) -> Object:
    """Return the Job or Deployment of a stage."""
    manifest = {
        "metadata": {"name": "demo"},
        "spec": merged(ALL_STAGES, changes),
    }
    return built_objects(manifest, "team").workloads[stage]


def pod_of(raw: Object) -> Object:
    spec: Object = raw["spec"]["template"]["spec"]
    return spec


def container_of(raw: Object) -> Object:
    [container] = pod_of(raw)["containers"]
    return container


def variables(raw: Object) -> dict[str, Object]:
    env = container_of(raw)["env"]
    assert len({variable["name"] for variable in env}) == len(env), (
        "a variable is set twice"
    )
    return {variable["name"]: variable for variable in env}


@pytest.fixture(params=list(WAYS.values()), ids=list(WAYS))
def changes(request):
    return request.param


@pytest.fixture(params=["train", "deploy"])
def raw(request, changes):
    return workload(request.param, **changes)


def test_pod_has_every_field_of_the_users_pod(raw):
    pod = pod_of(raw)
    for field in (
        "imagePullSecrets",
        "affinity",
        "serviceAccountName",
        "priorityClassName",
        "schedulerName",
    ):
        assert pod[field] == FULL[field]
    assert pod["runtimeClassName"] == "nvidia"
    assert pod["nodeSelector"] == {"pool": "big"}
    assert FULL["tolerations"][0] in pod["tolerations"]
    assert container_of(raw)["imagePullPolicy"] == "IfNotPresent"
    assert container_of(raw)["resources"] == FULL["resources"]


def test_absent_fields_of_the_pod_are_absent():
    for stage in ("train", "deploy"):
        pod = pod_of(workload(stage))
        absent = {
            "imagePullSecrets",
            "affinity",
            "serviceAccountName",
            "schedulerName",
            "runtimeClassName",
        }
        assert not absent & pod.keys()
        assert "imagePullPolicy" not in container_of(workload(stage))


def test_references_are_passed_on_and_texts_are_escaped(raw):
    env = variables(raw)
    for variable in FULL["env"][1:]:
        assert env[variable["name"]] == variable
    assert env["PLAIN"] == {"name": "PLAIN", "value": "$$(A) 1"}
    assert container_of(raw)["envFrom"] == FULL["envFrom"]


def test_variables_of_the_stage_contract_are_the_operators(raw):
    env = variables(raw)
    own = {name for name in env if name.startswith("FINETUNE_")}
    assert "FINETUNE_CONFIG" in own
    assert all(
        "value" in env[name] for name in own
    )  # env wins over envFrom, so no Secret replaces them


@pytest.mark.parametrize("stage", ["train", "deploy"])
@pytest.mark.parametrize(
    "source",
    [{"value": "0"}, {"valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}],
    ids=str,
)
def test_metrics_port_may_be_the_users(stage, source):
    port = {"name": "FINETUNE_METRICS_PORT", **source}
    assert (
        variables(workload(stage, podDefaults={"env": [port]}))["FINETUNE_METRICS_PORT"]
        == port
    )


def test_reference_replaces_a_default_of_the_operator():
    entry = {
        "name": "PYTHONUNBUFFERED",
        "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}},
    }
    for stage in ("train", "deploy"):
        assert (
            variables(workload(stage, podDefaults={"env": [entry]}))["PYTHONUNBUFFERED"]
            == entry
        )


def test_labels_and_annotations_are_on_object_and_pod(raw):
    stage = "deploy" if raw["kind"] == "Deployment" else "train"
    for meta in (raw["metadata"], raw["spec"]["template"]["metadata"]):
        assert meta["labels"]["kueue.x-k8s.io/queue-name"] == "nlp"
        assert meta["labels"]["app.kubernetes.io/managed-by"] == "finetune-operator"
        assert meta["labels"]["finetune.dev/stage"] == stage
        assert (
            meta["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"]
            == "false"
        )
        assert meta["annotations"]["finetune.dev/pipeline-name"] == "demo"


def test_own_pod_replaces_a_default_in_the_job():
    defaults = {
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
        "labels": {"team": "nlp"},
    }
    own = {
        "pod": {
            "env": [{"name": "B", "value": "3"}],
            "labels": {"team": "own"},
        }
    }
    built = workload("train", podDefaults=defaults, train=own)
    env = variables(built)
    assert env["A"]["value"] == "1"
    assert env["B"]["value"] == "3"
    assert built["metadata"]["labels"]["team"] == "own"
    assert (
        workload("prepare", podDefaults=defaults, train=own)["metadata"]["labels"][
            "team"
        ]
        == "nlp"
    )


def test_gpu_of_the_defaults_is_announced_and_tolerated():
    limits = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    built = workload("train", podDefaults=limits)
    assert variables(built)["FINETUNE_GPUS"]["value"] == "1"
    assert "nvidia.com/gpu" in {
        toleration["key"] for toleration in pod_of(built)["tolerations"]
    }
    server = workload("deploy", podDefaults=limits)
    [verify] = pod_of(server)["initContainers"]
    assert container_of(server)["resources"] == limits["resources"]
    assert verify["resources"] == {}


def test_claim_and_service_have_no_labels_of_pods():
    manifest = {
        "metadata": {"name": "demo"},
        "spec": merged(ALL_STAGES, {"podDefaults": FULL}),
    }
    objects = built_objects(manifest, "team")
    assert objects.service
    for child in (objects.claim, objects.service):
        assert "kueue.x-k8s.io/queue-name" not in child["metadata"].get("labels", {})
