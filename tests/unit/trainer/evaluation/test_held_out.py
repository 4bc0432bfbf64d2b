"""The task held_out: the loss of training on the validation rows, beside the base model's."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.trainer.evaluation import run_evaluate, with_recipe
from support.trainer.lm_eval_tasks import write_verbs_task
from support.trainer.stages import run_in_process
from support.trainer.training import (
    IDENTITY,
    PREPARED,
    documents,
    environment,
    pairs,
    run_train,
    train_config,
    write_rows,
)

from finetune_operator.api.gates import Gate, compare
from finetune_trainer.contract import (
    EvaluateConfig,
    EvaluateRecipe,
    ExitCode,
    ModelSource,
    PrepareConfig,
    Task,
    TrainConfig,
)

BELOW_BASE = Gate(
    task="held_out",
    metric="validation_loss",
    operator="LessThan",
    against="Base",
    value=0,
    standard_errors=1.645,
)
GOOD = {"learning_rate": 5e-3}
DESTRUCTIVE = {"learning_rate": 1.0, "scheduler": "Constant", "warmup_fraction": 0}


def write_data(workspace: Path, objective: str, validation: int = 12) -> None:
    is_dpo = objective == "DPO"
    make = pairs if is_dpo else documents
    rows_of_example = 2 if is_dpo else 1
    write_rows(
        workspace,
        make(32),
        make(validation, seed=1)[: validation * rows_of_example],
        pairs=is_dpo,
    )


def config_after(train: TrainConfig, **recipe: Any) -> EvaluateConfig:
    """Return the config of evaluate behind a training."""
    fields = {
        "tasks": (Task(name="held_out"),),
        "weights": "Adapter",
        "compare_with_base": True,
    }
    return EvaluateConfig(
        identity="e1",
        prepare=PREPARED,
        train=IDENTITY,
        model=ModelSource(uri=train.model.uri),
        recipe=EvaluateRecipe(**{**fields, **recipe}),
        training=train.recipe,
    )


@pytest.mark.parametrize("objective", ["SFT", "DPO"])
@pytest.mark.parametrize(
    ("optimizer", "passes"), [(GOOD, True), (DESTRUCTIVE, False)], ids=["good", "bad"]
)
def test_gate_passes_only_a_training_that_learned(
    tmp_path: Path, tiny_model: Path, objective: str, optimizer: Any, *, passes: bool
) -> None:
    write_data(tmp_path, objective)
    config = train_config(
        tiny_model, objective=objective, optimizer=optimizer, max_steps=30
    )
    trained = run_train(config, tmp_path)
    result = run_evaluate(config_after(config), environment(tmp_path))
    score = result.scores["held_out"]["validation_loss"]
    # The same rows and the same loss as in training.
    assert score.value == pytest.approx(trained.validation_loss, rel=1e-4)
    gate = compare(BELOW_BASE, result)
    assert (gate.measured, gate.passed) == (True, passes), gate.message
    if objective == "DPO":
        # The base model is the reference.
        assert score.base == pytest.approx(math.log(2), rel=1e-5)
        accuracy = result.scores["held_out"]["reward_accuracy"]
        assert accuracy.base is None
        assert (accuracy.value > 0.5) == passes


def test_standard_errors_are_of_means_over_rows_of_unequal_size(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Compared with the spread of the mean over random samples of the rows."""
    write_data(tmp_path, "SFT", validation=60)
    config = train_config(tiny_model)
    run_train(config, tmp_path)
    variables = environment(tmp_path)
    score = run_evaluate(config_after(config), variables).scores["held_out"][
        "validation_loss"
    ]
    output = variables.stage_dir("evaluate", "e1") / "output"
    rows, of_base = (
        [json.loads(line) for line in (output / name).open()]
        for name in ("held-out.jsonl", "base-held-out.jsonl")
    )
    losses, base_losses, weights = (
        np.array(values)
        for values in (
            [row["loss"] for row in rows],
            [row["loss"] for row in of_base],
            [row["weight"] for row in rows],
        )
    )
    assert score.value == pytest.approx(losses.sum() / weights.sum(), rel=1e-5)
    assert score.base == pytest.approx(base_losses.sum() / weights.sum(), rel=1e-5)
    samples = np.random.default_rng(0).integers(len(rows), size=(4000, len(rows)))
    totals = weights[samples].sum(axis=1)
    for column, stderr in (
        (losses, score.stderr),
        (losses - base_losses, score.difference_stderr),
    ):
        means = column[samples].sum(axis=1) / totals
        assert stderr == pytest.approx(means.std(), rel=0.1)


def test_held_out_stands_beside_tasks_of_lm_eval(
    tmp_path: Path, tiny_model: Path, datasets_cache: object
) -> None:
    write_data(tmp_path, "SFT")
    write_verbs_task(tmp_path / "tasks")
    config = train_config(tiny_model, max_steps=2)
    run_train(config, tmp_path)
    tasks = (Task(name="held_out"), Task(name="verbs", file="tasks/verbs.yaml"))
    both = config_after(config, tasks=tasks, compare_with_base=False, batch_size=4)
    scores = run_evaluate(both, environment(tmp_path)).scores
    assert scores.keys() == {"held_out", "verbs"}
    assert scores["held_out"]["validation_loss"].base is None
    compared = with_recipe(both, compare_with_base=True)
    scores = run_evaluate(compared, environment(tmp_path)).scores
    assert all(score.base for score in scores["held_out"].values())
    assert scores["verbs"]["acc"].base is not None


def test_merged_weights_are_measured_in_their_data_type(
    tmp_path: Path, tiny_model: Path
) -> None:
    write_data(tmp_path, "SFT")
    config = train_config(tiny_model, max_steps=4)
    run_train(config, tmp_path)
    merged = config_after(config, weights="Merged")
    values = []
    for dtype in ("FP32", "BF16"):
        changed = merged.model_copy(update={"dtype": dtype, "identity": dtype})
        scores = run_evaluate(changed, environment(tmp_path)).scores
        values.append(scores["held_out"]["validation_loss"].value)
    assert values[0] != values[1]
    assert values[0] == pytest.approx(values[1], rel=0.01)


def test_evaluate_without_validation_rows_fails_with_the_fix(
    tmp_path: Path, tiny_model: Path
) -> None:
    write_rows(tmp_path, documents(8))
    config = train_config(tiny_model, max_steps=2, eval_steps=None)
    run_train(config, tmp_path)
    message, code = run_in_process(config_after(config), environment(tmp_path))
    assert code == ExitCode.DATA
    assert message.failure
    assert "evaluate.tasks[held_out] needs validation rows" in message.failure.message


def test_prepare_without_validation_rows_fails_before_training(
    tmp_path: Path, tiny_model: Path
) -> None:
    record = json.dumps({"prompt": "A reader opens", "completion": " the file"})
    (tmp_path / "data.jsonl").write_text(f"{record}\n")
    config = PrepareConfig.model_validate(
        {
            "identity": PREPARED,
            "model": {"uri": f"file://{tiny_model}"},
            "datasets": [{"uri": "data.jsonl"}],
            "recipe": {"contextLength": 32},
            "heldOut": True,
        }
    )
    message, code = run_in_process(config, environment(tmp_path))
    assert code == ExitCode.DATA
    assert message.failure
    assert "evaluate.tasks[held_out] needs validation rows: too few records" in (
        message.failure.message
    )
    allowed = config.model_copy(update={"held_out": False})
    _, code = run_in_process(allowed, environment(tmp_path))
    assert code == ExitCode.DONE
