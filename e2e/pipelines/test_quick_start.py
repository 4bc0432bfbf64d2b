"""The demo's manifest on a cluster: evicted during training, it publishes the model of the local run and serves it.

The tests of this file share one pipeline and run in order.
"""

import hashlib
import json
from collections.abc import Iterator

import pytest
import yaml

from e2e.pipelines.chart import Operator
from e2e.pipelines.driver import Object, PipelineDriver, evict
from e2e.reference_run import MANIFEST, ReferenceRun, upload_material
from testcluster.kube_namespace import pod, temporary_namespace, until
from testcluster.provider import Provider

PROMPT = yaml.safe_load(MANIFEST.read_text())["spec"]["deploy"]["smokeTest"]["prompt"]
WEIGHTS = "published/docstrings/latest/model.safetensors"
ENDPOINT = "http://docstrings-deploy.quick-start.svc:8000/v1"
# Sends up to ten requests a second, each over a new connection, and prints a line for each request: answered or lost.
CLIENT = """
import json, time, urllib.request
body = json.dumps({"model": "docstrings", "prompt": "Return", "max_tokens": 1, "temperature": 0}).encode()
while True:
    try:
        request = urllib.request.Request("%s/completions", body, {"Content-Type": "application/json"})
        json.load(urllib.request.urlopen(request, timeout=30))["choices"]
        print("answered", flush=True)
    except Exception as error:
        print("lost", repr(error), flush=True)
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def driver(
    cluster: Provider, operator: Operator, reference_run: ReferenceRun
) -> Iterator[PipelineDriver]:
    """The demo's pipeline, applied to the cluster."""
    with temporary_namespace(cluster.kube, "quick-start") as namespace:
        upload_material(namespace, reference_run)
        manifest = yaml.safe_load(MANIFEST.read_text())
        # A base model trained for one step does not pass the manifest's own gate.
        manifest["spec"]["evaluate"]["gates"][0]["value"] = 0.0
        yield PipelineDriver.start(namespace, manifest)


def servers(driver: PipelineDriver) -> list[Object]:
    deployments = json.loads(driver.namespace.run("get", "deployments", "-o", "json"))
    return list(deployments["items"])


def test_evicted_pipeline_publishes_the_reference_model(
    driver: PipelineDriver, reference_run: ReferenceRun
):
    driver.wait_state("train", "Running", seconds=120)
    driver.until(
        lambda: (driver.stage("train").get("progress") or {}).get("step", 0) > 40, 120
    )
    progress = driver.stage("train")["progress"]
    assert progress["total"] == 342
    assert progress["tokensPerSecond"] > 0
    row = driver.namespace.run("get", "ft", "docstrings", "--no-headers").split()
    assert row[1:3] == ["Running", "train"]
    assert row[3].endswith("%")
    evict(driver.namespace, driver.pod("train").partition("/")[2])
    driver.until(lambda: len(driver.stage("train")["attempts"]) == 2, 90)

    driver.namespace.run(
        "wait",
        "--for=condition=Finished",
        "--timeout=300s",
        "ft/docstrings",
        timeout=310,
    )
    driver.namespace.run(
        "wait", "--for=condition=Ready", "--timeout=0", "ft/docstrings"
    )
    status = driver.status
    assert status["phase"] == "Succeeded", driver.describe()
    first, second = status["stages"]["train"]["attempts"]
    assert (first["outcome"], first["exitCode"], second["outcome"]) == (
        "Interrupted",
        75,
        "Succeeded",
    )
    assert second["startStep"] == first["lastStep"]  # no step is repeated
    assert status["interruptions"] == 1
    curve = status["stages"]["train"]["lossCurve"]  # of both attempts
    assert (curve["everySteps"], curve["step"], len(curve["losses"])) == (6, 342, 57)
    assert status["gatesPassed"]
    reference_run.run("push")
    expected = hashlib.sha256(
        (reference_run.material / WEIGHTS).read_bytes()
    ).hexdigest()
    actual = driver.namespace.run(
        "exec", "filler", "--", "busybox", "sha256sum", f"/claims/demo/{WEIGHTS}"
    )
    assert actual.split()[0] == expected


