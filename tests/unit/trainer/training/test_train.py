"""The train stage: packed rows in, adapter out."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from support.trainer.models import make_tiny_model
from support.trainer.training import (
    PREPARED,
    adapter_digest,
    document,
    documents,
    environment,
    run_train,
    stage_folder,
    train_config,
    write_rows,
)
from transformers import AutoModelForCausalLM

from finetune_trainer.data.packing.rows import PackedRows
from finetune_trainer.models.loading import load_base
from finetune_trainer.runtime import artifacts
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    DataInvalid,
    Diverged,
    Interrupted,
    SourceNotFound,
)
from finetune_trainer.stages import train
from finetune_trainer.training.batches import StepSampler
from finetune_trainer.training.distributed.ranks import ALONE
from finetune_trainer.training.methods.lora import trainable_adapter
from finetune_trainer.training.model.model import TrainedModel
from finetune_trainer.training.objectives.registry import objective_of
from finetune_trainer.training.validation import Validator

torch.set_num_threads(1)


@pytest.fixture
def workspace(tmp_path):
    write_rows(tmp_path, documents(60), documents(12, seed=5))
    return tmp_path


def test_training_lowers_the_loss_and_peft_loads_the_adapter(tiny_model, tmp_path):
    write_rows(tmp_path, [document(0, 32)] * 4, [document(0, 32)])
    recipe = {"max_steps": 12, "gradient_accumulation_steps": 1, "eval_steps": None}
    result = run_train(
        train_config(tiny_model, optimizer={"learning_rate": 1e-2}, **recipe), tmp_path
    )
    assert result.steps == 12
    output = stage_folder(tmp_path) / "output"
    assert sorted(file.name for file in output.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
    ]
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), output
    )
    tokens = torch.from_numpy(document(0, 32).tokens.astype("int64"))[None]
    labels = tokens.masked_fill(torch.arange(32) < 3, -100)
    with torch.no_grad(), model.disable_adapter():
        before = model(input_ids=tokens, labels=labels).loss.item()
    with torch.no_grad():
        after = model(input_ids=tokens, labels=labels).loss.item()
    assert after == pytest.approx(result.validation_loss, abs=1e-4)
    assert after < before - 0.1


def test_output_is_valid_until_a_byte_of_it_changes(tiny_model, workspace):
    config = train_config(tiny_model, max_steps=3)
    result = run_train(config, workspace)
    assert result.digest == artifacts.digest_of(stage_folder(workspace) / "output")
    assert train.is_output_valid(result, config, environment(workspace))
    assert not train.is_output_valid(
        result.model_copy(update={"digest": "sha256:0"}), config, environment(workspace)
    )
    weights = stage_folder(workspace) / "output" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x55")
    assert not train.is_output_valid(result, config, environment(workspace))
    weights.unlink()
    assert not train.is_output_valid(result, config, environment(workspace))


def test_two_runs_in_different_folders_give_the_same_bytes(
    tiny_model, workspace, tmp_path
):
    config = train_config(tiny_model, max_steps=4, eval_steps=2)
    first = run_train(config, workspace)
    elsewhere = tmp_path / "elsewhere"
    write_rows(elsewhere, documents(60), documents(12, seed=5))
    assert run_train(config, elsewhere) == first
    settings = json.loads(
        (stage_folder(workspace) / "output" / "adapter_config.json").read_text()
    )
    # A place that is no repository of the hub is no name that PEFT finds.
    assert settings["base_model_name_or_path"] is None
    assert settings["target_modules"] == sorted(settings["target_modules"])
    assert str(tmp_path / "train") not in json.dumps(settings)


def test_different_seed_gives_different_adapter(tiny_model, workspace):
    run_train(train_config(tiny_model, max_steps=2), workspace)
    first = adapter_digest(workspace)
    run_train(
        train_config(tiny_model, max_steps=2, seed=12, identity="b" * 16), workspace
    )
    assert adapter_digest(workspace, "b" * 16) != first


@pytest.mark.parametrize(
    "recipe",
    [
        {"dtype": "BF16"},
        {"lora": {"rank": 4, "variant": "DoRA"}},
        {
            "lora": {"rank": 4, "variant": "RsLoRA"},
            "optimizer": {"weight_decay": 0.1, "scheduler": "Linear"},
        },
        {
            "optimizer": {
                "max_grad_norm": 0,
                "scheduler": "Constant",
                "warmup_fraction": 0.5,
            }
        },
    ],
    ids=str,
)
def test_every_recipe_option_resumes_exactly(tiny_model, workspace, recipe):
    """A run that is stopped halfway and resumed ends in the same bytes as an uninterrupted one."""
    config = train_config(tiny_model, max_steps=6, eval_steps=None, **recipe)
    uninterrupted = run_train(config, workspace)
    digest = adapter_digest(workspace)
    stopped = config.model_copy(update={"identity": "b" * 16})
    with pytest.raises(Interrupted):
        run_train(stopped, workspace, stop_at=3)
    resumed = run_train(stopped, workspace)
    assert adapter_digest(workspace, "b" * 16) == digest
    assert resumed.loss == uninterrupted.loss
    assert resumed.tokens == uninterrupted.tokens


def test_activation_checkpointing_does_not_change_the_adapter(tiny_model, workspace):
    run_train(train_config(tiny_model, max_steps=3), workspace)
    first = adapter_digest(workspace)
    run_train(
        train_config(
            tiny_model, max_steps=3, gradient_checkpointing=True, identity="b" * 16
        ),
        workspace,
    )
    assert adapter_digest(workspace, "b" * 16) == first


def test_without_validation_rows_last_adapter_is_the_result(tiny_model, tmp_path):
    write_rows(tmp_path, documents(20))
    result = run_train(train_config(tiny_model, max_steps=3, eval_steps=1), tmp_path)
    assert result.validation_loss is None
    assert result.best_step == result.steps == 3


@pytest.mark.parametrize("count", [1, 3])
def test_fewer_rows_than_a_batch_can_be_trained_on(tiny_model, tmp_path, count):
    write_rows(tmp_path, [document(9 * i, 30) for i in range(count)], [document(1, 20)])
    config = train_config(
        tiny_model,
        max_steps=None,
        epochs=8,
        micro_batch_size=4,
        gradient_accumulation_steps=1,
    )
    result = run_train(config, tmp_path)
    assert result.steps == 8 * count // 4
    assert result.tokens == 8 * count * 30
    assert result.validation_loss is not None


def test_fractional_epoch_sees_that_fraction_of_the_rows(tiny_model, tmp_path):
    write_rows(tmp_path, [document(i, 30) for i in range(10)])
    config = train_config(
        tiny_model,
        max_steps=None,
        epochs=0.5,
        micro_batch_size=2,
        gradient_accumulation_steps=1,
    )
    result = run_train(config, tmp_path)
    assert result.steps == 3
    assert result.tokens == 5 * 30


def overfitting_recipe(tmp_path):
    """Write training rows to memorize and different validation rows; return a recipe whose validation loss rises."""
    write_rows(tmp_path, [document(0, 32)] * 4, [document(3, 32)] * 2)
    return {
        "max_steps": 24,
        "gradient_accumulation_steps": 1,
        "eval_steps": 4,
        "optimizer": {"learning_rate": 1e-1, "scheduler": "Constant"},
    }


def test_adapter_with_lowest_validation_loss_is_the_result(tiny_model, tmp_path):
    config = train_config(tiny_model, **overfitting_recipe(tmp_path))
    result = run_train(config, tmp_path)
    assert result.best_step < result.steps == 24
    base = load_base(tiny_model, torch.float32)
    assert config.recipe.lora
    model = TrainedModel(
        trainable_adapter(base, config.recipe.lora, config.model, 0),
        torch.device("cpu"),
        config.recipe,
    )
    model.load(
        load_file(stage_folder(tmp_path) / "output" / "adapter_model.safetensors")
    )
    rows = PackedRows(tmp_path / "prepare" / PREPARED / "output", "validation")
    means = Validator(objective_of(config.recipe, rows), None, 24).means(
        model, ALONE, lambda: None
    )
    assert means["loss"] == pytest.approx(result.validation_loss, abs=1e-6)


def test_early_stopping_ends_training(tiny_model, tmp_path):
    # The best step differs between types of CPU, so the recipe has steps to spare.
    recipe = overfitting_recipe(tmp_path) | {
        "early_stopping": {"patience": 2},
        "max_steps": 96,
    }
    result = run_train(train_config(tiny_model, **recipe), tmp_path)
    assert result.steps == result.best_step + 8 < 96


def test_tokens_outside_the_vocabulary_are_rejected(tmp_path):
    smaller = make_tiny_model(tmp_path / "model", vocabulary=290)
    write_rows(tmp_path, documents(20))
    with pytest.raises(
        DataInvalid,
        match=r"the model's vocabulary is 0 to 289: .* another model's tokenizer",
    ):
        run_train(train_config(smaller), tmp_path)


def test_loss_that_is_nan_fails_the_stage_naming_the_step(tmp_path):
    model = make_tiny_model(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][300] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    poisoned = document(0, 32)
    poisoned.tokens[10] = 300
    write_rows(tmp_path, [document(0, 32)] * 7 + [poisoned])
    config = train_config(model, max_steps=4)
    step = (
        next(
            step
            for step in range(4)
            if 7 in StepSampler.of(config.recipe, 8, config.seed).rows_for_step(step)
        )
        + 1
    )
    with pytest.raises(
        Diverged,
        match=rf"step {step}: the loss sum is nan.*again.*lower train.optimizer.learningRate",
    ):
        run_train(config, tmp_path)


def test_missing_packed_rows_are_rejected(tiny_model, tmp_path):
    with pytest.raises(SourceNotFound, match="run the stage prepare first"):
        run_train(train_config(tiny_model), tmp_path)


def test_corrupt_packed_rows_are_rejected(tiny_model, workspace):
    rows = workspace / "prepare" / ("p" * 16) / "output" / "train-00000.rows"
    rows.write_bytes(b"\x07" + rows.read_bytes()[1:])
    with pytest.raises(
        DataInvalid,
        match=r"train-00000.rows: row 0 does not match its checksum.*run prepare again",
    ):
        run_train(train_config(tiny_model), workspace)


def test_empty_training_split_is_rejected(tiny_model, tmp_path):
    write_rows(tmp_path, [])
    with pytest.raises(DataInvalid, match="no training rows"):
        run_train(train_config(tiny_model), tmp_path)


def test_rows_without_any_target_are_rejected(tiny_model, tmp_path):
    write_rows(tmp_path, [document(0, 20, prompt=20)])
    with pytest.raises(DataInvalid, match="no token of the packed rows is a target"):
        run_train(train_config(tiny_model), tmp_path)


def test_early_stopping_without_validation_is_rejected(tiny_model, tmp_path):
    write_rows(tmp_path, documents(20))
    with pytest.raises(ConfigInvalid, match=r"set train.evalSteps"):
        run_train(
            train_config(tiny_model, eval_steps=None, early_stopping={}), tmp_path
        )
    with pytest.raises(DataInvalid, match=r"raise validation\.fraction"):
        run_train(train_config(tiny_model, early_stopping={}), tmp_path)


def test_rows_longer_than_model_positions_are_rejected(tiny_model, tmp_path):
    write_rows(tmp_path, documents(20), context_length=1024)
    with pytest.raises(
        ConfigInvalid, match=r"set prepare.contextLength to 512 or less"
    ):
        run_train(train_config(tiny_model), tmp_path)


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"max_steps": None, "epochs": 3}, "1 step in all: a step takes 32 rows"),
        ({"max_steps": 2}, "2 steps in all: a step takes 32 rows"),
        ({"max_steps": 1, "gradient_accumulation_steps": 1}, None),
    ],
)
def test_batch_larger_than_the_rows_is_logged(
    tiny_model, tmp_path, capfd, changes, warning
):
    """Three epochs that are one step count each row three times, and nothing is learned."""
    write_rows(tmp_path, documents(20))
    batch = {"micro_batch_size": 4, "gradient_accumulation_steps": 8, "eval_steps": 1}
    run_train(train_config(tiny_model, **batch | changes), tmp_path)
    captured = capfd.readouterr()
    log = captured.out + captured.err
    assert ("steps in all" in log or "step in all" in log) == (warning is not None)
    assert "train: evalSteps has no effect" in log
    if warning:
        assert f"train: {warning}, and the data has " in log
        assert "lower microBatchSize and gradientAccumulationSteps" in log
