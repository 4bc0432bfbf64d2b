"""What train refuses about a base model is refused without its weights, in the same words, and nothing more is."""

import json
from pathlib import Path

import pytest
import torch
from support.trainer.architectures import ARCHITECTURES, small_model

from finetune_trainer.contract import Lora, ModelSource, PrepareConfig, TrainRecipe
from finetune_trainer.models.base_model import BaseModel
from finetune_trainer.models.isolation import check_packing
from finetune_trainer.models.loading import load_base, load_config
from finetune_trainer.models.structure import check_stored_weights, load_structure
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.training.methods.lora import attach_adapter, check_names
from finetune_trainer.training.methods.trainable import Trainable, WeightsFormat
from finetune_trainer.training.model.model import TrainedModel, check_isolation
from finetune_trainer.training.requirements import setting_errors

RECURRENT = (
    *("FalconH1Config", "BambaConfig", "JambaConfig", "Mamba2Config"),
    *("MambaConfig", "MptConfig", "BloomConfig", "Qwen3NextConfig"),
)
"""Architectures in which train has always refused packing."""
CPU = torch.device("cpu")


def message_of(check, *arguments) -> str:
    """Return the message with which a check refuses; empty if it does not."""
    try:
        check(*arguments)
    except ConfigInvalid as error:
        return str(error)
    return ""


@pytest.fixture
def stored(tmp_path):
    """A function that writes a model of an architecture and returns its folder."""

    def stored(name: str) -> Path:
        small_model(name).save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return stored


def trained(model, recipe: TrainRecipe) -> TrainedModel:
    return TrainedModel(Trainable(model, {}, WeightsFormat("", {})), CPU, recipe)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packing_is_refused_as_in_training(name, stored):
    folder = stored(name)
    model = trained(load_base(folder, torch.float32), TrainRecipe(dtype="FP32"))
    in_training = message_of(check_isolation, model, "m")
    before = message_of(check_packing, load_structure(folder, "m"), "m")
    assert before == in_training
    if name in RECURRENT:
        assert "set prepare.packing to false" in before


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("target", ["all-linear", "out_proj", "q_proj"])
def test_layers_are_refused_as_in_training(name, target, stored):
    folder = stored(name)
    lora = Lora(target_modules=(target,))
    before = message_of(check_names, load_structure(folder, "m"), lora)
    base = load_base(folder, torch.float32)
    source = ModelSource(uri="m")
    assert message_of(attach_adapter, base, lora, source, 1) == before
    if target == "all-linear":
        assert before == ""


SHAPES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
)


@pytest.mark.parametrize(
    "name",
    ["LlamaConfig", "Qwen3MoeConfig", "FalconH1Config", "GPT2Config", "Lfm2Config"],
)
@pytest.mark.parametrize("key", ["", *SHAPES])
def test_shapes_are_refused_as_in_training(name, key, stored):
    folder = stored(name)
    config = json.loads((folder / "config.json").read_text())
    if key in config:
        value = config[key]
        config[key] = not value if isinstance(value, bool) else 2 * value
    (folder / "config.json").write_text(json.dumps(config))

    def check() -> None:
        check_stored_weights(folder, "m", load_structure(folder, "m"))

    before = message_of(check)

    def train() -> None:
        # As the stage does.
        load_config(folder, "m")
        load_base(folder, torch.float32, "m")

    in_training = message_of(train)
    assert bool(before) == bool(in_training)
    if "config.json describes no model" not in before:
        assert before == in_training
    if not key:
        assert before == ""


def errors_of(folder: Path, recipe: dict, **training) -> dict[str, str]:
    config = PrepareConfig.model_validate(
        {
            "identity": "a" * 16,
            "model": {"uri": "m"},
            "datasets": [{"uri": "d"}],
            "recipe": {"contextLength": 64} | recipe,
            "training": training,
        }
    )
    structure = load_structure(folder, "m")
    errors = setting_errors(
        BaseModel("m", folder, ""), config, structure, has_weights=True
    )
    return {field: str(error) for field, error in errors}


def test_settings_that_suit_a_recurrent_model_are_accepted(stored):
    folder = stored("FalconH1Config")
    assert list(errors_of(folder, {})) == ["prepare.packing"]
    assert errors_of(folder, {"packing": False}) == {}


def test_full_training_of_fused_experts_is_refused(stored):
    folder = stored("Qwen3MoeConfig")
    assert errors_of(folder, {}) == {}
    message = errors_of(folder, {}, method="Full")["train.method"]
    assert "set train.method to LoRA" in message


def test_layer_in_4_bits_cannot_be_saved_whole(stored):
    folder = stored("LlamaConfig")
    assert errors_of(folder, {}, lora={"modulesToSave": ["mlp"]}) == {}
    for name in ("mlp", "q_proj"):
        message = errors_of(folder, {}, method="QLoRA", lora={"modulesToSave": [name]})
        assert f"{name} has weights in 4 bits" in message["train.lora"]
    for name in ("lm_head", "embed_tokens"):
        lora = {"modulesToSave": [name]}
        assert errors_of(folder, {}, method="QLoRA", lora=lora) == {}


def test_recomputing_is_refused_as_in_training(stored):
    folder = stored("BloomConfig")
    base = load_base(folder, torch.float32)
    base.supports_gradient_checkpointing = False
    recipe = TrainRecipe(dtype="FP32", gradient_checkpointing=True)
    with pytest.raises(ConfigInvalid, match="does not support it: set it to false"):
        trained(base, recipe)


def test_large_model_is_checked_in_little_memory(tmp_path):
    """A model of 70 billion weights, of which nothing is there but config.json."""
    config = {
        "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert message_of(check_packing, load_structure(tmp_path, "m"), "m") == ""
