"""The command line on a cluster: its output matches the state of the cluster, and its requests take effect."""

import json
from typing import Any

import pytest

from e2e.pipelines.driver import SCRIPT, PipelineDriver, pipeline
from e2e.pipelines.terminal import Terminal
from testcluster.kube_namespace import KubeNamespace, until

pytestmark = pytest.mark.usefixtures("operator")
UNMATCHED_NODE = {"pod": {"nodeSelector": {"zone": "moon"}}}
WITH_OUTPUT = {"pod": {"command": ["sh", "-c", f"echo started{SCRIPT}"]}}


def test_commands_follow_a_pipeline_through_its_lifecycle(
    namespace: KubeNamespace, terminal: Terminal
):
    steps = {"train": 300}
    fields: tuple[dict[str, Any], ...] = ({"prepare": UNMATCHED_NODE}, {})
    blocked, fixed = (
        pipeline("observed", steps=steps, train=WITH_OUTPUT, **more) for more in fields
    )
    fresh = terminal.plan(terminal.write(blocked))
    assert [fresh[name]["action"] for name in ("prepare", "train", "evaluate")] == [
        "run"
    ] * 3
    assert "there is no pipeline observed" in terminal.run("get", "observed").stderr

    driver = PipelineDriver.start(namespace, blocked)
    driver.until(
        lambda: "queued  WaitingForCapacity: " in terminal.output("get", "observed")
    )
    assert "on no node yet: Pending" in terminal.output("get", "observed")
    assert (
        "has not started: WaitingForCapacity"
        in terminal.run("logs", "observed", "prepare").stderr
    )

    prepare = terminal.plan(terminal.write(fixed))["prepare"]
    assert (prepare["action"], prepare["why"]) == (
        "run",
        "spec.prepare.pod.nodeSelector.zone: moon → absent",
    )
    PipelineDriver.start(namespace, fixed)
    with terminal.start("logs", "-f", "observed", "train") as follows:
        driver.wait_state("train", "Running")
        node = json.loads(namespace.run("get", driver.pod("train"), "-o", "json"))[
            "spec"
        ]["nodeName"]
        tree = terminal.output("get", "observed")
        assert f"{driver.pod('train').partition('/')[2]} on {node}: Running" in tree
        assert "evaluate  pending  waits for train" in tree
        assert terminal.plan("observed")["train"]["why"] == "attempt 1 is running"

        terminal.output("suspend", "observed")
        driver.until(
            lambda: driver.stage("train")["attempts"][-1]["outcome"] == "Stopped"
        )
        assert terminal.plan("observed")["train"]["why"] == "spec.suspend is true"
        terminal.output("resume", "observed")
        driver.until(lambda: len(driver.stage("train")["attempts"]) == 2)
        driver.wait_state("train", "Running")
        assert terminal.run("wait", "observed", "--timeout", "1s").returncode == 1

        terminal.output("cancel", "observed")
        assert (
            terminal.run("wait", "observed", "--timeout", "1m", timeout=90).returncode
            == 1
        )
        assert driver.status["phase"] == "Cancelled"
        out, err = follows.communicate(timeout=30)
    assert (follows.returncode, out) == (0, "started\nstarted\n"), err

    assert "starts again at train" in terminal.output("retry", "observed")
    ready = terminal.run(
        "wait", "observed", "--for", "Ready", "--timeout", "2m", timeout=150
    )
    assert (ready.returncode, "Succeeded" in ready.stdout) == (0, True), ready.stderr
    assert (
        len(driver.jobs("prepare")) <= 2
    )  # the Job that was blocked, and the Job that ran
    assert "saved and stopped" in terminal.output("get", "observed")


def test_plan_forecasts_what_an_edit_does(namespace: KubeNamespace, terminal: Terminal):
    driver = PipelineDriver.start(namespace, pipeline("edited"))
    driver.wait_finished()
    assert {stage["action"] for stage in terminal.plan("edited").values()} == {
        "reuse",
        "skip",
    }
    edit = pipeline("edited", evaluate={"tasks": [{"name": "exam", "fewShot": 1}]})
    forecast = terminal.plan(terminal.write(edit))
    assert [forecast[name]["action"] for name in ("prepare", "train", "evaluate")] == [
        "reuse",
        "reuse",
        "run",
    ]
    assert "spec.evaluate.tasks[exam].fewShot" in forecast["evaluate"]["why"]
    assert driver.object["metadata"]["generation"] == 1
    PipelineDriver.start(namespace, edit)
    driver.until(
        lambda: driver.stage("evaluate")["identity"] == forecast["evaluate"]["identity"]
    )
    assert terminal.run("wait", "edited", "--timeout", "1m", timeout=90).returncode == 0
    attempts = [
        driver.stage(name)["attempts"][-1]["number"]
        for name in ("prepare", "train", "evaluate")
    ]
    assert attempts == [1, 1, 2]


def test_wait_and_watch_exit_3_below_the_gate(
    namespace: KubeNamespace, terminal: Terminal
):
    gates = {"gates": [{"task": "exam", "metric": "acc", "value": 0.95}]}
    PipelineDriver.start(namespace, pipeline("low", evaluate=gates))
    watched = terminal.run("get", "-w", "low", timeout=120)
    assert watched.returncode == 3, watched.stderr
    assert "gate closed: " in watched.stdout
    assert terminal.run("wait", "low").returncode == 3


def test_plan_prints_the_servers_refusal(namespace: KubeNamespace, terminal: Terminal):
    hard = {"count/finetunepipelines.finetune.dev": "0"}
    namespace.create(
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "none"},
            "spec": {"hard": hard},
        }
    )
    file = terminal.write(pipeline("refused"))
    until(lambda: "exceeded quota: none" in terminal.run("plan", file).stderr, 60)
    assert terminal.run("plan", file).returncode == 1
    assert not namespace.get("ft", "refused")
