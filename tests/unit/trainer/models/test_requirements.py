"""Base models that cannot be trained: prepare refuses each in one sentence, and no attempt is repeated."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.trainer.families import FAMILIES, make_family_model
from support.trainer.foreign_errors import FOREIGN
from support.trainer.models import prompt_records, write_jsonl
from support.trainer.prepared import prepare, prepare_config
from support.trainer.stages import run_to_failure

from finetune_trainer.contract import ExitCode, TrainRecipe
from finetune_trainer.models.loading import load_base
from finetune_trainer.models.positions import positions_of
from finetune_trainer.models.requirements import check_config
from finetune_trainer.models.structure import check_stored_weights, load_structure
from finetune_trainer.runtime.errors import ConfigInvalid

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(tiny_model, tmp_path):
    """A copy of the tiny model that a test may change."""
    return shutil.copytree(tiny_model, tmp_path / "model")


@pytest.fixture
def refused(model, environment, manifest_dir):
    """A function that runs prepare with the model and returns the message of its refusal."""
    write_jsonl(manifest_dir / "data.jsonl", prompt_records(8))

    def refused(**changes: object) -> str:
        config = prepare_config(model).model_copy(update=changes)
        message, code = run_to_failure(config, environment)
        assert code == ExitCode.CONFIG
        assert code.is_permanent
        assert "Traceback" not in message
        # The first sentence and the last end of the sentence: one line, without a list of classes.
        assert "\n" not in message
        assert len(message) < 400
        return message.removeprefix(f"file://{model}: ")

    return refused


def edit_config(model: Path, **changes: object) -> None:
    """Change keys of config.json; None removes a key."""
    config = json.loads((model / "config.json").read_text()) | changes
    kept = {name: value for name, value in config.items() if value is not None}
    (model / "config.json").write_text(json.dumps(kept))


CONFIGS = [
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "(gptq)", "is not quantized"),
    ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "(awq)", "is not quantized"),
    ({"compression_config": {"format": "int"}}, "already quantized", "is not quantized"),
    ({"quantization": {"group_size": 64, "bits": 4}}, "already quantized (quantization)", "is not quantized"),
    ({"architectures": ["LlamaForRewardModel"]}, "the output head of another task", "use its base model"),
    ({"model_type": "mistral3"}, "a vision-language model (mistral3)", "use a text model"),
    ({"model_type": "qwen2_5_vl"}, "a vision-language model (qwen2_5_vl)", "use a text model"),
    ({"model_type": "whisper"}, "a speech model (whisper)", "use a text model"),
    ({"model_type": "wav2vec2"}, "a speech model (wav2vec2)", "use a text model"),
    ({"model_type": "bert"}, "an encoder (bert)", "use a text model"),
    ({"model_type": "modernbert"}, "an encoder (modernbert)", "use a text model"),
    ({"model_type": "t5"}, "an encoder-decoder model (t5)", "use a text model"),
    ({"model_type": "bart"}, "an encoder-decoder model (bart)", "use a text model"),
    ({"model_type": "vit"}, "an image model (vit)", "use a text model"),
    ({"model_type": "lama"}, "its type lama is unknown to transformers", "if llama was meant"),
    ({"model_type": None}, "config.json has no model_type", "Hugging Face format"),
    ({"model_type": "mine", "auto_map": {"AutoConfig": "code.C"}}, "its type mine needs the code", "use a model"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "the output head of another task", "use its base model"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "problem", "fix"), CONFIGS)
def test_config_of_another_kind_of_model_is_refused(
    model, refused, changes, problem, fix
):
    edit_config(model, **changes)
    message = refused()
    assert problem in message
    assert fix in message


FILES = [
    (lambda model: (model / WEIGHTS).unlink(), "has no weights: copy model.safetensors"),
    (lambda model: (model / WEIGHTS).rename(model / "pytorch_model.bin"), "pickled weights only (pytorch_model.bin)"),
    (lambda model: (model / WEIGHTS).rename(model / "model-Q4_K_M.gguf"), "GGUF format only (model-Q4_K_M.gguf)"),
    (lambda model: (model / WEIGHTS).rename(model / "consolidated.safetensors"), "as consolidated.safetensors only"),
    (lambda model: (model / WEIGHTS).rename(model / "model-00001-of-00002.safetensors"), f"and no {INDEX}"),
    (lambda model: (model / INDEX).write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'),
     "names model-00001-of-00002.safetensors, which does not exist: copy the whole model"),
    (lambda model: (model / INDEX).write_text('{"weight_map": '), f"{INDEX} is not JSON"),
    (lambda model: (model / INDEX).write_text("{}"), f"{INDEX} has no weight_map"),
    (lambda model: (model / WEIGHTS).write_bytes((model / WEIGHTS).read_bytes()[:-9]), "was not copied to its end"),
    (lambda model: (model / WEIGHTS).write_bytes((model / WEIGHTS).read_bytes()[:90]), "was not copied to its end"),
    (lambda model: (model / WEIGHTS).write_bytes(b""), "it has 0 bytes"),
    (lambda model: (model / WEIGHTS).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid"), "git lfs pull"),
    (lambda model: (model / "config.json").write_text('{"model_type": "llama",'), "config.json is not JSON"),
    (lambda model: (model / "config.json").write_text("[]"), "config.json is no JSON object"),
    (lambda model: (model / "config.json").write_bytes(b"\xff\xfe{"), "config.json is not JSON"),
    (lambda model: (model / "tokenizer.json").unlink(), "has no tokenizer: copy tokenizer.json"),
    (lambda model: (model / "tokenizer.json").write_text('{"version": '), "tokenizer.json is not JSON"),
    (lambda model: (model / "tokenizer.json").write_text('{"version": "1.0"}'), "its tokenizer cannot be loaded"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "problem"), FILES)
def test_missing_or_damaged_file_is_refused(model, refused, damage, problem):
    damage(model)
    assert problem in refused()


def test_slow_tokenizer_is_refused_with_the_way_to_a_fast(model, refused):
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.model").write_bytes(b"no sentencepiece model")
    message = refused()
    assert "a slow tokenizer only (tokenizer.model)" in message
    assert "save_pretrained" in message


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_weights_of_a_quantized_type_are_refused(model, refused, kind):
    weights = load_file(model / WEIGHTS)
    name = "model.layers.0.mlp.down_proj.weight"
    weights[name] = weights[name].to(kind)
    save_file(weights, model / WEIGHTS)
    assert "use a base model that is not quantized" in refused()


@pytest.mark.parametrize(
    ("uri", "base"),
    [
        ("hf://unsloth/Qwen3-4B-unsloth-bnb-4bit", "hf://unsloth/Qwen3-4B"),
        ("hf://Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "hf://Qwen/Qwen2.5-7B-Instruct"),
        ("hf://Qwen/Qwen2.5-7B-Instruct-AWQ", "hf://Qwen/Qwen2.5-7B-Instruct"),
        ("hf://Qwen/Qwen3-8B-FP8", "hf://Qwen/Qwen3-8B"),
        ("hf://org/Llama-quantized.w4a16", "hf://org/Llama"),
    ],
)
def test_name_of_a_quantized_model_leads_to_its_base(uri, base):
    config = {"model_type": "llama", "quantization_config": {"quant_method": "x"}}
    with pytest.raises(ConfigInvalid, match=f"not quantized; it may be {base}$"):
        check_config(uri, config)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_model_of_a_known_family_passes_all_checks(name, tmp_path):
    folder = make_family_model(FAMILIES[name], tmp_path / name)
    check_config(name, json.loads((folder / "config.json").read_text()))
    structure = load_structure(folder, name)
    assert {weight.device.type for weight in structure.parameters()} == {"meta"}
    check_stored_weights(folder, name, structure)


def test_weights_of_another_shape_are_found_without_reading(model):
    edit_config(model, num_hidden_layers=3)
    structure = load_structure(model, "m")
    with pytest.raises(ConfigInvalid, match=r"do not match its config.json.*layers\.2"):
        check_stored_weights(model, "m", structure)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0},
        {"hidden_size": "wide"},
        {"num_hidden_layers": []},
        {"vocab_size": "320"},
        {"rope_parameters": [1, 2]},
    ],
)
def test_impossible_config_ends_as_one_sentence(model, changes):
    edit_config(model, **changes)
    with pytest.raises(ConfigInvalid) as refused:
        load_structure(model, "m")
    assert "\n" not in str(refused.value)
    assert "use config.json and weights of the same model" in str(refused.value)
    assert FOREIGN.search(str(refused.value)) is None


POSITIONS = [
    ({"max_position_embeddings": 512}, 512),
    ({"n_positions": 1024}, 1024),
    ({}, None),
    ({"text_config": {"max_position_embeddings": 99}}, 99),
    ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
    ({"max_position_embeddings": 32768, "rope_parameters": {
        "rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}}, 131072),
    ({"max_position_embeddings": 131072, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}}, 131072),
    ({"max_position_embeddings": 131072, "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8}}},
     131072),
]  # fmt: skip


@pytest.mark.parametrize(("config", "positions"), POSITIONS)
def test_positions_of_a_model_include_its_scaling(config, positions):
    assert positions_of(config) == positions


def test_rows_longer_than_the_model_are_refused_by_prepare(refused):
    recipe = prepare_config(Path("m"), context_length=1024).recipe
    message = refused(recipe=recipe)
    assert "supports 512 positions, the packed rows have 1024" in message
    assert "set prepare.contextLength to 512 or less" in message


def test_unknown_layer_is_refused_by_prepare(refused):
    recipe = TrainRecipe(lora={"target_modules": ("q_porj",)})
    message = refused(training=recipe)
    assert "train.lora.targetModules: q_porj matches no layer" in message
    assert "did you mean q_proj?" in message


def test_layer_that_lora_cannot_adapt_is_refused_by_prepare(refused):
    recipe = TrainRecipe(lora={"target_modules": ("input_layernorm",)})
    assert "a LlamaRMSNorm, which LoRA cannot adapt" in refused(training=recipe)


def test_unknown_layer_to_save_is_refused_by_prepare(refused):
    recipe = TrainRecipe(lora={"modules_to_save": ("embed_token",)})
    assert "did you mean embed_tokens?" in refused(training=recipe)


def add_token(model: Path, token: str, **special: str) -> None:
    """Add a token to the tokenizer, without an embedding."""
    from transformers import AutoTokenizer  # noqa: PLC0415  the import takes seconds

    tokenizer = AutoTokenizer.from_pretrained(model)
    added: dict[str, Any] = {"additional_special_tokens": [token]}
    tokenizer.add_special_tokens(special or added)
    tokenizer.save_pretrained(model)


def test_used_token_without_an_embedding_is_refused(model, refused, manifest_dir):
    add_token(model, "<|tool|>")
    write_jsonl(manifest_dir / "data.jsonl", [{"text": "the file <|tool|>"}])
    message = refused()
    assert "the tokenizer has 321 tokens and the model 320 embeddings" in message
    assert "the records use <|tool|>: resize the embeddings" in message


def test_unused_token_without_an_embedding_is_only_logged(
    model, environment, manifest_dir, capsys
):
    add_token(model, "<|tool|>")
    write_jsonl(manifest_dir / "data.jsonl", prompt_records(8))
    assert prepare(prepare_config(model), environment).records == 8
    assert "none for <|tool|>: a record with such a token" in capsys.readouterr().out


def test_padding_token_without_an_embedding_is_not_used(
    model, environment, manifest_dir
):
    """A [PAD] beyond the embeddings pads no row: the model would have to look it up."""
    add_token(model, "[PAD]", pad_token="[PAD]")
    write_jsonl(manifest_dir / "data.jsonl", prompt_records(8))
    prepare(prepare_config(model), environment)
    output = environment.stage_dir("prepare", "b" * 16) / "output"
    index = json.loads((output / "rows.json").read_text())
    assert index["padTokenId"] < 320


@pytest.mark.parametrize(
    "training", [{"eval_steps": 5}, {"eval_steps": 5, "early_stopping": {}}]
)
def test_validation_without_rows_is_refused(model, environment, manifest_dir, training):
    write_jsonl(manifest_dir / "data.jsonl", prompt_records(8))
    recipe = TrainRecipe.model_validate(training)
    config = prepare_config(model).model_copy(update={"training": recipe})
    message, code = run_to_failure(config, environment)
    assert code == ExitCode.DATA
    assert "needs validation rows: validation.fraction is 0; raise" in message


@pytest.mark.parametrize("content", ["{broken", "[]"])
def test_config_that_later_stages_read_is_checked_first(model, refused, content):
    (model / "generation_config.json").write_text(content)
    assert refused().startswith("generation_config.json is no")


def test_weights_without_a_place_in_the_model_are_refused(model):
    """transformers drops them with a warning, so that another model would be trained."""
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    edit_config(model, num_hidden_layers=layers - 1)
    with pytest.raises(ConfigInvalid, match=r"no place for \d+ of its weights"):
        load_base(model, torch.float32)