def test_model_is_served_at_the_endpoint_in_the_status(driver: PipelineDriver):
    status = driver.wait_finished(seconds=300)
    assert status["model"]["endpoint"] == ENDPOINT
    assert driver.condition("Deployed")["status"] == "True"
    result = status["stages"]["deploy"]["result"]
    body = json.dumps(
        {"model": "docstrings", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    )
    script = f"busybox wget -qO- --header 'Content-Type: application/json' --post-data '{body}' {ENDPOINT}/completions"
    response = json.loads(driver.namespace.run_script(script, name="request"))
    assert response["choices"][0]["text"] == result["answer"]


def test_new_model_takes_over_without_a_lost_request(driver: PipelineDriver):
    driver.wait_finished(seconds=300)
    [old] = servers(driver)
    client = pod(
        "client",
        "",
        image="finetune-trainer-cpu:dev",
        command=["python", "-c", CLIENT % ENDPOINT],
        grace=1,
    )
    driver.namespace.create(client)
    driver.namespace.wait_phase("client", "Running")
    until(lambda: "answered" in driver.namespace.run("logs", "client"), 60)
    driver.patch(push={"dtype": "FP16"})
    driver.wait_finished(seconds=300)
    driver.until(lambda: len(servers(driver)) == 1)
    [new] = servers(driver)
    assert new["metadata"]["uid"] != old["metadata"]["uid"]
    log = driver.namespace.run("logs", "client").splitlines()
    assert len(log) > 20
    assert [line for line in log if line.startswith("lost")] == []
    driver.namespace.run("delete", "pod", "client", "--wait=false")


def test_evicted_server_is_reported_until_it_is_replaced(driver: PipelineDriver):
    driver.wait_finished(seconds=300)
    [server] = servers(driver)
    name = server["metadata"]["name"]
    [running] = driver.namespace.run(
        "get", "pods", "-l", f"finetune.dev/server={name}", "-o", "name"
    ).split()
    evict(driver.namespace, running.partition("/")[2])
    driver.until(lambda: driver.condition("Deployed")["status"] == "False", 30)
    assert (
        driver.condition("Deployed")["reason"],
        driver.condition("Finished")["status"],
    ) == (
        "ServerNotReady",
        "True",
    )
    driver.until(lambda: driver.condition("Ready")["status"] == "True", 120)


def test_deleted_server_is_recreated_without_a_rerun(driver: PipelineDriver):
    driver.wait_finished(seconds=300)
    [old] = servers(driver)
    driver.namespace.run("delete", "deployment", old["metadata"]["name"])
    old_uid = old["metadata"]["uid"]
    driver.until(
        lambda: any(server["metadata"]["uid"] != old_uid for server in servers(driver)),
        60,
    )
    driver.until(lambda: driver.condition("Deployed")["status"] == "True", 120)
    assert len(driver.stage("train")["attempts"]) == 2  # no other stage runs again


def test_new_leader_finishes_the_start_of_a_server(
    driver: PipelineDriver, operator: Operator
):
    [old] = servers(driver)
    driver.patch(deploy={"smokeTest": {"maxTokens": 4}})
    driver.until(lambda: len(servers(driver)) == 2, 60)
    operator.lose_leader(gracefully=False)
    driver.until(
        lambda: (
            len(servers(driver)) == 1
            and servers(driver)[0]["metadata"]["uid"] != old["metadata"]["uid"]
        ),
        120,
    )
    driver.wait_finished()
    assert driver.stage("deploy")["attempts"][-1]["outcome"] == "Succeeded"


def test_removing_deploy_deletes_server_and_service(driver: PipelineDriver):
    driver.wait_finished(seconds=300)
    driver.patch(deploy=None)
    driver.until(lambda: servers(driver) == [], 60)
    driver.until(
        lambda: (
            "docstrings-deploy"
            not in driver.namespace.run("get", "services", "-o", "name")
        )
    )
    assert driver.status["model"].get("endpoint") is None


def test_deleted_pipeline_leaves_only_its_workspace(driver: PipelineDriver):
    driver.namespace.run("delete", "ft", "docstrings", "--wait=true")
    managed = ("-l", "app.kubernetes.io/managed-by=finetune-operator", "-o", "name")
    until(
        lambda: (
            not driver.namespace.run(
                "get", "jobs,deployments,services", *managed
            ).split()
        ),
        60,
    )
    assert "docstrings-workspace" in driver.namespace.run("get", "pvc", "-o", "name")
