"""The MLflow adapter, against a double with the rules of a server's SQL store."""

import pytest

from finetune_trainer.contract import Environment, Mlflow
from finetune_trainer.tracking.mlflow import MlflowTracker
from finetune_trainer.tracking.port import ReportEnd


@pytest.fixture
def tracker(mlflow, new_run, tmp_path):
    """A function that returns the adapter of a new process."""

    def new(stage="train", **settings):
        fields = {"uri": mlflow.uri, "experiment": "support", **settings}
        return MlflowTracker(
            Mlflow.model_validate(fields), new_run(stage), Environment(tmp_path)
        )

    return new


def only_run(mlflow):
    [run] = mlflow.runs.values()
    return run


def test_rows_sent_by_three_processes_are_one_run_of_points(mlflow, tracker, rows):
    for count in (40, 130, 250):
        tracker().log_rows(rows[:count])
    points = mlflow.metrics(only_run(mlflow))
    assert points["loss"] == [(step, 1 / step) for step in range(1, 251)]
    assert points["validation_loss"] == [
        (step, 2 / step) for step in range(10, 251, 10)
    ]


def test_row_repeated_with_another_time_is_sent_once(mlflow, tracker, rows):
    """Training may go on from an older checkpoint, and then records steps again that were sent."""
    tracker().log_rows(rows[:100])
    repeated = [type(row)(row.step, row.time + 60, row.values) for row in rows]
    tracker().log_rows(repeated)
    assert len(mlflow.metrics(only_run(mlflow))["loss"]) == 250


def test_run_has_its_name_identity_and_parameters(mlflow, tracker, rows):
    tracker().log_rows(rows)
    run = only_run(mlflow)
    assert run["name"] == "team/support"
    assert run["tags"]["finetune.identity"] == "a" * 16
    assert run["params"] == {"optimizer.learningRate": "0.0002", "lora.rank": "16"}
    assert mlflow.experiments == {"support": "1"}


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (ReportEnd.FINISHED, "FINISHED"),
        (ReportEnd.INTERRUPTED, "RUNNING"),
        (ReportEnd.FAILED, "FAILED"),
    ],
)
def test_status_follows_the_outcome(mlflow, tracker, rows, outcome, status):
    process = tracker()
    process.log_rows(rows)
    process.close(outcome)
    assert only_run(mlflow)["status"] == status


def test_scores_logged_twice_are_one_point_of_the_same_run(mlflow, tracker, rows):
    tracker().log_rows(rows)
    for _ in range(2):
        process = tracker("evaluate")
        process.log_rows(rows)
        process.log_scores({"support/acc": 0.75})
    assert mlflow.metrics(only_run(mlflow))["support/acc"] == [(250, 0.75)]


def test_same_digest_registered_twice_is_one_version(mlflow, tracker):
    for _ in range(2):
        tracker("push", registered_model="bot", alias="champion").register_model(
            "pvc://models/bot", "sha256:1"
        )
    tracker("push", registered_model="bot").register_model(
        "pvc://models/bot", "sha256:2"
    )
    versions = mlflow.versions["bot"]
    assert [(version["source"], version["run_id"]) for version in versions] == [
        ("pvc://models/bot", only_run(mlflow)["id"])
    ] * 2
    assert mlflow.aliases == {("bot", "champion"): "1"}
    assert only_run(mlflow)["tags"]["finetune.model"] == "pvc://models/bot"


def test_model_without_a_registered_model_is_only_tagged(mlflow, tracker):
    tracker("push").register_model("pvc://models/bot", "sha256:1")
    assert mlflow.versions == {}
    assert only_run(mlflow)["tags"]["finetune.digest"] == "sha256:1"


def test_model_card_is_an_artifact_of_the_run(mlflow, tracker):
    for card in ("# first", "# the card: ±"):
        tracker("push").log_card(card)
    path = f"{only_run(mlflow)['id']}/model_card.md"
    assert mlflow.artifacts == {path: "# the card: ±"}


def test_card_is_not_written_to_a_folder_of_the_server(mlflow, tracker, tmp_path):
    mlflow.artifact_root = f"{tmp_path}/artifacts/"
    tracker("push").log_card("# card")
    assert only_run(mlflow)["status"] == "RUNNING"
    assert not (tmp_path / "artifacts").exists()


def test_card_of_the_run_is_an_artifact_beside_the_model_card(mlflow, tracker):
    tracker("push").log_card("# card")
    for page in ("<p>first", "<p>last: ±"):
        place = tracker("card").log_page(page)
    run = only_run(mlflow)["id"]
    pages = {f"{run}/model_card.md": "# card", f"{run}/run_card.html": "<p>last: ±"}
    assert mlflow.artifacts == pages
    assert run in place


def test_page_is_refused_if_the_server_keeps_files_in_a_folder(
    mlflow, tracker, tmp_path
):
    mlflow.artifact_root = f"{tmp_path}/artifacts/"
    with pytest.raises(NotImplementedError, match="--serve-artifacts"):
        tracker("card").log_page("<p>")
    assert not (tmp_path / "artifacts").exists()


def test_token_is_taken_from_the_environment(mlflow, tracker, rows, monkeypatch):
    mlflow.token = "secret"
    with pytest.raises(Exception, match="the token is wrong"):
        tracker().log_rows(rows)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    tracker().log_rows(rows)
    assert len(mlflow.runs) == 1
