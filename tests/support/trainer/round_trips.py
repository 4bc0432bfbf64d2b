"""Trainings that change nothing: prepare, two steps at a learning rate of almost zero, and push."""

import json
from pathlib import Path
from typing import Any

import torch
from support.trainer.base_models import BASES
from support.trainer.models import SENTENCES, write_jsonl
from support.trainer.stages import environment_in, run_to_result
from transformers import AutoModelForCausalLM

from finetune_trainer.contract import (
    Environment,
    PrepareConfig,
    PrepareResult,
    PushConfig,
    PushResult,
    TrainConfig,
    TrainResult,
)

RATE = 1e-30
"""AdamW changes a number by the learning rate at most: float32 of usual size stays the same bits."""
STEPS = 2
METHODS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "whole-layers": {
        "lora": {"modules_to_save": ["HEAD", "EMBEDDING"], "target_modules": ["*proj"]}
    },
    "experts": {"lora": {"target_modules": ["q_proj"]}},
    "QLoRA": {"method": "QLoRA"},
    "Full": {"method": "Full"},
}
FUSED = ("qwen3-moe", "mixtral", "qwen3-next")
"""Base models of which transformers joins the tensors of experts: the method Full refuses them."""
HYBRID = ("granite-hybrid", "lfm2", "qwen3-next")
"""Base models whose layers carry a state from one document of a row to the next: they are not packed."""


def cases() -> list[tuple[str, str]]:
    """Return each base model with each method that can train it."""
    return [(base, method) for base in BASES for method in METHODS if can(base, method)]


def can(base: str, method: str) -> bool:
    """Return whether a method can train a base model."""
    if method == "Full":
        return base not in FUSED
    return method != "experts" or bool(BASES[base].experts)


def recipe_of(base: Path, method: str) -> dict[str, Any]:
    """Return the recipe of a method, with the names that this model's layers have."""
    recipe = json.dumps(METHODS[method])
    model = AutoModelForCausalLM.from_pretrained(base)
    names = {}
    for name, module in model.named_modules():
        names[id(module)] = name.rpartition(".")[2]
    head = names[id(model.get_output_embeddings())]
    embedding = names[id(model.get_input_embeddings())]
    values: dict[str, Any] = json.loads(
        recipe.replace("HEAD", head).replace("EMBEDDING", embedding)
    )
    if method == "experts":
        values["lora"]["target_modules"] += BASES[base.name].experts
    return values


def publish_unchanged(base: Path, method: str, folder: Path) -> Environment:
    """Train STEPS steps at RATE, and publish to `merged` and, if there is an adapter, to `adapter`."""
    environment = environment_in(folder)
    assert environment.manifest_dir
    records = []
    for question, answer in zip(SENTENCES[:8], SENTENCES[8:16], strict=True):
        turns = (("user", question), ("assistant", answer))
        records.append(
            {"messages": [{"role": role, "content": text} for role, text in turns]}
        )
    write_jsonl(environment.manifest_dir / "data.jsonl", records)
    about = {"model": {"uri": f"file://{base}"}}
    prepare = {
        "identity": "prepare",
        "datasets": [{"uri": "data.jsonl"}],
        "validation": {"fraction": 0},
        "recipe": {"context_length": 128, "packing": base.name not in HYBRID},
    }
    run_to_result(
        PrepareConfig.model_validate(about | prepare), environment, PrepareResult
    )
    train_unchanged(about, recipe_of(base, method), environment)
    formats = {"merged": "Merged"} if method == "Full" else {"merged": "Merged", "adapter": "Adapter"}  # fmt: skip
    push = {
        "identity": "push",
        "prepare": "prepare",
        "train": "train",
        "datasets": [{"uri": "data.jsonl"}],
        "recipe": {
            "dtype": "FP32",
            "targets": [{"uri": uri, "format": form} for uri, form in formats.items()],
        },
        "lineage": {"pipeline": "default/round-trip"},
    }
    run_to_result(PushConfig.model_validate(about | push), environment, PushResult)
    return environment


def train_unchanged(
    about: dict[str, Any], recipe: dict[str, Any], environment: Environment
) -> None:
    """Run the stage train, which must take all steps."""
    train = {
        "identity": "train",
        "prepare": "prepare",
        "checkpoint": {},
        "recipe": {
            "dtype": "FP32",
            "max_steps": STEPS,
            "optimizer": {"learning_rate": RATE},
            **recipe,
        },
    }
    config = TrainConfig.model_validate(about | train)
    result = run_to_result(config, environment, TrainResult)
    assert result.steps == STEPS
    if config.recipe.method != "Full":
        assert_trained(environment.stage_dir("train", "train") / "output")


def assert_trained(adapter: Path) -> None:
    """Check that the steps have moved each second factor away from zero, its first value."""
    from safetensors.torch import load_file  # noqa: PLC0415

    tensors = load_file(adapter / "adapter_model.safetensors")
    moved = [tensor for name, tensor in tensors.items() if "lora_B" in name]
    assert moved
    assert any(torch.count_nonzero(tensor) for tensor in moved)
    assert max(float(tensor.abs().max()) for tensor in moved) < STEPS * 2 * RATE
