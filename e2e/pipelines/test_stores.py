"""A pipeline whose inputs and models are in stores: it serves an image by its digest until a better model is served.

The tests of this file share one pipeline and run in order.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.pipelines.chart import NAMESPACE, RELEASE, Operator
from e2e.pipelines.driver import Object, PipelineDriver, memory
from e2e.pipelines.stores import DATA_FILE, DATASET, Stores, running_stores
from e2e.reference_run import make_material, upload
from testcluster.kube_namespace import KubeNamespace, pod, temporary_namespace
from testcluster.provider import Provider

PROMPT = "Return the current event loop.\nModule:"
ENDPOINT = "http://bot-deploy.stores.svc:8000/v1"
REACHED = 0.0
UNREACHABLE = 1.1
"""Accuracies that every model and no model has."""


@pytest.fixture(scope="module")
def namespace(cluster: Provider) -> Iterator[KubeNamespace]:
    """The namespace of the pipeline."""
    with temporary_namespace(cluster.kube, "stores") as created:
        yield created


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's base model and data."""
    folder = tmp_path_factory.mktemp("stores") / "material"
    make_material(folder)
    return folder


@pytest.fixture(scope="module")
def stores(
    cluster: Provider,
    namespace: KubeNamespace,
    material: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stores]:
    """The stores; their addresses and credentials are in the Secret `stores`."""
    with running_stores(
        cluster, namespace, tmp_path_factory.mktemp("servers"), material
    ) as stores:
        namespace.create(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": "stores"},
                "stringData": stores.environment,
            }
        )
        yield stores


@pytest.fixture(scope="module")
def driver(
    operator: Operator, namespace: KubeNamespace, stores: Stores, material: Path
) -> PipelineDriver:
    """The pipeline, applied to the cluster; the claim `tasks` has the evaluation task, which must be on a volume."""
    namespace.claim("tasks")
    namespace.create(
        pod("filler", "busybox sleep 3600", claims={"tasks": "/claims/tasks"}, grace=1)
    )
    namespace.wait_phase("filler", "Running")
    upload(namespace, material / "data", "/claims/tasks")
    return PipelineDriver.start(namespace, manifest(stores))


def manifest(stores: Stores) -> Object:
    """Return the pipeline."""
    spec: Object = {
        "model": {"uri": stores.uri("base-model")},
        "datasets": [{"uri": f"hf://{DATASET}", "split": "train"}],
        "podDefaults": {
            "envFrom": [{"secretRef": {"name": "stores"}}],
            "resources": memory("2Gi"),
        },
        "workspace": {"size": "1Gi"},
        "prepare": {"contextLength": 128},
        "train": {
            "maxSteps": 20,
            "microBatchSize": 8,
            "dtype": "FP32",
            # Within 20 steps the model learns to answer with the name of a module: no text fails the smoke test.
            "optimizer": {"learningRate": 0.005},
        },
        "evaluate": {
            "tasks": [
                {"name": "docstrings", "file": "pvc://tasks/task.yaml", "limit": 16}
            ],
            "gates": [gate(REACHED)],
        },
        "push": {
            "targets": [
                {"uri": f"oci://{stores.registry}/team/bot"},
                {"uri": stores.uri("bot")},
            ],
            "dtype": "FP32",
            "when": "Always",
        },
        "deploy": {
            "engine": "Transformers",
            "when": "GatesPassed",
            "smokeTest": {"prompt": PROMPT, "maxTokens": 8},
        },
    }
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTunePipeline",
        "metadata": {"name": "bot"},
        "spec": spec,
    }


def gate(accuracy: float) -> Object:
    """Return a gate that needs this accuracy."""
    return {
        "task": "docstrings",
        "metric": "acc",
        "operator": "GreaterThanOrEqual",
        "value": accuracy,
    }


def server(driver: PipelineDriver) -> Object:
    """Wait until there is only one Deployment, and return it."""

    def only() -> list[Object]:
        deployments = json.loads(
            driver.namespace.run("get", "deployments", "-o", "json")
        )
        servers: list[Object] = deployments["items"]
        return servers if len(servers) == 1 else []

    return dict(driver.until(only)[0])


def running_pods(driver: PipelineDriver) -> list[str]:
    """Return the server's pods that are ready, as pod/NAME."""
    selector = f"finetune.dev/server={server(driver)['metadata']['name']}"
    ready = '{range .items[?(@.status.containerStatuses[0].ready==true)]}pod/{.metadata.name}{"\\n"}{end}'
    return driver.namespace.run(
        "get", "pods", "-l", selector, "-o", f"jsonpath={ready}"
    ).split()


