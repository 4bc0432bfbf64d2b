"""Evaluate and push report to the run of their train stage."""

import shutil

import pytest
from support.operator.adapters import make_adapter
from support.trainer.evaluation import (
    evaluate_config,
    evaluate_environment,
    run_evaluate,
)
from support.trainer.stages import environment_in, run_to_failure, run_to_result
from support.trainer.training import train_config

from finetune_trainer.contract import (
    DatasetSource,
    ExitCode,
    Lineage,
    ModelSource,
    PushConfig,
    PushRecipe,
    PushResult,
    PushTarget,
    TensorBoard,
    Tracking,
)
from finetune_trainer.contract.metric_rows import METRICS
from finetune_trainer.runtime.stage_folder import write_config
from finetune_trainer.tracking.metrics_file import MetricsFile

TRAIN = "first"


def write_training(environment, model):
    """Write the config and the metrics of a training whose trackers were down."""
    folder = environment.stage_dir("train", TRAIN)
    write_config(folder, train_config(model, identity=TRAIN))
    file = MetricsFile(folder / METRICS)
    file.open(0)
    for step in (1, 2, 3):
        file.record(step, {"loss": 1 / step})
    file.close()


@pytest.fixture
def tracking(mlflow):
    return Tracking.model_validate(
        {
            "mlflow": {
                "uri": mlflow.uri,
                "registeredModel": "bot",
                "alias": "champion",
            },
            "runName": "team/support",
        }
    )


@pytest.fixture
def push_config(tiny_model, tracking):
    return PushConfig(
        identity="p1",
        prepare="d1",
        train=TRAIN,
        model=ModelSource(uri=f"file://{tiny_model}"),
        datasets=(DatasetSource(uri="hf://people/names/train.jsonl"),),
        recipe=PushRecipe(targets=(PushTarget(uri="pvc://models/names"),)),
        lineage=Lineage(
            pipeline="team/support", interruptions=2, lost_steps=7, lost_seconds=3.5
        ),
        tracking=tracking,
    )


@pytest.fixture
def push_environment(tmp_path, tiny_model):
    environment = environment_in(tmp_path)
    make_adapter(environment.stage_dir("train", TRAIN) / "output", tiny_model)
    (tmp_path / "claims" / "models").mkdir()
    write_training(environment, tiny_model)
    return environment


def test_push_registers_the_model_once_and_sends_lost_rows(
    mlflow, push_config, push_environment
):
    result = run_to_result(push_config, push_environment, PushResult)
    (push_environment.stage_dir("push", "p1") / "result.json").unlink()
    assert run_to_result(push_config, push_environment, PushResult) == result
    [run] = mlflow.runs.values()
    [version] = mlflow.versions["bot"]
    assert (version["source"], version["run_id"]) == (
        result.published[0].uri,
        run["id"],
    )
    assert version["tags"] == [{"key": "finetune.digest", "value": result.digest}]
    assert mlflow.aliases == {("bot", "champion"): "1"}
    [card] = mlflow.artifacts.values()
    assert "Digest of the trained weights" in card
    assert mlflow.metrics(run) == {
        "loss": [(1, 1), (2, 1 / 2), (3, 1 / 3)],
        "interruptions": [(3, 2)],
        "lost_steps": [(3, 7)],
        "lost_seconds": [(3, 3.5)],
    }
    assert (run["name"], run["status"], run["params"]["lora.rank"]) == (
        "team/support",
        "FINISHED",
        "4",
    )


def test_push_succeeds_while_the_server_refuses_the_token(
    mlflow, push_config, push_environment, capfd
):
    mlflow.token = "secret"
    run_to_result(push_config, push_environment, PushResult)
    assert (
        capfd.readouterr().out.count("push: tracking.mlflow failed: RestException") == 1
    )


def test_unmounted_folder_of_tensorboard_stops_the_stage(push_config, push_environment):
    tensorboard = Tracking(tensorboard=TensorBoard(uri="pvc://runs/tb"))
    message, code = run_to_failure(
        push_config.model_copy(update={"tracking": tensorboard}), push_environment
    )
    assert code == ExitCode.NOT_FOUND
    assert "the claim runs is not mounted" in message


@pytest.mark.usefixtures("datasets_cache")
def test_scores_of_evaluate_are_metrics_of_the_same_run(
    mlflow, tracking, tiny_model, tmp_path
):
    environment = evaluate_environment(tmp_path, tiny_model)
    write_training(environment, tiny_model)
    config = evaluate_config(tiny_model).model_copy(update={"tracking": tracking})
    result = run_evaluate(config, environment)
    shutil.rmtree(environment.stage_dir("evaluate", "e1"))
    run_evaluate(config, environment)
    [run] = mlflow.runs.values()
    score = result.scores["verbs"]["acc"]
    assert mlflow.metrics(run)["verbs/acc"] == [(3, score.value)]
    assert mlflow.metrics(run)["verbs/acc_stderr"] == [(3, score.stderr)]
    assert len(mlflow.metrics(run)["loss"]) == 3
