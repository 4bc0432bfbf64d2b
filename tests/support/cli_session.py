"""A person with a kubeconfig before a small API server."""

import json
import threading
import time
from dataclasses import dataclass

import yaml
from support.fake_api_server import FakeApiServer
from support.scenario import ALL_STAGES, Scenario, merged

from finetune_cli.__main__ import main

TRAIN = "demo-0f1e2d3c-train-a"
"""The Jobs of training, without the attempt's number."""


@dataclass
class CommandResult:
    code: int
    out: str
    err: str


class CliSession:
    """An empty folder, a kubeconfig, and the command line."""

    def __init__(self, api: FakeApiServer, folder, capsys):
        self.api, self.folder, self.capsys = api, folder, capsys

    def do(self, *arguments: str) -> CommandResult:
        code = main(arguments)
        captured = self.capsys.readouterr()
        return CommandResult(code, captured.out, captured.err)

    def plan(self, *arguments: str) -> dict:
        said = self.do("plan", "--json", *arguments)
        assert said.code == 0, said.err
        return {stage["stage"]: stage for stage in json.loads(said.out)["stages"]}

    def write(self, name="demo", namespace=None, **changes) -> str:
        meta = {"name": name, **({"namespace": namespace} if namespace else {})}
        manifest = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTunePipeline", "metadata": meta}
        (self.folder / "p.yaml").write_text(yaml.safe_dump({**manifest, "spec": merged(ALL_STAGES, changes)}))
        return "p.yaml"


def once(true, deed):
    """Do something as soon as something is so, while the command is running."""

    def watch():
        until = time.monotonic() + 20
        while not true() and time.monotonic() < until:
            time.sleep(0.01)
        deed()

    threading.Thread(target=watch, daemon=True).start()


def interrupted(scenario) -> Scenario:
    """Prepared, evicted at step 41 of training, and resumed there."""
    first = scenario.run("prepare").start("train")
    scenario.after(100).cluster.evict(first, step=41, saved=41)
    second = scenario.reconcile_until_stable().start("train")
    numbers = {"loss": 0.512, "tokens_per_second": 1024.0, "eta_seconds": 9.0, "start_step": 41}
    scenario.cluster.progress(second, 60, total=100, **numbers)
    return scenario.reconcile_until_stable()
