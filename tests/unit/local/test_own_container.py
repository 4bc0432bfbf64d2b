"""The example of a stage that is not ours keeps the stage contract: its script, run as whoever starts a stage would."""

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
from support.cli_workspace import CliWorkspace

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
TRAINED = TrainResult(
    identity="trained", digest="sha256:0", steps=40, loss=2.0, validation_loss=1.5, best_step=40, tokens=1
)
ASKED = EvaluateConfig(
    identity="0123456789abcdef",
    train="trained",
    model=ModelSource(uri="hf://org/base"),
    recipe=EvaluateRecipe(tasks={name: Task() for name in EVALUATE["tasks"]}),
)


@dataclass
class Place:
    """A workspace, and the example's program in it."""

    environment: Environment

    @property
    def trained(self) -> Path:
        return self.environment.stage_dir("train", "trained") / "result.json"

    @property
    def result(self) -> Path:
        return self.environment.stage_dir("evaluate", ASKED.identity) / "result.json"

    def leave(self, training: TrainResult) -> None:
        self.trained.parent.mkdir(parents=True, exist_ok=True)
        self.trained.write_text(training.model_dump_json(by_alias=True))

    def start(self, config: str = "") -> subprocess.Popen[bytes]:
        told = {CONFIG: config or ASKED.model_dump_json(by_alias=True, exclude_none=True)}
        given = {**self.environment.variables(), **told, "PATH": os.environ["PATH"]}
        command = [sys.executable, *EVALUATE["command"][1:], *EVALUATE["args"]]
        return subprocess.Popen(command, env=given, cwd=self.environment.workspace)

    def run(self, config: str = "") -> tuple[int, TerminationMessage]:
        code = self.start(config).wait(30)
        return code, self.last_words

    @property
    def last_words(self) -> TerminationMessage:
        return TerminationMessage.model_validate_json(self.environment.termination_log.read_text())


@pytest.fixture
def place(tmp_path):
    (tmp_path / "workspace").mkdir()
    made = Place(Environment(workspace=tmp_path / "workspace", termination_log=tmp_path / "termination-log"))
    made.leave(TRAINED)
    return made


def test_the_manifest_is_valid():
    done = subprocess.run(
        [sys.executable, "-m", "finetune_cli", "validate", str(FILE)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_script_is_the_same_text_in_a_pod_and_on_a_laptop():
    assert [escape_expansion(word) for word in EVALUATE["args"]] == EVALUATE["args"]


def test_its_result_is_one_that_the_operator_believes(place: Place):
    code, words = place.run()
    assert code == 0
    assert isinstance(words.result, EvaluateResult)
    assert words.result.identity == ASKED.identity
    assert words.result.scores["kept-apart"]["probability"].value == pytest.approx(math.exp(-1.5))
    assert EvaluateResult.model_validate_json(place.result.read_text()) == words.result


def test_what_was_done_is_said_again_and_not_done_again(place: Place):
    _, first = place.run()
    place.trained.unlink()
    assert place.run() == (0, first)


def test_asked_to_stop_it_stops_and_the_next_attempt_makes_the_result(place: Place):
    place.trained.unlink()
    os.mkfifo(place.trained)
    running = place.start()
    with place.trained.open("w"):  # opens when the script has, which then waits for a word
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 75
    assert place.last_words.interruption is not None
    assert not place.result.exists()
    place.trained.unlink()
    place.leave(TRAINED)
    assert place.run()[0] == 0


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_training_that_diverged_has_the_lowest_score(place: Place, loss):
    place.leave(TRAINED.model_copy(update={"validation_loss": loss}))
    code, words = place.run()
    assert (code, words.result.scores["kept-apart"]["probability"].value) == (0, 0.0)


def failure(place: Place, config: str = "") -> tuple[int, str]:
    code, words = place.run(config)
    assert words.failure
    return code, words.failure.message


def test_what_cannot_get_better_says_so_and_how_to_mend_it(place: Place):
    assert failure(place, '{"stage": "evaluate"}') == (
        64,
        "FINETUNE_CONFIG is not what evaluate is told: KeyError('identity')",
    )
    place.leave(TRAINED.model_copy(update={"validation_loss": None}))
    assert failure(place) == (65, "no records were kept apart: raise dataset.validationFraction above 0")
    place.trained.unlink()
    code, words = failure(place)
    assert (code, "run the stage train first" in words) == (66, True)


def test_a_workspace_that_cannot_be_written_is_worth_another_attempt(place: Place):
    (place.environment.workspace / "evaluate").write_text("in the way")
    code, words = failure(place)
    assert (code, "the workspace: " in words) == (69, True)


def test_the_pipeline_runs_with_it_on_a_laptop(tmp_path):
    desk = CliWorkspace(tmp_path)
    mine: dict[str, Any] = copy.deepcopy(MANIFEST)
    for stage in ("prepare", "train", "push"):
        mine["spec"][stage] |= {key: desk.manifest["spec"][stage][key] for key in ("command", "env")}
    desk.manifest = mine
    done = desk.do("run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert desk.status["gate"]["value"] == pytest.approx(math.exp(-1))
    assert desk.status["gate"]["passed"]
    assert desk.status["stages"]["push"]["state"] == "Succeeded"