def ask(driver: PipelineDriver, client: str) -> str:
    """Return the answer of the Service to the prompt; `client` names the pod that asks."""
    body = json.dumps(
        {"model": "bot", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    )
    script = f"busybox wget -qO- --header 'Content-Type: application/json' --post-data '{body}' {ENDPOINT}/completions"
    return str(
        json.loads(driver.namespace.run_script(script, name=client))["choices"][0][
            "text"
        ]
    )


def may(kube_namespace: KubeNamespace, verb: str, group: str, resource: str) -> bool:
    """Return whether the operator's ServiceAccount may do something in the namespace."""
    attributes = {
        "namespace": kube_namespace.name,
        "verb": verb,
        "group": group,
        "resource": resource,
    }
    user = f"system:serviceaccount:{NAMESPACE}:{RELEASE}"
    groups = [
        "system:serviceaccounts",
        f"system:serviceaccounts:{NAMESPACE}",
        "system:authenticated",
    ]
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "groups": groups, "resourceAttributes": attributes},
    }
    answer = kube_namespace.kube.run(
        "create", "-f", "-", "-o", "json", given=json.dumps(review)
    )
    return bool(json.loads(answer)["status"]["allowed"])


def test_operator_may_not_read_the_credentials(driver: PipelineDriver):
    allowed = {
        verb: may(driver.namespace, verb, "", "secrets")
        for verb in ("get", "list", "watch")
    }
    assert allowed == {"get": False, "list": False, "watch": False}
    assert may(driver.namespace, "create", "batch", "jobs")


def test_model_is_published_to_registry_and_bucket(
    driver: PipelineDriver, stores: Stores
):
    status = driver.wait_finished(seconds=420)
    assert stores.hub.downloads()[DATA_FILE] == 1
    image, objects = status["stages"]["push"]["result"]["published"]
    assert image["uri"].startswith(f"oci://{stores.registry}/team/bot@sha256:")
    assert objects["uri"].startswith(stores.uri("bot/sha256-"))
    assert image["digest"] == objects["digest"] == status["model"]["digest"]
    assert status["model"]["uri"] == image["uri"]
    newest = (stores.bucket / "bot" / "latest").read_text().strip()
    assert stores.uri(f"bot/{newest}") == objects["uri"]
    assert (stores.bucket / "bot" / newest / "model.safetensors").is_file()


def test_image_volume_is_served_by_digest(driver: PipelineDriver):
    status = driver.wait_finished(seconds=420)
    template = server(driver)["spec"]["template"]["spec"]
    [image] = [
        volume["image"]["reference"]
        for volume in template["volumes"]
        if "image" in volume
    ]
    assert f"oci://{image}" == status["model"]["uri"]
    assert status["model"]["endpoint"] == ENDPOINT
    assert ask(driver, "first-client") == status["stages"]["deploy"]["result"]["answer"]


@pytest.mark.skipif(
    os.environ.get("STORES") != "all",
    reason="a minute, and tests/unit/core/test_servers.py has the decision; set STORES=all",
)
def test_failed_gate_keeps_the_old_server(driver: PipelineDriver, stores: Stores):
    old = server(driver)
    published = driver.status["model"]
    answer = driver.stage("deploy")["result"]["answer"]
    driver.patch(train={"maxSteps": 40}, evaluate={"gates": [gate(UNREACHABLE)]})
    status = driver.wait_finished("BelowThreshold", seconds=420)
    assert (status["gatesPassed"], status["stages"]["deploy"]["state"]) == (
        False,
        "Skipped",
    )
    assert (
        status["stages"]["push"]["result"]["published"][0]["digest"]
        != published["digest"]
    )
    assert server(driver)["metadata"]["uid"] == old["metadata"]["uid"]
    assert ask(driver, "second-client") == answer

    [running] = running_pods(driver)
    driver.namespace.run("delete", running)
    driver.until(lambda: running_pods(driver) not in ([], [running]), 120)
    assert ask(driver, "third-client") == answer


@pytest.mark.skipif(
    os.environ.get("STORES") != "all",
    reason="tests/integration/stores downloads from the same servers; set STORES=all",
)
def test_model_in_a_bucket_is_downloaded_by_its_server(
    driver: PipelineDriver, stores: Stores
):
    old = server(driver)
    driver.patch(
        push={"targets": [{"uri": stores.uri("bot")}]},
        evaluate={"gates": [gate(REACHED)]},
    )
    status = driver.wait_finished(seconds=420)
    assert status["model"]["uri"].startswith(stores.uri("bot/sha256-"))
    assert server(driver)["metadata"]["uid"] != old["metadata"]["uid"]
    assert not [
        volume
        for volume in server(driver)["spec"]["template"]["spec"]["volumes"]
        if "image" in volume
    ]
    assert (
        ask(driver, "fourth-client") == status["stages"]["deploy"]["result"]["answer"]
    )
