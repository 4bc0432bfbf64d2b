"""The published model computes what was trained, for every architecture and every kind of adapter."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from support.operator.adapters import make_adapter
from support.trainer.families import ATTENTION, FAMILIES, TURN_END, make_family_model
from support.trainer.models import SENTENCES, write_jsonl
from support.trainer.stages import environment_in, run_to_result
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune_trainer.contract import (
    Environment,
    Lora,
    ModelSource,
    PrepareConfig,
    PrepareResult,
    PushConfig,
    PushResult,
    TrainConfig,
    TrainResult,
)
from finetune_trainer.data.records.chat_template import end_tokens
from finetune_trainer.models.loading import load_base
from finetune_trainer.models.stored_weights import StoredWeights
from finetune_trainer.models.trained.merge import load_merged, save_merged, with_adapter
from finetune_trainer.publishing.generation_config import generation_config
from finetune_trainer.training.methods.lora import adapter_config, attach_adapter

torch.set_num_threads(1)

MODEL = {"uri": "model"}
QUESTION = "Which one?"


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def prepared(family, tmp_path_factory) -> Environment:
    """A model of the family, and packed conversations."""
    environment = environment_in(tmp_path_factory.mktemp("family"))
    assert environment.manifest_dir
    make_family_model(family, environment.manifest_dir / "model")
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": SENTENCES[0]},
    ]
    write_jsonl(environment.manifest_dir / "data.jsonl", [{"messages": messages}] * 8)
    config = PrepareConfig.model_validate(
        {
            "identity": "p",
            "model": MODEL,
            "datasets": [{"uri": "data.jsonl"}],
            "validation": {"fraction": 0},
            "recipe": {
                "context_length": 64,
                **({} if family.packing else {"packing": False}),
            },
        }
    )
    assert run_to_result(config, environment, PrepareResult).conversations
    return environment


@pytest.fixture(params=["LoRA", "RsLoRA", "DoRA"])
def trained(family, prepared, request) -> str:
    """Train until the model has learned the answer; return the identity of the stage."""
    config = TrainConfig.model_validate(
        {
            "identity": request.param,
            "prepare": "p",
            "model": MODEL,
            "checkpoint": {},
            "recipe": {
                "max_steps": 60,
                "micro_batch_size": 2,
                "dtype": "FP32",
                "lora": {
                    "rank": 8,
                    "alpha": 16,
                    "target_modules": family.targets,
                    "variant": request.param,
                },
                "optimizer": {"learning_rate": 2e-2},
            },
        }
    )
    assert run_to_result(config, prepared, TrainResult).loss < 0.5
    return request.param


def push(environment: Environment, trained: str) -> Path:
    """Push in fp32 and return the folder of the published model."""
    config = PushConfig.model_validate(
        {
            "identity": f"push-{trained}",
            "prepare": "p",
            "train": trained,
            "model": MODEL,
            "datasets": [{"uri": "data.jsonl"}],
            "recipe": {
                "targets": [{"uri": f"published/{trained}"}],
                "dtype": "FP32",
            },
            "lineage": {"pipeline": "default/families"},
        }
    )
    run_to_result(config, environment, PushResult)
    assert environment.manifest_dir
    return environment.manifest_dir / "published" / trained / "latest"


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tokens, use_cache=False).logits


def test_published_model_computes_and_stops_as_trained(prepared, trained, tmp_path):
    published = push(prepared, trained)
    base = prepared.manifest_dir / "model"
    adapter = prepared.stage_dir("train", trained) / "output"
    tokenizer = AutoTokenizer.from_pretrained(published)
    model = AutoModelForCausalLM.from_pretrained(published)

    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=False,
    )
    expected = logits(with_adapter(base, adapter, torch.float32), prompt)
    assert (
        logits(AutoModelForCausalLM.from_pretrained(base), prompt) - expected
    ).abs().max() > 0.5 * expected.std()
    assert (logits(model, prompt) - expected).abs().max() < 1e-4 * expected.std()

    answer = model.generate(prompt, max_new_tokens=60, do_sample=False)[
        0, prompt.shape[1] :
    ]
    assert tokenizer.decode(answer) == f"{SENTENCES[0]}<|im_end|>"
    assert answer[-1] == TURN_END

    # In bf16 every weight is the fp32 one, rounded once.
    save_merged(base, adapter, torch.bfloat16, tmp_path)
    rounded = load_file(tmp_path / "model.safetensors")
    for name, weight in load_file(published / "model.safetensors").items():
        assert torch.equal(rounded[name], weight.to(torch.bfloat16)), name


def adapted_layers(folder: Path, *names: str) -> set[str]:
    base = load_base(folder, torch.float32)
    model = attach_adapter(
        base, Lora(target_modules=names), ModelSource(uri="m"), seed=1
    )
    return {
        name.split(".lora_")[0].removeprefix("base_model.model.")
        for name in get_peft_model_state_dict(model)
    }


def test_all_linear_of_a_moe_model_adapts_attention_only(tmp_path):
    folder = make_family_model(FAMILIES["qwen3-moe"], tmp_path)
    layers = adapted_layers(folder, "all-linear")
    assert layers == {
        f"model.layers.{number}.self_attn.{name}"
        for number in range(2)
        for name in ATTENTION
    }


def test_all_linear_of_a_hybrid_model_adapts_its_mixers(tmp_path):
    folder = make_family_model(FAMILIES["granite-hybrid"], tmp_path)
    layers = {name.rpartition(".")[2] for name in adapted_layers(folder, "all-linear")}
    assert layers == {
        *ATTENTION,
        "in_proj",
        "out_proj",
        "input_linear",
        "output_linear",
    }


def test_experts_are_adapted_by_name_and_merged_with_the_model(tmp_path):
    folder = make_family_model(FAMILIES["qwen3-moe"], tmp_path / "model")
    base = load_base(folder, torch.float32)
    names = ("q_proj", "gate_proj", "up_proj", "down_proj")
    model = attach_adapter(
        base, Lora(target_modules=names), ModelSource(uri="m"), seed=1
    )
    adapter = save_adapter(model, tmp_path / "adapter")
    published = tmp_path / "published"
    published.mkdir()
    tokens = torch.arange(5, 40)[None]
    expected = logits(model, tokens)
    assert (
        logits(load_base(folder, torch.float32), tokens) - expected
    ).abs().max() > 0.1 * expected.std()
    save_merged(folder, adapter, torch.float32, published)
    assert (
        logits(load_base(published, torch.float32), tokens) - expected
    ).abs().max() < 1e-4 * expected.std()
    assert torch.equal(
        logits(load_merged(folder, adapter, torch.float32), tokens),
        logits(load_base(published, torch.float32), tokens),
    )


def test_merged_model_in_memory_has_the_published_bytes(prepared, trained, tmp_path):
    base = prepared.manifest_dir / "model"
    adapter = prepared.stage_dir("train", trained) / "output"
    save_merged(base, adapter, torch.bfloat16, tmp_path)
    published = AutoModelForCausalLM.from_pretrained(tmp_path)
    in_memory = load_merged(base, adapter, torch.bfloat16).state_dict()
    assert all(
        torch.equal(in_memory[name], weight)
        for name, weight in published.state_dict().items()
    )


def test_merge_writes_files_that_hold_every_tensor_once(tmp_path, monkeypatch):
    folder = make_family_model(FAMILIES["llama-untied"], tmp_path / "model")
    adapter = make_adapter(tmp_path / "adapter", folder)
    monkeypatch.setattr("finetune_trainer.models.trained.merge.SHARD", "20KB")
    (tmp_path / "published").mkdir()
    save_merged(folder, adapter, torch.float32, tmp_path / "published")
    stored = StoredWeights(tmp_path / "published")
    assert stored.meta.keys() == StoredWeights(folder).meta.keys()
    assert len(list((tmp_path / "published").glob("model-*-of-*.safetensors"))) > 3
    assert (
        load_base(tmp_path / "published", torch.float32).config.tie_word_embeddings
        is False
    )


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (
            {"eos_token_id": 2, "temperature": 0.6},
            {"eos_token_id": [4, 2], "temperature": 0.6},
        ),
        ({"eos_token_id": [2, 7]}, {"eos_token_id": [4, 2, 7]}),
        ({"eos_token_id": 4}, {"eos_token_id": [4, 2]}),
        (None, {"bos_token_id": 1, "eos_token_id": [4, 2], "pad_token_id": 0}),
    ],
)
def test_generation_config_ends_where_training_data_ends(tmp_path, stored, expected):
    (tmp_path / "config.json").write_text(
        '{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "rope": {}}'
    )
    if stored:
        (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    assert generation_config(tmp_path, (4, 2)) == expected


def test_end_tokens_are_the_turn_end_and_eos(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(
        make_family_model(FAMILIES["llama-tied"], tmp_path)
    )
    assert end_tokens(tokenizer, conversations=True) == (TURN_END, 2)
    assert end_tokens(tokenizer, conversations=False) == (2,)
    tokenizer.chat_template = None  # the default template ends turns with EOS
    assert end_tokens(tokenizer, conversations=True) == (2,)


def save_adapter(model: Any, folder: Path) -> Path:
    """Write the adapter with random weights, as the stage train does."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.05)
    folder.mkdir()
    save_file(
        get_peft_model_state_dict(model, save_embedding_layers=False),
        folder / "adapter_model.safetensors",
    )
    (folder / "adapter_config.json").write_bytes(adapter_config(model))
    return folder


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "q_proj"])
def test_stored_head_of_a_model_that_claims_to_tie_it_is_kept(tmp_path, target):
    folder = make_family_model(FAMILIES["llama-untied"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"tie_word_embeddings": True})
    )
    base = load_base(folder, torch.float32)
    model = attach_adapter(
        base, Lora(target_modules=(target,)), ModelSource(uri="m"), seed=1
    )
    adapter = save_adapter(model, tmp_path / "adapter")
    tokens = torch.arange(5, 40)[None]
    expected = logits(model, tokens)
    (tmp_path / "published").mkdir()
    save_merged(folder, adapter, torch.float32, tmp_path / "published")
    assert (
        logits(load_base(tmp_path / "published", torch.float32), tokens) - expected
    ).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("main", "exception"), [("bfloat16", "float32"), ("float32", "bfloat16")]
)
def test_adapted_layer_of_another_dtype_gets_the_published_one(
    tmp_path, main, exception
):
    folder = make_family_model(FAMILIES["llama-untied"], tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    dtypes = {name: exception if "q_proj" in name else main for name in weights}
    stored = {
        name: tensor.to(getattr(torch, dtypes[name]))
        for name, tensor in weights.items()
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    adapter = make_adapter(tmp_path / "adapter", folder)
    (tmp_path / "published").mkdir()
    dtype = getattr(torch, main)
    save_merged(folder, adapter, dtype, tmp_path / "published")
    tokens = torch.arange(5, 40)[None]
    published = logits(load_base(tmp_path / "published", dtype), tokens)
    assert torch.equal(published, logits(load_merged(folder, adapter, dtype), tokens))
    assert (
        load_file(tmp_path / "published" / "model.safetensors")[
            "model.layers.0.self_attn.q_proj.weight"
        ].dtype
        == dtype
    )


def test_turn_end_is_only_a_special_token_directly_after_content(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(
        make_family_model(FAMILIES["llama-tied"], tmp_path)
    )
    tokenizer.add_tokens(["\n\n"])
    turn = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}ENDING{% endfor %}"
    tokenizer.chat_template = turn.replace("ENDING", "\n\n<|im_end|>")
    assert end_tokens(tokenizer, conversations=True) == (TURN_END, 2)
    tokenizer.chat_template = turn.replace("ENDING", "\n\n### End")
    assert end_tokens(tokenizer, conversations=True) == (2,)
    needs_system = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('system first') }}{% endif %}"
    tokenizer.chat_template = needs_system + turn.replace("ENDING", "<|im_end|>")
    assert end_tokens(tokenizer, conversations=True) == (TURN_END, 2)
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    assert end_tokens(tokenizer, conversations=True) == (2,)
