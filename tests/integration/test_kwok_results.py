"""Jobs on kwok nodes: their pods leave the results that the operator reads."""

import json
from collections.abc import Iterator

import pytest

from finetune_trainer.contract import TerminationMessage
from testcluster.fixtures import namespace_name
from testcluster.kube_namespace import KubeNamespace, temporary_namespace, until
from testcluster.provider import Provider

STAGES = ("prepare", "train", "evaluate", "push")
UNRESTRICTED = {"pod-security.kubernetes.io/enforce": "privileged"}
IDENTITY = "0123456789abcdef"


@pytest.fixture
def namespace(
    control_plane: Provider, request: pytest.FixtureRequest
) -> Iterator[KubeNamespace]:
    with temporary_namespace(
        control_plane.kube, namespace_name(request.node.name), UNRESTRICTED
    ) as created:
        yield created


def job(name, labels, env=()):
    container = {
        "name": "stage",
        "image": "none",
        "env": list(env),
    }
    tolerations = [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}]
    spec = {
        "restartPolicy": "Never",
        "tolerations": tolerations,
        "containers": [container],
    }
    template = {"metadata": {"labels": labels}, "spec": spec}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"template": template},
    }


def apply(namespace, *jobs):
    namespace.run(
        "apply",
        "-f",
        "-",
        given=json.dumps({"apiVersion": "v1", "kind": "List", "items": jobs}),
    )


def pods(namespace, phase):
    """The termination message of the pods in this phase, by the name of their Job."""
    items = json.loads(
        namespace.run(
            "get", "pods", "-o", "json", f"--field-selector=status.phase={phase}"
        )
    )["items"]
    states = {
        pod["metadata"]["labels"]["job-name"]: pod["status"]["containerStatuses"][0][
            "state"
        ]
        for pod in items
    }
    return {
        name: state.get("terminated", {}).get("message", "")
        for name, state in states.items()
    }


def test_pod_of_each_stage_leaves_a_valid_result(namespace: KubeNamespace):
    labels = {
        stage: {"finetune.dev/stage": stage, "finetune.dev/identity": IDENTITY}
        for stage in STAGES
    }
    apply(namespace, *(job(stage, labels[stage]) for stage in STAGES))
    until(lambda: len(pods(namespace, "Succeeded")) == len(STAGES), 60)
    messages = pods(namespace, "Succeeded")
    results = {
        name: TerminationMessage.model_validate_json(text).result
        for name, text in messages.items()
    }
    assert {
        name: (result.stage, result.identity)
        for name, result in results.items()
        if result
    } == {stage: (stage, IDENTITY) for stage in STAGES}


def test_other_job_succeeds_without_a_message(namespace: KubeNamespace):
    apply(
        namespace,
        job("plain", {}),
        job("held", {}, [{"name": "FAKE_SECONDS", "value": "1000"}]),
    )
    assert until(lambda: pods(namespace, "Succeeded"), 60) == {"plain": ""}
    assert until(lambda: pods(namespace, "Running"), 60) == {"held": ""}
