"""The command line beside kubectl: what it tells is what is, and what it asks for happens."""

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
MOON = {"placement": {"nodeSelector": {"zone": "moon"}}}
TALKS = {"command": ["sh", "-c", f"echo it begins{SCRIPT}"]}


@dataclass(frozen=True)
class Terminal:
    """A person with a kubeconfig, in the namespace of the test."""

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

    def do(self, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        with self.start(*arguments) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            finally:
                process.kill()
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def says(self, *arguments: str) -> str:
        done = self.do(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def plan(self, which: str) -> dict[str, Any]:
        stages = json.loads(self.says("plan", "--json", which))["stages"]
        return {stage["stage"]: stage for stage in stages}

    def write(self, manifest: dict[str, Any]) -> str:
        file = self.folder / "manifest.json"
        file.write_text(json.dumps(manifest))
        return file.name


@pytest.fixture
def terminal(namespace: KubeNamespace, tmp_path: Path) -> Terminal:
    return Terminal(namespace, tmp_path)


def test_a_pipeline_from_its_first_waiting_to_its_end(namespace: KubeNamespace, terminal: Terminal):
    steps = {"train": 200}
    waits, mended = (pipeline("told", steps=steps, train=TALKS, **more) for more in ({"prepare": MOON}, {}))
    fresh = terminal.plan(terminal.write(waits))
    assert [fresh[name]["action"] for name in ("prepare", "train", "evaluate")] == ["run"] * 3
    assert "there is no pipeline told" in terminal.do("get", "told").stderr

    story = PipelineDriver.start(namespace, waits)
    story.until(lambda: "queued  WaitingForCapacity: " in terminal.says("get", "told"))
    assert "on no node yet: Pending" in terminal.says("get", "told")
    assert "has not started: WaitingForCapacity" in terminal.do("logs", "told", "prepare").stderr

    prepare = terminal.plan(terminal.write(mended))["prepare"]
    assert (prepare["action"], prepare["why"]) == ("run", "spec.prepare.placement.nodeSelector.zone: moon → absent")
    PipelineDriver.start(namespace, mended)
    with terminal.start("logs", "-f", "told", "train") as follows:
        story.wait_state("train", "Running")
        node = json.loads(namespace.run("get", story.pod("train"), "-o", "json"))["spec"]["nodeName"]
        tree = terminal.says("get", "told")
        assert f"{story.pod('train').partition('/')[2]} on {node}: Running" in tree
        assert "evaluate  pending  waits for train" in tree
        assert terminal.plan("told")["train"]["why"] == "attempt 1 is running"

        terminal.says("suspend", "told")
        story.until(lambda: story.stage("train")["attempts"][-1]["outcome"] == "Stopped")
        assert terminal.plan("told")["train"]["why"] == "spec.suspend is true"
        terminal.says("resume", "told")
        story.until(lambda: len(story.stage("train")["attempts"]) == 2)
        story.wait_state("train", "Running")
        assert terminal.do("wait", "told", "--timeout", "1s").returncode == 1

        terminal.says("cancel", "told")
        assert terminal.do("wait", "told", "--timeout", "1m", timeout=90).returncode == 1
        assert story.status["phase"] == "Cancelled"
        out, err = follows.communicate(timeout=30)
    assert (follows.returncode, out) == (0, "it begins\nit begins\n"), err

    assert "starts again at train" in terminal.says("retry", "told")
    done = terminal.do("wait", "told", "--for", "Ready", "--timeout", "2m", timeout=150)
    assert (done.returncode, "Succeeded" in done.stdout) == (0, True), done.stderr
    assert len(story.jobs("prepare")) <= 2  # the one that waited in vain, and the one that ran
    assert "exit code 75" in terminal.says("get", "told")


def test_what_plan_foretells_of_an_edit_is_what_happens(namespace: KubeNamespace, terminal: Terminal):
    story = PipelineDriver.start(namespace, pipeline("edited"))
    story.wait_finished()
    assert {stage["action"] for stage in terminal.plan("edited").values()} == {"reuse", "skip"}
    edit = pipeline("edited", evaluate={"tasks": {"exam": {"fewShot": 1}}})
    foretold = terminal.plan(terminal.write(edit))
    assert [foretold[name]["action"] for name in ("prepare", "train", "evaluate")] == ["reuse", "reuse", "run"]
    assert "spec.evaluate.tasks.exam.fewShot" in foretold["evaluate"]["why"]
    assert story.object["metadata"]["generation"] == 1
    PipelineDriver.start(namespace, edit)
    story.until(lambda: story.stage("evaluate")["identity"] == foretold["evaluate"]["identity"])
    assert terminal.do("wait", "edited", "--timeout", "1m", timeout=90).returncode == 0
    assert [len(story.jobs(name)) for name in ("prepare", "train", "evaluate")] == [1, 1, 2]


def test_below_the_gate_wait_and_watch_say_so_in_their_code(namespace: KubeNamespace, terminal: Terminal):
    gate = {"gate": {"task": "exam", "metric": "acc", "threshold": 0.95}}
    PipelineDriver.start(namespace, pipeline("low", evaluate=gate))
    watched = terminal.do("get", "-w", "low", timeout=120)
    assert watched.returncode == 3, watched.stderr
    assert "gate closed: " in watched.stdout
    assert terminal.do("wait", "low").returncode == 3


def test_what_the_server_refuses_is_told_in_its_words(namespace: KubeNamespace, terminal: Terminal):
    hard = {"count/finetunepipelines.finetune.dev": "0"}
    namespace.create(
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": hard}}
    )
    file = terminal.write(pipeline("refused"))
    until(lambda: "exceeded quota: none" in terminal.do("plan", file).stderr, 60)
    assert terminal.do("plan", file).returncode == 1
    assert not namespace.get("ftp", "refused")
