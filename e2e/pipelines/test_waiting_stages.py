"""Stages that wait on real nodes: a suspended Job counts no time, and a pod that does not start has its fix."""

import pytest

from e2e.pipelines.driver import Object, PipelineDriver, pipeline
from e2e.pipelines.test_blocked_stages import wait_blocked
from testcluster.kube_namespace import KubeNamespace

pytestmark = pytest.mark.usefixtures("operator")
RUNTIME = "no-such-runtime"


def suspend(driver: PipelineDriver, *, suspended: bool) -> None:
    """Do what a queue does with the Job of prepare."""
    [job] = driver.jobs("prepare")
    value = str(suspended).lower()
    patch = f'{{"spec": {{"suspend": {value}}}}}'
    name = job["metadata"]["name"]
    driver.namespace.run("patch", "job", name, "--type=merge", "-p", patch)


def test_suspended_job_waits_without_a_clock(namespace: KubeNamespace):
    manifest = pipeline(
        "queued", steps={"prepare": 60}, prepare={"maxRuntimeSeconds": 40}
    )
    driver = PipelineDriver.start(namespace, manifest)
    driver.wait_state("prepare", "Running")
    suspend(driver, suspended=True)
    wait_blocked(driver, "WaitingForQuota", "is suspended")
    assert driver.status["phase"] == "Pending"
    assert driver.stage("prepare")["interruptions"] == 1
    # The object of the pod may outlive its process for a moment.
    driver.until(lambda: not driver.namespace.run("get", "pods", "-o", "name"))
    suspend(driver, suspended=False)
    driver.wait_finished()
    [attempt] = driver.stage("prepare")["attempts"]
    assert attempt["suspensions"] == 1
    assert attempt["suspendedSeconds"] > 0


def runtime_class() -> Object:
    return {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": RUNTIME},
        "handler": RUNTIME,
    }


def test_runtime_class_without_handler_blocks(namespace: KubeNamespace):
    namespace.create(runtime_class())
    try:
        pod = {"pod": {"runtimeClassName": RUNTIME}}
        driver = PipelineDriver.start(namespace, pipeline("runtime", prepare=pod))
        wait_blocked(driver, "ContainerNotStarted", "correct the stage's runtimeClass")
    finally:
        namespace.run("delete", "runtimeclass", RUNTIME)


def test_missing_key_of_a_configmap_blocks(namespace: KubeNamespace):
    settings = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "my-secret-settings"},
        "data": {"other": "x"},
    }
    namespace.create(settings)
    source = {"configMapKeyRef": {"name": "my-secret-settings", "key": "level"}}
    pod = {"pod": {"env": [{"name": "LEVEL", "valueFrom": source}]}}
    driver = PipelineDriver.start(namespace, pipeline("key", prepare=pod))
    fix = "the ConfigMap my-secret-settings has no key level: add it"
    wait_blocked(driver, "ConfigMapNotFound", fix)
