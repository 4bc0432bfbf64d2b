"""Training processes that are really killed: each tracker has one run, and each step once."""

import json
import random
import shutil
import signal
import time
from typing import Any

import pytest
from support.trainer.forkserver import ForkServer
from support.trainer.mlflow_server import serve_mlflow
from support.trainer.tracker_files import event_points, wandb_runs
from support.trainer.training import (
    ALL,
    adapter_digest,
    documents,
    environment,
    stage_folder,
    stop_code,
    train_config,
    write_rows,
)

from finetune_trainer.contract import ExitCode, Tracking
from finetune_trainer.contract.metric_rows import METRICS, read_rows
from finetune_trainer.tracking.port import ReportEnd

STEPS = 24
REPEATABLE = ("loss", "validation_loss", "learning_rate", "gradient_norm")
"""Metrics that are the same in every training of a config."""


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "MLFLOW_DISABLE_TELEMETRY", "true"
        )  # it starts threads at import, and this process forks
        server = ForkServer(
            "mlflow.tracking", "mlflow.entities", "wandb", "tensorboardX"
        )
    yield server
    server.close()


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    workspace = tmp_path_factory.mktemp("packed")
    write_rows(workspace, documents(60), documents(8, seed=5))
    return workspace


@pytest.fixture(scope="module")
def mlflow():
    with serve_mlflow() as server:
        yield server


@pytest.fixture(scope="module")
def config(tiny_model):
    return train_config(
        tiny_model, max_steps=STEPS, eval_steps=7, checkpoint={"every_steps": 3}
    )


@pytest.fixture(scope="module")
def undisturbed(server, packed, config):
    """The workspace of a training without kills and without trackers."""
    assert (
        server.start(config, environment(packed), packed / "log").wait()
        == ExitCode.DONE
    )
    return packed


@pytest.fixture
def workspace(packed, tmp_path):
    shutil.copytree(packed / "prepare", tmp_path / "workspace" / "prepare")
    return tmp_path / "workspace"


def tracked(config, **trackers):
    return config.model_copy(
        update={
            "tracking": Tracking.model_validate(
                {"run_name": "team/support", **trackers}
            )
        }
    )


def expected_points(undisturbed):
    """Return the points of the training without kills, by metric."""
    points: dict[str, list[Any]] = {name: [] for name in REPEATABLE}
    for row in read_rows(stage_folder(undisturbed) / METRICS):
        for name in REPEATABLE:
            if name in row.values:
                points[name].append((row.step, row.values[name]))
    return points


def repeatable(points):
    return {name: points[name] for name in REPEATABLE}


def lines_of(workspace):
    """Return the lines of the file as they are: `read_rows` would merge two of the same step."""
    return [
        json.loads(line)
        for line in (stage_folder(workspace) / METRICS).read_text().splitlines()
    ]


def loss_curve(workspace):
    """Return the curve of the last progress report."""
    return json.loads((workspace / "progress.json").read_text())["lossCurve"]


def test_metrics_of_a_finished_training_are_one_line_a_step(undisturbed):
    lines = lines_of(undisturbed)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines if "validation_loss" in line] == [
        7,
        14,
        21,
        24,
    ]
    assert all(
        {"time", "loss", "learning_rate", "gradient_norm", "tokens_per_second"}
        <= line.keys()
        for line in lines
    )
    curve = loss_curve(undisturbed)
    assert curve["losses"] == [float(f"{line['loss']:.5g}") for line in lines]
    assert [point["step"] for point in curve["validations"]] == [7, 14, 21, 24]


@pytest.mark.parametrize("seed", [1, 2] if ALL else [1])
def test_five_kills_leave_one_run_with_each_step_once(  # noqa: PLR0917
    server, mlflow, config, undisturbed, workspace, seed
):
    config = tracked(
        config,
        mlflow={"uri": mlflow.uri, "experiment": f"seed-{seed}"},
        wandb={"project": "p", "mode": "Offline"},
        tensorboard={},
    )
    generator = random.Random(seed)
    for number in (
        signal.SIGKILL,
        signal.SIGTERM,
        signal.SIGKILL,
        signal.SIGTERM,
        signal.SIGKILL,
    ):
        process = server.start(
            config, environment(workspace), workspace / "log", slow_disk=0.05
        )
        began = len(read_rows(stage_folder(workspace) / METRICS))
        process.until(
            lambda began=began: (
                len(read_rows(stage_folder(workspace) / METRICS)) > began
            )
        )
        time.sleep(generator.uniform(0, 0.05))
        process.kill(number)
        assert process.wait() == stop_code(number), (workspace / "log").read_text()
    # On a busy machine a tracker may need longer than a training waits for it.
    patient = {
        "finetune_trainer.tracking.trackers.CLOSE_SECONDS": dict.fromkeys(
            ReportEnd, 120
        )
    }
    process = server.start(
        config,
        environment(workspace),
        workspace / "log",
        slow_disk=0.05,
        constants=patient,
    )
    assert process.wait() == ExitCode.DONE, (workspace / "log").read_text()

    expected = expected_points(undisturbed)
    assert adapter_digest(workspace) == adapter_digest(undisturbed)
    assert repeatable(expected_points(workspace)) == expected
    assert [line["step"] for line in lines_of(workspace)] == list(range(1, STEPS + 1))
    assert loss_curve(workspace) == loss_curve(undisturbed)
    [run] = [
        run
        for run in mlflow.runs.values()
        if run["experiment"] == mlflow.experiments[f"seed-{seed}"]
    ]
    assert run["status"] == "FINISHED"
    assert run["params"]["lora.rank"] == "4"
    assert repeatable(mlflow.metrics(run)) == expected
    assert len(mlflow.metrics(run)["tokens_per_second"]) == STEPS
    [wandb_run] = wandb_runs(stage_folder(workspace) / "wandb")
    assert wandb_run["id"] == config.identity
    assert wandb_run["finished"] is True
    assert repeatable(wandb_run["points"]) == expected
    shown = event_points(stage_folder(workspace) / "tensorboard")
    assert {name: [step for step, _ in shown[name]] for name in REPEATABLE} == {
        name: [step for step, _ in points] for name, points in expected.items()
    }


def test_training_ends_in_time_while_the_server_is_slow(
    server, config, undisturbed, workspace, tmp_path
):
    with serve_mlflow() as slow:
        slow.delay = 30
        constants = {
            "finetune_trainer.tracking.trackers.CLOSE_SECONDS": {"finished": 0.5}
        }
        began = time.monotonic()
        process = server.start(
            tracked(config, mlflow={"uri": slow.uri}),
            environment(workspace),
            workspace / "log",
            constants=constants,
        )
        assert process.wait() == ExitCode.DONE
        assert time.monotonic() - began < 20
    assert adapter_digest(workspace) == adapter_digest(undisturbed)
    assert (workspace / "log").read_text().count("tracking.mlflow is too slow") == 1


def test_server_that_is_down_changes_nothing_but_the_log(
    server, config, undisturbed, workspace
):
    process = server.start(
        tracked(config, mlflow={"uri": "http://127.0.0.1:9"}),
        environment(workspace),
        workspace / "log",
    )
    assert process.wait() == ExitCode.DONE
    assert adapter_digest(workspace) == adapter_digest(undisturbed)
    assert (workspace / "log").read_text().count("tracking.mlflow") == 1
    assert repeatable(expected_points(workspace)) == expected_points(undisturbed)
