"""The example of a user's own container follows the stage contract. Its script is started as a stage is started."""

import copy
import math
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.cli.workspace import CliWorkspace

from finetune_operator.kubernetes.resources.job import escape_expansion
from finetune_trainer.contract import (
    Environment,
    EvaluateConfig,
    EvaluateRecipe,
    EvaluateResult,
    ModelSource,
    Task,
    TerminationMessage,
    TrainResult,
)
from finetune_trainer.contract.environment import CONFIG

FILE = Path(__file__).parents[3] / "examples" / "own-container" / "pipeline.yaml"
MANIFEST = yaml.safe_load(FILE.read_text())
EVALUATE = MANIFEST["spec"]["evaluate"]
POD = EVALUATE["pod"]
TRAINED = TrainResult(
    identity="trained",
    digest="sha256:0",
    steps=40,
    loss=2.0,
    validation_loss=1.5,
    best_step=40,
    tokens=1,
)
EVALUATE_CONFIG = EvaluateConfig(
    identity="0123456789abcdef",
    prepare="prepared",
    train="trained",
    model=ModelSource(uri="hf://org/base"),
    recipe=EvaluateRecipe(
        tasks=tuple(Task(name=task["name"]) for task in EVALUATE["tasks"])
    ),
)


@dataclass
class StageRun:
    """A workspace, and the example's program that runs in it."""

    environment: Environment

    @property
    def training_result(self) -> Path:
        return self.environment.stage_dir("train", "trained") / "result.json"

    @property
    def result(self) -> Path:
        return (
            self.environment.stage_dir("evaluate", EVALUATE_CONFIG.identity)
            / "result.json"
        )

    def write_training(self, training: TrainResult) -> None:
        self.training_result.parent.mkdir(parents=True, exist_ok=True)
        self.training_result.write_text(training.model_dump_json(by_alias=True))

    def start(self, config: str = "") -> subprocess.Popen[bytes]:
        config_variable = {
            CONFIG: config
            or EVALUATE_CONFIG.model_dump_json(by_alias=True, exclude_none=True)
        }
        variables = {
            **self.environment.variables(),
            **config_variable,
            "PATH": os.environ["PATH"],
        }
        command = [sys.executable, *POD["command"][1:], *POD["args"]]
        return subprocess.Popen(command, env=variables, cwd=self.environment.workspace)

    def run(self, config: str = "") -> tuple[int, TerminationMessage]:
        code = self.start(config).wait(30)
        return code, self.termination_message

    @property
    def termination_message(self) -> TerminationMessage:
        return TerminationMessage.model_validate_json(
            self.environment.termination_log.read_text()
        )


@pytest.fixture
def stage(tmp_path):
    (tmp_path / "workspace").mkdir()
    stage = StageRun(
        Environment(
            workspace=tmp_path / "workspace",
            termination_log=tmp_path / "termination-log",
        )
    )
    stage.write_training(TRAINED)
    return stage


def test_manifest_is_valid():
    done = subprocess.run(
        [sys.executable, "-m", "finetune_cli", "validate", str(FILE)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_script_needs_no_escaping_in_a_pod():
    assert [escape_expansion(word) for word in POD["args"]] == POD["args"]


def test_result_follows_the_contract(stage: StageRun):
    code, message = stage.run()
    assert code == 0
    assert isinstance(message.result, EvaluateResult)
    assert message.result.identity == EVALUATE_CONFIG.identity
    assert message.result.scores["held-out"]["probability"].value == pytest.approx(
        math.exp(-1.5)
    )
    assert (
        EvaluateResult.model_validate_json(stage.result.read_text()) == message.result
    )


def test_second_attempt_repeats_the_result(stage: StageRun):
    _, first = stage.run()
    stage.training_result.unlink()
    assert stage.run() == (0, first)


def test_sigterm_interrupts_and_next_attempt_succeeds(stage: StageRun):
    stage.training_result.unlink()
    os.mkfifo(stage.training_result)
    running = stage.start()
    with stage.training_result.open(
        "w"
    ):  # a FIFO: opens once the script has opened it, which then waits for data
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 75
    assert stage.termination_message.interruption is not None
    assert not stage.result.exists()
    stage.training_result.unlink()
    stage.write_training(TRAINED)
    assert stage.run()[0] == 0


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_diverged_training_has_the_lowest_score(stage: StageRun, loss):
    stage.write_training(TRAINED.model_copy(update={"validation_loss": loss}))
    code, message = stage.run()
    assert isinstance(message.result, EvaluateResult)
    assert (code, message.result.scores["held-out"]["probability"].value) == (0, 0.0)


def failure(stage: StageRun, config: str = "") -> tuple[int, str]:
    code, message = stage.run(config)
    assert message.failure
    return code, message.failure.message


def test_permanent_failure_has_exit_code_and_fix(stage: StageRun):
    assert failure(stage, '{"stage": "evaluate"}') == (
        64,
        "FINETUNE_CONFIG is no config of evaluate: KeyError('identity')",
    )
    stage.write_training(TRAINED.model_copy(update={"validation_loss": None}))
    assert failure(stage) == (
        65,
        "no records were held out: set validation.fraction above 0",
    )
    stage.training_result.unlink()
    code, message = failure(stage)
    assert (code, "run the stage train first" in message) == (66, True)


def test_unwritable_workspace_is_retryable(stage: StageRun):
    (stage.environment.workspace / "evaluate").write_text("in the way")
    code, message = failure(stage)
    assert (code, "cannot use the workspace: " in message) == (69, True)


def test_pipeline_runs_locally(tmp_path):
    workspace = CliWorkspace(tmp_path)
    manifest: dict[str, Any] = copy.deepcopy(MANIFEST)
    for stage in ("prepare", "train", "push"):
        manifest["spec"][stage] |= {"pod": workspace.manifest["spec"][stage]["pod"]}
    workspace.manifest = manifest
    done = workspace.finetune("run")
    assert done.returncode == 0, done.stdout + done.stderr
    [gate] = workspace.status["gates"]
    assert gate["score"] == pytest.approx(math.exp(-1))
    assert gate["passed"]
    assert workspace.status["stages"]["push"]["state"] == "Succeeded"
