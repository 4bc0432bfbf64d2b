"""A session of the command line against the fake API server."""

import json
import threading
import time
from dataclasses import dataclass

import yaml
from support.operator.fake_api_objects import FakeApiServer
from support.operator.scenario import ALL_STAGES, Scenario, merged

from finetune_cli.__main__ import main

TRAIN = "demo-0f1e2d3c-train-a"
"""Name of the Jobs of the stage train, without the attempt's number."""


@dataclass
class CommandResult:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


class CliSession:
    """A command line in an empty folder, with a kubeconfig of the fake API server."""

    def __init__(self, api: FakeApiServer, folder, capsys):
        self.api = api
        self.folder = folder
        self.capsys = capsys

    def run(self, *arguments: str) -> CommandResult:
        """Run a command in this process."""
        code = main(arguments)
        captured = self.capsys.readouterr()
        return CommandResult(code, captured.out, captured.err)

    def plan(self, *arguments: str) -> dict:
        """Return the forecasts of `finetune plan` by stage."""
        result = self.run("plan", "--json", *arguments)
        assert result.code == 0, result.err
        return {stage["stage"]: stage for stage in json.loads(result.out)["stages"]}

    def write(self, name="demo", namespace=None, **changes) -> str:
        """Write p.yaml, a manifest with all stages and these changes to its spec, and return the file's name."""
        meta = {"name": name, **({"namespace": namespace} if namespace else {})}
        manifest = {
            "apiVersion": "finetune.dev/v1alpha1",
            "kind": "FineTunePipeline",
            "metadata": meta,
        }
        (self.folder / "p.yaml").write_text(
            yaml.safe_dump({**manifest, "spec": merged(ALL_STAGES, changes)})
        )
        return "p.yaml"


def run_when(condition, action):
    """Run an action in a thread once a condition is true, after 20 s at the latest, while the test runs a command."""

    def watch():
        deadline = time.monotonic() + 20
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.01)
        action()

    threading.Thread(target=watch, daemon=True).start()


def interrupt_training(scenario) -> Scenario:
    """Prepare, evict training at step 41, and resume it there up to step 60."""
    first = scenario.run("prepare").start("train")
    scenario.after(100).cluster.evict(first, step=41, saved=41)
    second = scenario.reconcile_until_stable().start("train")
    numbers = {
        "loss": 0.512,
        "tokens_per_second": 1024.0,
        "eta_seconds": 9.0,
        "start_step": 41,
    }
    scenario.cluster.progress(second, 60, total=100, **numbers)
    return scenario.reconcile_until_stable()
