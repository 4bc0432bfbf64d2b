"""`finetune card --track`: the card of a run on this machine goes to its run in MLflow and W&B."""

import pytest
from support.cli.recorded_runs import write_run
from support.operator.scenario import Scenario, a_pipeline
from support.trainer.mlflow_server import serve_mlflow

from finetune_cli.checks import trainer_process


@pytest.fixture
def mlflow():
    with serve_mlflow() as server:
        yield server


def record(name, status=None, **tracking):
    """Store a run with these trackers, finished unless a status is given; return the identity of its training."""
    status = status or Scenario().finish().status
    write_run(name, status, a_pipeline(tracking=tracking))
    return status.stages["train"].identity


def test_card_is_sent_to_the_run_of_the_training(cli, mlflow):
    identity = record("demo", mlflow={"uri": mlflow.uri, "experiment": "support"})
    result = cli.run("card", "demo", "--track")
    assert result.code == 0, result.err
    [run] = mlflow.runs.values()
    assert (run["tags"]["finetune.identity"], run["name"], run["status"]) == (
        identity,
        "default/demo",
        "FINISHED",
    )
    card = (cli.folder / "demo.html").read_text("utf-8")
    assert mlflow.artifacts == {f"{run['id']}/run_card.html": card}
    place = f"the artifacts of MLflow's run {run['id']} at {mlflow.uri}"
    assert result.err == f"the card is in {place}\n"


def test_tracker_that_fails_does_not_keep_the_card_from_the_next(cli, mlflow):
    mlflow.token = "secret"
    wandb = {"project": "support", "mode": "Offline"}
    record("demo", mlflow={"uri": mlflow.uri}, wandb=wandb)
    result = cli.run("card", "demo", "--track")
    assert result.code == 1
    assert "the card was not sent: tracking.mlflow: " in result.err
    [page] = cli.folder.glob(
        ".finetune/demo/card/wandb/offline-run-*/files/run_card.html"
    )
    card = (cli.folder / "demo.html").read_text("utf-8")
    assert page.read_text("utf-8") == card


def test_process_without_an_answer_is_a_failure(cli, mlflow, monkeypatch):
    record("demo", mlflow={"uri": mlflow.uri})
    monkeypatch.setattr(trainer_process, "COMMAND", ("false",))
    result = cli.run("card", "demo", "--track")
    assert result.code == 1
    assert result.err == "finetune: the card was not sent: exit code 1\n"


@pytest.mark.parametrize("tracking", [{}, {"tensorboard": {}}])
def test_run_without_a_tracker_of_pages_writes_no_card(cli, tracking):
    record("demo", **tracking)
    result = cli.run("card", "demo", "--track")
    assert result.code == 2
    assert "spec.tracking has neither mlflow nor wandb" in result.err
    assert not (cli.folder / "demo.html").exists()


def test_run_that_has_not_finished_is_not_sent(cli, mlflow):
    status = Scenario().run("prepare").status
    record("demo", status, mlflow={"uri": mlflow.uri})
    result = cli.run("card", "demo", "--track")
    assert result.code == 2
    assert "use --track after its end" in result.err
    assert mlflow.runs == {}


def test_card_of_a_cluster_is_not_sent(cli, scenario):
    """The server is one that the pipeline names, and would get the credentials of this shell."""
    result = cli.run("card", "demo", "--track")
    assert result.code == 2
    assert "--track is for a run on this machine" in result.err
