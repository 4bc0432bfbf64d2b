"""A pipeline that trains on two nodes and loses one of them ends with the bytes of an undisturbed pipeline."""

import json
from pathlib import Path

import yaml

from e2e.pipelines.chart import Operator
from e2e.pipelines.driver import Object, PipelineDriver, evict, merged
from e2e.pipelines.test_evictions import SPOT
from e2e.progress import wait_for_step
from e2e.reference_run import MANIFEST, ReferenceRun, make_material, upload_material
from testcluster.kube_namespace import KubeNamespace
from testcluster.nodes import NAME
from testcluster.provider import Provider

CHECKPOINT_STEPS = 10
STEPS = 60
APART = {
    "podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {
                "labelSelector": {"matchLabels": {"finetune.dev/stage": "train"}},
                "topologyKey": "kubernetes.io/hostname",
            }
        ]
    }
}
"""The pods of an attempt run on two nodes; both would fit on a single node."""
FIRST_INDEX = 0
SECOND_INDEX = 1


def training(name: str) -> Object:
    """Return the demo's manifest up to the end of a short training on two spot nodes."""
    manifest: Object = yaml.safe_load(MANIFEST.read_text())
    spec = manifest["spec"]
    kept = {
        key: spec[key] for key in ("seed", "model", "datasets", "validation", "prepare")
    }
    train = {key: value for key, value in spec["train"].items() if key != "epochs"}
    more = {
        "nodes": 2,
        "maxSteps": STEPS,
        "checkpoint": {"everySteps": CHECKPOINT_STEPS},
        "pod": {"affinity": APART, "resources": {"requests": {"cpu": "500m"}}},
    }
    workspace = {**spec["workspace"], "accessMode": "ReadWriteMany"}
    train = merged(merged(train, SPOT), more)
    return {
        **manifest,
        "metadata": {"name": name},
        "spec": {**kept, "workspace": workspace, "train": train},
    }


def wait_for_attempt_step(driver: PipelineDriver, attempt: int, step: int) -> Object:
    """Wait until an attempt of the train stage has reached a step; return the progress of its first pod."""
    driver.until(lambda: len(driver.stage("train").get("attempts", [])) == attempt, 180)
    return wait_for_step(driver.namespace, selector(driver, FIRST_INDEX), step)


def selector(driver: PipelineDriver, index: int) -> str:
    job = driver.stage("train")["attempts"][-1]["job"]
    return f"batch.kubernetes.io/job-name={job},batch.kubernetes.io/job-completion-index={index}"


def pod_of(driver: PipelineDriver, index: int) -> Object:
    """Return the pod of the newest attempt with this index."""
    pods: list[Object] = json.loads(
        driver.namespace.run("get", "pods", "-l", selector(driver, index), "-o", "json")
    )["items"]
    return pods[0]


def weights_of(driver: PipelineDriver) -> str:
    """Return the SHA-256 of the adapter that the training has left on its claim."""
    path = f"/workspace/train/{driver.stage('train')['identity']}/output/adapter_model.safetensors"
    claims = {f"{driver.name}-workspace": "/workspace"}
    return driver.namespace.run_script(
        f"busybox sha256sum {path}", f"sum-of-{driver.name}", claims=claims
    ).split()[0]


def test_two_nodes_with_one_lost_end_with_the_same_bytes(
    operator: Operator,
    namespace: KubeNamespace,
    cluster: Provider,
    lost_nodes: list[str],
    tmp_path: Path,
):
    """The pod on the second node is evicted with notice, and its successor's node is deleted without."""
    make_material(tmp_path)
    upload_material(namespace, ReferenceRun(tmp_path, tmp_path, ""))
    calm = PipelineDriver.start(namespace, training("calm"))
    calm.wait_finished(seconds=600)
    assert [attempt["outcome"] for attempt in calm.stage("train")["attempts"]] == [
        "Succeeded"
    ]

    driver = PipelineDriver.start(namespace, training("disturbed"))
    wait_for_attempt_step(driver, 1, CHECKPOINT_STEPS + 2)
    first = pod_of(driver, FIRST_INDEX)
    second = pod_of(driver, SECOND_INDEX)
    assert first["spec"]["nodeName"] != second["spec"]["nodeName"]
    evict(namespace, second["metadata"]["name"])
    driver.until(
        lambda: driver.stage("train")["attempts"][0]["outcome"] != "Running", 90
    )
    evicted = driver.stage("train")["attempts"][0]
    assert (evicted["outcome"], evicted["exitCode"]) == ("Interrupted", 75), (
        driver.describe()
    )
    assert evicted["message"].startswith(
        f"pod 1: EvictionByEvictionAPI on {second['spec']['nodeName']}"
    )
    assert f"saved at step {evicted['lastStep']}" in evicted["message"], (
        "the first pod saves the step at which both stopped"
    )

    progress = wait_for_attempt_step(
        driver, 2, evicted["lastStep"] + CHECKPOINT_STEPS + 2
    )
    assert progress["startStep"] == evicted["lastStep"]
    host = namespace.get("node", pod_of(driver, SECOND_INDEX)["spec"]["nodeName"])
    lost_nodes.append(host["metadata"]["labels"][NAME])
    cluster.delete(lost_nodes[-1])
    driver.until(
        lambda: driver.stage("train")["attempts"][1]["outcome"] != "Running", 240
    )
    lost = driver.stage("train")["attempts"][1]
    assert lost["outcome"] == "Interrupted", driver.describe()
    assert lost["message"].startswith(
        f"pod 1: DeletionByPodGC on {host['metadata']['name']}"
    )

    status = driver.wait_finished(seconds=600)
    attempts = status["stages"]["train"]["attempts"]
    assert [attempt["outcome"] for attempt in attempts] == [
        "Interrupted",
        "Interrupted",
        "Succeeded",
    ]
    assert attempts[2]["startStep"] >= progress["step"], (
        "the pod on the other node saves the last finished step"
    )
    assert (status["interruptions"], status["stages"]["train"]["failures"]) == (2, 0)
    assert weights_of(driver) == weights_of(calm)
