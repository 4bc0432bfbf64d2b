"""The adapters that write files: W&B offline and TensorBoard, read back."""

import numpy as np
import pytest
from support.trainer.tracker_files import event_points, finished_wandb_run

from finetune_trainer.contract import Environment, TensorBoard, Wandb
from finetune_trainer.tracking.port import ReportEnd
from finetune_trainer.tracking.tensorboard import TensorBoardTracker
from finetune_trainer.tracking.wandb import WandbTracker

LOSSES = [(step, 1 / step) for step in range(1, 251)]
OFFLINE = Wandb(project="support", mode="Offline")


@pytest.fixture
def wandb_tracker(new_run, tmp_path):
    return lambda stage="train", settings=OFFLINE: WandbTracker(
        settings, new_run(stage), Environment(tmp_path)
    )


@pytest.fixture
def tensorboard_tracker(new_run, tmp_path):
    return lambda stage="train": TensorBoardTracker(
        TensorBoard(), new_run(stage), Environment(tmp_path)
    )


def test_wandb_offline_run_is_whole_after_an_interruption(wandb_tracker, new_run, rows):
    first = wandb_tracker()
    first.log_rows(rows[:100])
    first.close(ReportEnd.INTERRUPTED)
    second = wandb_tracker()
    second.log_rows(rows[:120])
    second.log_rows(rows)
    second.close(ReportEnd.FINISHED)
    run = finished_wandb_run(new_run().folder / "wandb")
    assert run["id"] == "a" * 16
    assert run["name"] == "team/support"
    assert run["finished"] is True
    assert run["points"]["loss"] == LOSSES
    assert run["points"]["validation_loss"] == [
        (step, 2 / step) for step in range(10, 251, 10)
    ]


def test_wandb_scores_and_model_are_a_part_of_the_same_run(
    wandb_tracker, new_run, rows
):
    process = wandb_tracker("push")
    process.log_rows(rows)
    process.log_scores({"support/acc": 0.75})
    process.register_model("pvc://models/bot", "sha256:1")
    process.log_card("# the card: ±")
    process.close(ReportEnd.FINISHED)
    folder = new_run("push").folder / "wandb"
    run = finished_wandb_run(folder)
    [card] = folder.glob("offline-run-*/files/model_card.md")
    assert card.read_text("utf-8") == "# the card: ±"
    assert "model_card.md" in run["files"]
    assert run["id"] == "a" * 16
    assert run["points"] == {}
    expected = {
        "support/acc": 0.75,
        "model_uri": "pvc://models/bot",
        "model_digest": "sha256:1",
    }
    assert {
        name: value
        for name, value in run["summary"].items()
        if not name.startswith("_")
    } == expected


def test_wandb_has_the_card_of_the_run_as_a_file(wandb_tracker, new_run):
    process = wandb_tracker("card")
    place = process.log_page("<p>the card: ±")
    process.close(ReportEnd.FINISHED)
    folder = new_run("card").folder / "wandb"
    run = finished_wandb_run(folder)
    [page] = folder.glob("offline-run-*/files/run_card.html")
    assert page.read_text("utf-8") == "<p>the card: ±"
    assert (run["id"], "run_card.html" in run["files"]) == ("a" * 16, True)
    assert str(page.parent) in place


def test_wandb_online_without_a_key_names_the_variable(wandb_tracker, rows):
    with pytest.raises(PermissionError, match="WANDB_API_KEY is not set"):
        wandb_tracker(settings=Wandb(project="support")).log_rows(rows)


def test_tensorboard_has_each_step_once_after_three_attempts(
    tensorboard_tracker, new_run, rows
):
    for count in (100, 30, 250):
        process = tensorboard_tracker()
        process.log_rows(rows[: count // 2])
        process.log_rows(rows[:count])
    points = event_points(new_run().folder / "tensorboard")
    assert points["loss"] == [(step, np.float32(loss)) for step, loss in LOSSES]
    assert [step for step, _ in points["validation_loss"]] == list(range(10, 251, 10))


def test_tensorboard_file_of_a_kill_stays_until_replaced(
    tensorboard_tracker, new_run, rows
):
    tensorboard_tracker().log_rows(rows[:100])
    tensorboard_tracker().log_rows([])
    assert len(event_points(new_run().folder / "tensorboard")["loss"]) == 100


def test_tensorboard_scores_are_beside_the_steps(tensorboard_tracker, new_run, rows):
    tensorboard_tracker().log_rows(rows)
    for _ in range(2):
        process = tensorboard_tracker("evaluate")
        process.log_rows(rows)
        process.log_scores({"support/acc": 0.75})
    points = event_points(new_run().folder / "tensorboard")
    assert points["support/acc"] == [(250, 0.75)]
    assert len(points["loss"]) == 250
