"""The manifest that ran on the laptop, applied to a cluster: evicted on the way, the same model, and then served."""

import hashlib
import json
from collections.abc import Iterator

import pytest
import yaml

from e2e.pipelines.chart import Operator
from e2e.pipelines.driver import Object, PipelineDriver
from e2e.pipelines.test_evictions import evict
from e2e.reference_run import MANIFEST, ReferenceRun, material_for
from testcluster.kube_namespace import pod, temporary_namespace, until
from testcluster.provider import Provider

PROMPT = yaml.safe_load(MANIFEST.read_text())["spec"]["deploy"]["prompt"]
WEIGHTS = "published/docstrings/model.safetensors"
ENDPOINT = "http://docstrings-deploy.quick-start.svc:8000/v1"
# Asks again and again, and says of every request whether it was answered, and by a connection of its own.
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
def story(cluster: Provider, operator: Operator, laptop: ReferenceRun) -> Iterator[PipelineDriver]:
    """The demo's manifest, applied."""
    with temporary_namespace(cluster.kube, "quick-start") as namespace:
        material_for(namespace, laptop)
        manifest = yaml.safe_load(MANIFEST.read_text())
        manifest["spec"]["evaluate"]["gate"]["threshold"] = 0.0  # its toy base model has read next to nothing
        yield PipelineDriver.start(namespace, manifest)


def servers(story: PipelineDriver) -> list[Object]:
    found: list[Object] = json.loads(story.namespace.run("get", "deployments", "-o", "json"))["items"]
    return found


def test_the_laptops_manifest_ends_with_the_laptops_model(story: PipelineDriver, laptop: ReferenceRun):
    story.wait_state("train", "Running", seconds=120)
    story.until(lambda: (story.stage("train").get("progress") or {}).get("step", 0) > 40, 120)
    seen = story.stage("train")["progress"]
    assert seen["total"] == 342
    assert seen["tokensPerSecond"] > 0
    row = story.namespace.run("get", "ftp", "docstrings", "--no-headers").split()
    assert row[1:3] == ["Running", "train"]
    assert row[3].endswith("%")
    evict(story.namespace, story.pod("train").partition("/")[2])
    story.until(lambda: len(story.stage("train")["attempts"]) == 2, 90)

    story.namespace.run("wait", "--for=condition=Finished", "--timeout=300s", "ftp/docstrings", timeout=310)
    status = story.status
    assert status["phase"] == "Succeeded", story.told()
    first, second = status["stages"]["train"]["attempts"]
    assert (first["outcome"], first["exitCode"], second["outcome"]) == ("Interrupted", 75, "Succeeded")
    assert second["startStep"] == first["lastStep"]  # nothing was done twice
    assert status["interruptions"] == 1
    assert status["gate"]["passed"]
    laptop.run("push")
    expected = hashlib.sha256((laptop.material / WEIGHTS).read_bytes()).hexdigest()
    theirs = story.namespace.run("exec", "filler", "--", "busybox", "sha256sum", f"/claims/demo/{WEIGHTS}")
    assert theirs.split()[0] == expected


def test_the_model_is_served_where_the_status_says(story: PipelineDriver):
    status = story.wait_finished(seconds=300)
    assert status["model"]["endpoint"] == ENDPOINT
    assert story.condition("Deployed")["status"] == "True"
    told = status["stages"]["deploy"]["result"]
    body = json.dumps({"model": "docstrings", "prompt": PROMPT, "max_tokens": 8, "temperature": 0})
    script = f"busybox wget -qO- --header 'Content-Type: application/json' --post-data '{body}' {ENDPOINT}/completions"
    said = json.loads(story.namespace.run_script(script, name="asks"))
    assert said["choices"][0]["text"] == told["answer"]


def test_a_new_model_takes_over_without_a_lost_request(story: PipelineDriver):
    story.wait_finished(seconds=300)
    [old] = servers(story)
    client = pod("client", "", image="finetune-trainer:dev", command=["python", "-c", CLIENT % ENDPOINT], grace=1)
    story.namespace.create(client)
    story.namespace.wait_phase("client", "Running")
    until(lambda: "answered" in story.namespace.run("logs", "client"), 60)
    story.change(push={"dtype": "fp16"})
    story.wait_finished(seconds=300)
    story.until(lambda: len(servers(story)) == 1)
    [new] = servers(story)
    assert new["metadata"]["uid"] != old["metadata"]["uid"]
    said = story.namespace.run("logs", "client").splitlines()
    assert len(said) > 20
    assert [line for line in said if line.startswith("lost")] == []
    story.namespace.run("delete", "pod", "client", "--wait=false")


def test_a_server_that_is_evicted_is_told_of_until_another_answers(story: PipelineDriver):
    story.wait_finished(seconds=300)
    [server] = servers(story)
    name = server["metadata"]["name"]
    [running] = story.namespace.run("get", "pods", "-l", f"finetune.dev/server={name}", "-o", "name").split()
    evict(story.namespace, running.partition("/")[2])
    story.until(lambda: story.condition("Deployed")["status"] == "False", 30)
    assert (story.condition("Deployed")["reason"], story.condition("Finished")["status"]) == ("ServerNotReady", "True")
    story.until(lambda: story.condition("Ready")["status"] == "True", 120)


def test_a_server_that_somebody_deleted_is_started_again(story: PipelineDriver):
    story.wait_finished(seconds=300)
    [old] = servers(story)
    story.namespace.run("delete", "deployment", old["metadata"]["name"])
    story.until(lambda: any(one["metadata"]["uid"] != old["metadata"]["uid"] for one in servers(story)), 60)
    story.until(lambda: story.condition("Deployed")["status"] == "True", 120)
    assert len(story.stage("train")["attempts"]) == 2  # nothing else was done again


def test_the_leader_is_lost_while_a_server_starts(story: PipelineDriver, operator: Operator):
    [old] = servers(story)
    story.change(deploy={"maxTokens": 4})
    story.until(lambda: len(servers(story)) == 2, 60)
    leader = operator.leader()
    operator.objects.run("delete", "pod", leader, "--grace-period=0", "--force")
    until(lambda: operator.leader() not in {"", leader}, 30, operator.logs)
    story.until(
        lambda: len(servers(story)) == 1 and servers(story)[0]["metadata"]["uid"] != old["metadata"]["uid"], 120
    )
    story.wait_finished()
    assert story.stage("deploy")["attempts"][-1]["outcome"] == "Succeeded"


def test_without_deploy_nothing_is_left_running(story: PipelineDriver):
    story.wait_finished(seconds=300)
    story.change(deploy=None)
    story.until(lambda: servers(story) == [], 60)
    story.until(lambda: "docstrings-deploy" not in story.namespace.run("get", "services", "-o", "name"))
    assert story.status["model"].get("endpoint") is None


def test_with_the_pipeline_goes_all_that_it_made_but_the_workspace(story: PipelineDriver):
    story.namespace.run("delete", "ftp", "docstrings", "--wait=true")
    ours = ("-l", "app.kubernetes.io/managed-by=finetune-operator", "-o", "name")
    until(lambda: not story.namespace.run("get", "jobs,deployments,services", *ours).split(), 60)
    assert "docstrings-workspace" in story.namespace.run("get", "pvc", "-o", "name")
