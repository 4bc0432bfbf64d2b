"""A preview looks at the base model and at the settings that depend on it, as prepare does."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from support.stores.hub_environment import hub_in, model_files
from support.trainer.families import FAMILIES, make_family_model
from support.trainer.models import prompt_records, write_jsonl

from finetune_trainer.contract import Environment, PrepareConfig, TrainRecipe
from finetune_trainer.contract.preview import PreviewRequest
from finetune_trainer.models.structure import load_structure
from finetune_trainer.preview.preview import preview
from finetune_trainer.training.requirements import unquantized_experts


@pytest.fixture
def model(tiny_model, tmp_path):
    """A copy of the tiny model that a test may change."""
    return shutil.copytree(tiny_model, tmp_path / "model")


@pytest.fixture
def look(model, tmp_path):
    """A function that previews records with these changes of the config, and returns the report."""

    def look(uri: str = "", length: int = 64, **changes: object):
        data = tmp_path / "data.jsonl"
        if not data.exists():
            write_jsonl(data, prompt_records(20))
        fields = {
            "identity": "a" * 16,
            "model": {"uri": uri or f"file://{model}"},
            "datasets": [{"uri": f"file://{data}"}],
            "recipe": {"contextLength": length},
        }
        config = PrepareConfig.model_validate(fields | changes)
        return preview(PreviewRequest(config=config), Environment(tmp_path / "work"))

    return look


def problems_of(report) -> dict[str, str]:
    assert {problem.exit_code for problem in report.problems} <= {64}, report.problems
    return {problem.field: problem.message for problem in report.problems}


def test_model_that_can_be_trained_has_no_problem(look):
    report = look(training={"lora": {"targetModules": ["q_proj"]}})
    assert problems_of(report) == {}
    assert report.counts.records == 20


def test_each_setting_that_does_not_suit_the_model_is_named(look):
    report = look(
        length=1024, training={"lora": {"targetModules": ["q_porj", "v_proj"]}}
    )
    problems = problems_of(report)
    assert (
        "set prepare.contextLength to 512 or less" in problems["prepare.contextLength"]
    )
    assert "did you mean q_proj?" in problems["train.lora.targetModules"]
    # The records are read all the same.
    assert report.counts.records == 20


def test_unknown_layer_to_save_has_its_own_field(look):
    report = look(training={"lora": {"modulesToSave": ["lm_haed"]}})
    message = problems_of(report)["train.lora.modulesToSave"]
    assert "did you mean lm_head?" in message


def test_full_training_ignores_the_layers_of_lora(look):
    assert problems_of(look(training={"method": "Full"})) == {}


def test_weights_of_another_model_are_a_problem(look, model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert "do not match its config.json" in problems_of(look())["model.uri"]


def test_token_that_occurs_without_an_embedding_is_a_problem(look, model, tmp_path):
    from transformers import AutoTokenizer  # noqa: PLC0415  the import takes seconds

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    tokenizer.save_pretrained(model)
    assert problems_of(look()) == {}
    write_jsonl(tmp_path / "data.jsonl", [{"text": "a <|tool|>"}])
    assert "the records use <|tool|>" in problems_of(look())["model.uri"]


def test_experts_that_qlora_leaves_in_16_bits_are_noted(look, tmp_path):
    folder = make_family_model(FAMILIES["qwen3-moe"], tmp_path / "moe")
    report = look(f"file://{folder}", training={"method": "QLoRA"})
    [note] = [note for note in report.notes if "QLoRA" in note]
    assert "the experts stay in 16 bits, 0.0 GiB" in note
    structure = load_structure(folder, "m")
    # Two layers of four experts: gate and up of 32 x 32 each, and down.
    count = 2 * 4 * (2 * 32 * 32 + 32 * 32)
    assert unquantized_experts(TrainRecipe(method="QLoRA"), structure) == 2 * count
    assert unquantized_experts(TrainRecipe(), structure) == 0
    dense = load_structure(tmp_path / "model", "m")
    assert unquantized_experts(TrainRecipe(method="QLoRA"), dense) == 0


HUB_MODELS = [
    ({"quantization_config": {"quant_method": "awq"}}, {}, "already quantized (awq)"),
    ({}, {"model.safetensors": "pytorch_model.bin"}, "pickled weights only (pytorch_model.bin)"),
    ({"model_type": "mistral3"}, {}, "a vision-language model (mistral3)"),
]  # fmt: skip


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with hub_in(tmp_path / "hub", monkeypatch, "people") as hub:
        yield hub


@pytest.mark.parametrize("case", HUB_MODELS)
def test_model_of_a_hub_is_refused_before_its_weights(look, hub, model, case):
    config, renamed, problem = case
    for old, new in renamed.items():
        (model / old).rename(model / new)
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(values | config))
    hub.add_repository("people/tiny", model_files(model))
    assert problem in problems_of(look("hf://people/tiny"))["model.uri"]
    weights = (".safetensors", ".bin", ".gguf")
    assert not [name for name in hub.downloads() if name.endswith(weights)]


def test_structure_takes_no_memory(tmp_path):
    """A model of 8 billion weights, of which nothing is there but config.json."""
    config = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    }  # fmt: skip
    Path(tmp_path / "config.json").write_text(json.dumps(config))
    structure = load_structure(tmp_path, "m")
    assert sum(weight.numel() for weight in structure.parameters()) > 8e9
    assert all(
        weight.device == torch.device("meta") for weight in structure.parameters()
    )
