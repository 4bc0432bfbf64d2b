"""Training on several nodes with the chart's rights and policies on an API server with its controllers; KWOK's nodes.

If a kubelet would end a pod, the test writes its status: KWOK removes deleted pods at once.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.operator.charts import CLUSTER_WIDE, render
from support.operator.operator_process import install_crd, running_operator
from support.operator.pipeline_objects import pipeline_manifest
from support.operator.scenario import ALL_STAGES
from support.operator.simulated_kubelet import SimulatedKubelet

from e2e.pipelines.driver import Object, PipelineDriver, merged
from testcluster.fixtures import namespace_name
from testcluster.kube_namespace import KubeNamespace, temporary_namespace
from testcluster.provider import Provider

TOLERATED = [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}]
LONG = [{"name": "FAKE_SECONDS", "value": "3600"}]
"""KWOK's pods of a Job succeed after a second otherwise."""


@pytest.fixture
def team(
    control_plane: Provider, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[KubeNamespace]:
    """The namespace of a team, which enforces Pod Security "restricted", with an operator."""
    install_crd(control_plane.kube)
    with (
        temporary_namespace(
            control_plane.kube, namespace_name(f"{request.node.name}-operator")
        ) as own,
        temporary_namespace(
            control_plane.kube, namespace_name(request.node.name)
        ) as created,
        running_operator(
            own, render(CLUSTER_WIDE, namespace=own.name), tmp_path
        ) as log,
    ):
        yield created
        print(log.read_text())


def start(
    namespace: KubeNamespace, gpus: int = 1, **train: Object | int
) -> PipelineDriver:
    """Start a pipeline that trains until the test ends its pods."""
    spec = {
        key: value for key, value in ALL_STAGES.items() if key in {"model", "datasets"}
    }
    pod = {
        "env": LONG,
        "resources": {"limits": {"nvidia.com/gpu": gpus}},
    }
    more = {
        "podDefaults": {"tolerations": TOLERATED},
        "workspace": {"size": "1Gi", "accessMode": "ReadWriteMany"},
        "train": merged({"nodes": 2, "pod": pod}, train),
    }
    return PipelineDriver.start(namespace, pipeline_manifest("wide", {**spec, **more}))


def conditions(driver: PipelineDriver, attempt: int) -> dict[str, str]:
    """Return the reason of each condition of the Job of an attempt."""
    jobs = {
        job["metadata"]["labels"]["finetune.dev/attempt"]: job
        for job in driver.jobs("train")
    }
    job_conditions = jobs[str(attempt)]["status"].get("conditions", [])
    return {
        condition["type"]: condition.get("reason", "")
        for condition in job_conditions
        if condition["status"] == "True"
    }


def live_pods(driver: PipelineDriver, attempt: int) -> list[str]:
    """Return the names of the pods of an attempt that have not ended."""
    selector = f"finetune.dev/stage=train,finetune.dev/attempt={attempt}"
    items = json.loads(
        driver.namespace.run("get", "pods", "-l", selector, "-o", "json")
    )["items"]
    return [
        pod["metadata"]["name"]
        for pod in items
        if pod["status"]["phase"] not in {"Succeeded", "Failed"}
    ]


def test_eviction_of_one_pod_ends_the_attempt_and_all_pods(team: KubeNamespace):
    driver = start(team)
    kubelet = SimulatedKubelet(team)
    driver.wait_state("train", "Running", seconds=120)
    service = team.get("service", "wide-train")
    assert (
        service["spec"]["clusterIP"],
        service["spec"]["publishNotReadyAddresses"],
    ) == (
        "None",
        True,
    )
    [first] = kubelet.running("train", 0)
    [second] = kubelet.running("train", 1)
    assert {pod["spec"]["subdomain"] for pod in (first, second)} == {"wide-train"}
    assert (
        first["spec"]["hostname"] == f"{driver.jobs('train')[0]['metadata']['name']}-0"
    )

    kubelet.evict("train", 1)
    driver.until(
        lambda: driver.stage("train")["attempts"][0]["outcome"] == "Interrupted"
    )
    attempt = driver.stage("train")["attempts"][0]
    assert attempt["message"].startswith(
        f"pod 1: EvictionByEvictionAPI on {second['spec']['nodeName']}"
    )
    assert conditions(driver, 1)["Failed"] == "PodFailurePolicy"
    assert live_pods(driver, 1) == [], "Kubernetes stops the pod whose peer is gone"
    driver.until(lambda: len(live_pods(driver, 2)) == 2)
    assert driver.status["interruptions"] == 1
    assert driver.stage("train")["failures"] == 0


def test_success_of_the_first_pod_ends_the_others(team: KubeNamespace):
    """A worker that hangs at its end holds its GPUs no longer."""
    driver = start(team)
    kubelet = SimulatedKubelet(team)
    driver.wait_state("train", "Running", seconds=120)
    kubelet.succeed("train", 0)
    status = driver.wait_finished(seconds=120)
    assert [
        attempt["outcome"] for attempt in status["stages"]["train"]["attempts"]
    ] == ["Succeeded"]
    driver.until(lambda: conditions(driver, 1).get("Complete") == "SuccessPolicy")
    assert live_pods(driver, 1) == []


def test_attempt_with_too_few_nodes_gives_them_up(team: KubeNamespace):
    """The cluster has three nodes with eight GPUs each; the fourth pod waits, and the other three hold theirs."""
    placement = {"capacity": "OnDemand", "fallback": {"afterPendingSeconds": 20}}
    driver = start(team, gpus=8, nodes=4, placement=placement)
    # At first the scheduler is still binding the three that fit.
    driver.until(
        lambda: (
            driver.stage("train")
            .get("message", "")
            .startswith("1 of 4 pods have no node; pod ")
        ),
        120,
    )
    driver.until(lambda: driver.stage("train")["attempts"][0]["outcome"] == "Stopped")
    assert driver.stage("train")["attempts"][0]["reason"] == "WaitingForCapacity"
    assert live_pods(driver, 1) == []
    driver.patch(train={"nodes": 3})
    driver.wait_state("train", "Running", seconds=120)
    assert (
        driver.status.get("interruptions", 0),
        driver.stage("train")["failures"],
    ) == (0, 0)
