"""The published model computes what was trained, for every architecture and every kind of adapter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.families import FAMILIES, TURN_END, make_family_model
from support.models import SENTENCES, write_jsonl
from support.stages import environment_in, run_to_result
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune_trainer.contract import (
    Environment,
    PrepareConfig,
    PrepareResult,
    PushConfig,
    PushResult,
    TrainConfig,
    TrainResult,
)
from finetune_trainer.models.merge import save_merged, with_adapter

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
    make_family_model(family, environment.manifest_dir / "model")
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": SENTENCES[0]}]
    write_jsonl(environment.manifest_dir / "data.jsonl", [{"messages": messages}] * 8)
    config = PrepareConfig.model_validate(
        {
            "identity": "p",
            "model": MODEL,
            "dataset": {"uri": "data.jsonl", "validation_fraction": 0},
            "recipe": {"context_length": 64, **({} if family.packing else {"packing": False})},
        }
    )
    assert run_to_result(config, environment, PrepareResult).conversations
    return environment


@pytest.fixture(params=["lora", "rslora", "dora"])
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
                "batch_size": 2,
                "precision": "fp32",
                "lora": {"rank": 8, "alpha": 16, "target_modules": family.targets, "variant": request.param},
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
            "dataset": {"uri": "data.jsonl"},
            "recipe": {"target": f"published/{trained}", "dtype": "fp32"},
            "lineage": {"pipeline": "default/families"},
        }
    )
    run_to_result(config, environment, PushResult)
    return environment.manifest_dir / "published" / trained


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tokens, use_cache=False).logits


def test_published_model_computes_and_stops_as_trained(prepared, trained, tmp_path):
    published = push(prepared, trained)
    base, adapter = prepared.manifest_dir / "model", prepared.stage_dir("train", trained) / "output"
    tokenizer, model = AutoTokenizer.from_pretrained(published), AutoModelForCausalLM.from_pretrained(published)

    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    expected = logits(with_adapter(base, adapter, torch.float32), prompt)
    assert (logits(AutoModelForCausalLM.from_pretrained(base), prompt) - expected).abs().max() > 0.5 * expected.std()
    assert (logits(model, prompt) - expected).abs().max() < 1e-4 * expected.std()

    answer = model.generate(prompt, max_new_tokens=60, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(answer) == f"{SENTENCES[0]}<|im_end|>"
    assert answer[-1] == TURN_END

    # In bf16 every weight is the fp32 one, rounded once.
    save_merged(base, adapter, torch.bfloat16, tmp_path)
    rounded = load_file(tmp_path / "model.safetensors")
    for name, weight in load_file(published / "model.safetensors").items():
        assert torch.equal(rounded[name], weight.to(torch.bfloat16)), name
