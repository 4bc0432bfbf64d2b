"""The command line on a cluster: its output matches the state of the cluster, and its requests take effect."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from e2e.pipelines.driver import SCRIPT, PipelineDriver, pipeline
from testcluster.kube_namespace import KubeNamespace, until

pytestmark = pytest.mark.usefixtures("operator")
ROOT = Path(__file__).parents[2]
UNMATCHED_NODE = {"placement": {"nodeSelector": {"zone": "moon"}}}
WITH_OUTPUT = {"command": ["sh", "-c", f"echo started{SCRIPT}"]}


@dataclass(frozen=True)
class Terminal:
    """Runs the command line with a kubeconfig, in the namespace of the test."""

    namespace: KubeNamespace
    folder: Path

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        path = os.pathsep.join(str(ROOT / part) for part in ("operator", "trainer"))
        variables = {
            "KUBECONFIG": str(self.namespace.kube.kubeconfig.absolute()),
            "PYTHONPATH": path,
            "HOME": str(self.folder),
        }
        command = [sys.executable, "-m", "finetune_cli", *arguments, "-n", self.namespace.name]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env={**os.environ, **variables}, cwd=self.folder, **pipes)

    def run(self, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        with self.start(*arguments) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            finally:
                process.kill()
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def output(self, *arguments: str) -> str:
        """Run a command that must succeed, and return its stdout."""
        completed = self.run(*arguments)
        assert completed.returncode == 0, completed.stdout + completed.stderr
        return completed.stdout

    def plan(self, target: str) -> dict[str, Any]:
        """Run `plan --json` for a file or a pipeline, and return its stages by name."""
        stages = json.loads(self.output("plan", "--json", target))["stages"]
        return {stage["stage"]: stage for stage in stages}

    def write(self, manifest: dict[str, Any]) -> str:
        file = self.folder / "manifest.json"
        file.write_text(json.dumps(manifest))
        return file.name


@pytest.fixture
def terminal(namespace: KubeNamespace, tmp_path: Path) -> Terminal:
    return Terminal(namespace, tmp_path)


def test_commands_follow_a_pipeline_through_its_lifecycle(namespace: KubeNamespace, terminal: Terminal):
    steps = {"train": 200}
    fields = ({"prepare": UNMATCHED_NODE}, {})
    blocked, fixed = (pipeline("observed", steps=steps, train=WITH_OUTPUT, **more) for more in fields)
    fresh = terminal.plan(terminal.write(blocked))
    assert [fresh[name]["action"] for name in ("prepare", "train", "evaluate")] == ["run"] * 3
    assert "there is no pipeline observed" in terminal.run("get", "observed").stderr

    driver = PipelineDriver.start(namespace, blocked)
    driver.until(lambda: "queued  WaitingForCapacity: " in terminal.output("get", "observed"))
    assert "on no node yet: Pending" in terminal.output("get", "observed")
    assert "has not started: WaitingForCapacity" in terminal.run("logs", "observed", "prepare").stderr

    prepare = terminal.plan(terminal.write(fixed))["prepare"]
    assert (prepare["action"], prepare["why"]) == ("run", "spec.prepare.placement.nodeSelector.zone: moon → absent")
    PipelineDriver.start(namespace, fixed)
    with terminal.start("logs", "-f", "observed", "train") as follows:
        driver.wait_state("train", "Running")
        node = json.loads(namespace.run("get", driver.pod("train"), "-o", "json"))["spec"]["nodeName"]
        tree = terminal.output("get", "observed")
        assert f"{driver.pod('train').partition('/')[2]} on {node}: Running" in tree
        assert "evaluate  pending  waits for train" in tree
        assert terminal.plan("observed")["train"]["why"] == "attempt 1 is running"

        terminal.output("suspend", "observed")
        driver.until(lambda: driver.stage("train")["attempts"][-1]["outcome"] == "Stopped")
        assert terminal.plan("observed")["train"]["why"] == "spec.suspend is true"
        terminal.output("resume", "observed")
        driver.until(lambda: len(driver.stage("train")["attempts"]) == 2)
        driver.wait_state("train", "Running")
        assert terminal.run("wait", "observed", "--timeout", "1s").returncode == 1

        terminal.output("cancel", "observed")
        assert terminal.run("wait", "observed", "--timeout", "1m", timeout=90).returncode == 1
        assert driver.status["phase"] == "Cancelled"
        out, err = follows.communicate(timeout=30)
    assert (follows.returncode, out) == (0, "started\nstarted\n"), err

    assert "starts again at train" in terminal.output("retry", "observed")
    ready = terminal.run("wait", "observed", "--for", "Ready", "--timeout", "2m", timeout=150)
    assert (ready.returncode, "Succeeded" in ready.stdout) == (0, True), ready.stderr
    assert len(driver.jobs("prepare")) <= 2  # the Job that was blocked, and the Job that ran
    assert "exit code 75" in terminal.output("get", "observed")


def test_plan_forecasts_what_an_edit_does(namespace: KubeNamespace, terminal: Terminal):
    driver = PipelineDriver.start(namespace, pipeline("edited"))
    driver.wait_finished()
    assert {stage["action"] for stage in terminal.plan("edited").values()} == {"reuse", "skip"}
    edit = pipeline("edited", evaluate={"tasks": {"exam": {"fewShot": 1}}})
    forecast = terminal.plan(terminal.write(edit))
    assert [forecast[name]["action"] for name in ("prepare", "train", "evaluate")] == ["reuse", "reuse", "run"]
    assert "spec.evaluate.tasks.exam.fewShot" in forecast["evaluate"]["why"]
    assert driver.object["metadata"]["generation"] == 1
    PipelineDriver.start(namespace, edit)
    driver.until(lambda: driver.stage("evaluate")["identity"] == forecast["evaluate"]["identity"])
    assert terminal.run("wait", "edited", "--timeout", "1m", timeout=90).returncode == 0
    assert [len(driver.jobs(name)) for name in ("prepare", "train", "evaluate")] == [1, 1, 2]


def test_wait_and_watch_exit_3_below_the_gate(namespace: KubeNamespace, terminal: Terminal):
    gate = {"gate": {"task": "exam", "metric": "acc", "threshold": 0.95}}
    PipelineDriver.start(namespace, pipeline("low", evaluate=gate))
    watched = terminal.run("get", "-w", "low", timeout=120)
    assert watched.returncode == 3, watched.stderr
    assert "gate closed: " in watched.stdout
    assert terminal.run("wait", "low").returncode == 3


def test_plan_prints_the_servers_refusal(namespace: KubeNamespace, terminal: Terminal):
    hard = {"count/finetunepipelines.finetune.dev": "0"}
    namespace.create(
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": hard}}
    )
    file = terminal.write(pipeline("refused"))
    until(lambda: "exceeded quota: none" in terminal.run("plan", file).stderr, 60)
    assert terminal.run("plan", file).returncode == 1
    assert not namespace.get("ftp", "refused")
