"""The train stage from packed rows to an adapter in its place."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from support.models import make_tiny_model
from support.training import (
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

from finetune_trainer.data.packing import PackedRows
from finetune_trainer.models.loading import load_base
from finetune_trainer.runtime import artifacts
from finetune_trainer.runtime.errors import ConfigInvalid, DataInvalid, Interrupted, SourceNotFound
from finetune_trainer.stages import train
from finetune_trainer.training.batches import StepSampler
from finetune_trainer.training.loop import Diverged
from finetune_trainer.training.model import AdaptedModel, attach_adapter
from finetune_trainer.training.validation import Validator

torch.set_num_threads(1)


@pytest.fixture
def workspace(tmp_path):
    write_rows(tmp_path, documents(60), documents(12, seed=5))
    return tmp_path


def test_training_lowers_the_loss_and_leaves_an_adapter_that_peft_loads(tiny_model, tmp_path):
    write_rows(tmp_path, [document(0, 32)] * 4, [document(0, 32)])
    recipe = {"max_steps": 12, "gradient_accumulation": 1, "validate_every_steps": None}
    result = run_train(train_config(tiny_model, optimizer={"learning_rate": 5e-2}, **recipe), tmp_path)
    assert result.steps == 12
    output = stage_folder(tmp_path) / "output"
    assert sorted(file.name for file in output.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
    ]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), output)
    tokens = torch.from_numpy(document(0, 32).tokens.astype("int64"))[None]
    labels = tokens.masked_fill(torch.arange(32) < 3, -100)
    with torch.no_grad(), model.disable_adapter():
        before = model(input_ids=tokens, labels=labels).loss.item()
    with torch.no_grad():
        after = model(input_ids=tokens, labels=labels).loss.item()
    assert after == pytest.approx(result.validation_loss, abs=1e-4)
    assert after < before - 0.1


def test_the_result_holds_until_a_byte_of_the_adapter_changes(tiny_model, workspace):
    config = train_config(tiny_model, max_steps=3)
    result = run_train(config, workspace)
    assert result.digest == artifacts.digest_of(stage_folder(workspace) / "output")
    assert train.is_output_valid(result, config, environment(workspace))
    assert not train.is_output_valid(result.model_copy(update={"digest": "sha256:0"}), config, environment(workspace))
    weights = stage_folder(workspace) / "output" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x55")
    assert not train.is_output_valid(result, config, environment(workspace))
    weights.unlink()
    assert not train.is_output_valid(result, config, environment(workspace))


def test_two_runs_give_the_same_bytes_in_every_file_wherever_they_run(tiny_model, workspace, tmp_path):
    config = train_config(tiny_model, max_steps=4, validate_every_steps=2)
    first = run_train(config, workspace)
    elsewhere = tmp_path / "elsewhere"
    write_rows(elsewhere, documents(60), documents(12, seed=5))
    assert run_train(config, elsewhere) == first
    settings = json.loads((stage_folder(workspace) / "output" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == config.model.uri
    assert settings["target_modules"] == sorted(settings["target_modules"])
    assert str(tmp_path / "train") not in json.dumps(settings)


def test_another_seed_gives_another_adapter(tiny_model, workspace):
    run_train(train_config(tiny_model, max_steps=2), workspace)
    first = adapter_digest(workspace)
    run_train(train_config(tiny_model, max_steps=2, seed=12, identity="b" * 16), workspace)
    assert adapter_digest(workspace, "b" * 16) != first


@pytest.mark.parametrize(
    "recipe",
    [
        {"precision": "bf16"},
        {"lora": {"rank": 4, "variant": "dora"}},
        {"lora": {"rank": 4, "variant": "rslora"}, "optimizer": {"weight_decay": 0.1, "schedule": "linear"}},
        {"optimizer": {"max_grad_norm": 0, "schedule": "constant", "warmup_fraction": 0.5}},
    ],
    ids=str,
)
def test_every_option_trains_resumably(tiny_model, workspace, recipe):
    """Stopped in the middle and gone on with, it ends in the same bytes."""
    config = train_config(tiny_model, max_steps=6, validate_every_steps=None, **recipe)
    whole = run_train(config, workspace)
    digest = adapter_digest(workspace)
    stopped = config.model_copy(update={"identity": "b" * 16})
    with pytest.raises(Interrupted):
        run_train(stopped, workspace, stop_at=3)
    resumed = run_train(stopped, workspace)
    assert adapter_digest(workspace, "b" * 16) == digest
    assert (resumed.loss, resumed.tokens) == (whole.loss, whole.tokens)


def test_activation_checkpointing_changes_memory_and_no_byte(tiny_model, workspace):
    run_train(train_config(tiny_model, max_steps=3), workspace)
    first = adapter_digest(workspace)
    run_train(train_config(tiny_model, max_steps=3, gradient_checkpointing=True, identity="b" * 16), workspace)
    assert adapter_digest(workspace, "b" * 16) == first


def test_without_validation_rows_the_last_adapter_is_the_result(tiny_model, tmp_path):
    write_rows(tmp_path, documents(20))
    result = run_train(train_config(tiny_model, max_steps=3, validate_every_steps=1), tmp_path)
    assert result.validation_loss is None
    assert result.best_step == result.steps == 3


@pytest.mark.parametrize("count", [1, 3])
def test_fewer_rows_than_a_batch_are_enough(tiny_model, tmp_path, count):
    write_rows(tmp_path, [document(9 * i, 30) for i in range(count)], [document(1, 20)])
    config = train_config(tiny_model, max_steps=None, epochs=8, batch_size=4, gradient_accumulation=1)
    result = run_train(config, tmp_path)
    assert result.steps == 8 * count // 4
    assert result.tokens == 8 * count * 30
    assert result.validation_loss is not None


def test_a_fraction_of_an_epoch_is_a_fraction_of_the_rows(tiny_model, tmp_path):
    write_rows(tmp_path, [document(i, 30) for i in range(10)])
    config = train_config(tiny_model, max_steps=None, epochs=0.5, batch_size=2, gradient_accumulation=1)
    result = run_train(config, tmp_path)
    assert (result.steps, result.tokens) == (3, 5 * 30)


def overfitting(tmp_path):
    """Rows to learn by heart, and validation rows of which no token is in them."""
    write_rows(tmp_path, [document(0, 32)] * 4, [document(3, 32)] * 2)
    return {
        "max_steps": 24,
        "gradient_accumulation": 1,
        "validate_every_steps": 4,
        "optimizer": {"learning_rate": 5e-2, "schedule": "constant"},
    }


def test_the_adapter_with_the_lowest_validation_loss_is_the_result(tiny_model, tmp_path):
    config = train_config(tiny_model, **overfitting(tmp_path))
    result = run_train(config, tmp_path)
    assert result.best_step < result.steps == 24
    base = load_base(tiny_model, torch.float32)
    model = AdaptedModel(attach_adapter(base, config.recipe.lora, config.model, 0), torch.device("cpu"), config.recipe)
    model.load(load_file(stage_folder(tmp_path) / "output" / "adapter_model.safetensors"))
    rows = PackedRows(tmp_path / "prepare" / PREPARED / "output", "validation")
    loss = Validator(rows, 2, None, 24).loss(model, lambda: None)
    assert loss == pytest.approx(result.validation_loss, abs=1e-6)


def test_training_ends_when_the_validation_loss_has_stopped_falling(tiny_model, tmp_path):
    recipe = overfitting(tmp_path) | {"early_stopping": {"patience": 2}}
    result = run_train(train_config(tiny_model, **recipe), tmp_path)
    assert result.steps == result.best_step + 8 < 24


def test_tokens_of_another_tokenizer_are_refused(tmp_path):
    smaller = make_tiny_model(tmp_path / "model", vocabulary=290)
    write_rows(tmp_path, documents(20))
    with pytest.raises(DataInvalid, match=r"the model knows 0 to 289: .* another model's tokenizer"):
        run_train(train_config(smaller), tmp_path)


def test_a_loss_that_is_no_number_ends_the_stage_and_names_the_step(tmp_path):
    model = make_tiny_model(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][300] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    poisoned = document(0, 32)
    poisoned.tokens[10] = 300
    write_rows(tmp_path, [document(0, 32)] * 7 + [poisoned])
    config = train_config(model, max_steps=4)
    step = next(step for step in range(4) if 7 in StepSampler.of(config.recipe, 8, config.seed).rows_for_step(step)) + 1
    with pytest.raises(Diverged, match=rf"step {step}: the loss is nan.*lower train.optimizer.learningRate"):
        run_train(config, tmp_path)


def test_missing_rows_ask_for_prepare(tiny_model, tmp_path):
    with pytest.raises(SourceNotFound, match="run the stage prepare first"):
        run_train(train_config(tiny_model), tmp_path)


def test_rows_that_changed_since_they_were_packed_are_refused(tiny_model, workspace):
    rows = workspace / "prepare" / ("p" * 16) / "output" / "train.tokens.bin"
    rows.write_bytes(b"\x07" + rows.read_bytes()[1:])
    with pytest.raises(DataInvalid, match=r"train.tokens.bin does not match the digest.*run prepare again"):
        run_train(train_config(tiny_model), workspace)


def test_no_rows_at_all_are_refused(tiny_model, tmp_path):
    write_rows(tmp_path, [])
    with pytest.raises(DataInvalid, match="no training rows"):
        run_train(train_config(tiny_model), tmp_path)


def test_rows_of_which_no_token_counts_are_refused(tiny_model, tmp_path):
    write_rows(tmp_path, [document(0, 20, prompt=20)])
    with pytest.raises(DataInvalid, match="no token of the packed rows counts"):
        run_train(train_config(tiny_model), tmp_path)


def test_early_stopping_that_could_never_act_is_refused(tiny_model, tmp_path):
    write_rows(tmp_path, documents(20))
    with pytest.raises(ConfigInvalid, match=r"set train.validateEverySteps"):
        run_train(train_config(tiny_model, validate_every_steps=None, early_stopping={}), tmp_path)
    with pytest.raises(DataInvalid, match=r"raise dataset.validationFraction"):
        run_train(train_config(tiny_model, early_stopping={}), tmp_path)


def test_rows_longer_than_the_models_positions_are_refused(tiny_model, tmp_path):
    write_rows(tmp_path, documents(20), context_length=1024)
    with pytest.raises(ConfigInvalid, match=r"set prepare.contextLength to 512 or less"):
        run_train(train_config(tiny_model), tmp_path)


def test_the_traced_model_learns_the_same(tmp_path, monkeypatch):
    """Without the later stages of torch.compile, whose C++ compiler runs for half a minute."""
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compile_module(module, backend="eager"))
    model = make_tiny_model(tmp_path / "model", layers=1)
    write_rows(tmp_path, [document(0, 32)] * 2)
    once = {"max_steps": 1, "lora": {"rank": 4, "dropout": 0, "target_modules": ["q_proj"]}, "gradient_accumulation": 1}
    plain = run_train(train_config(model, **once), tmp_path)
    traced = run_train(train_config(model, **once, compile=True, identity="b" * 16), tmp_path)
    assert traced.loss == pytest.approx(plain.loss, abs=1e-5)
