"""The estimated memory of a training beside the memory that the kernel measures, for models of two sizes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainer import step_memory

from finetune_trainer.contract import TrainRecipe
from finetune_trainer.models.base_model import BaseModel
from finetune_trainer.training.memory_estimate import estimate_memory

LENGTH = 512
LEAST = 0.7
MOST = 1.3
"""The allocator rounds up and keeps freed memory, and so do the libraries of PyTorch."""


ALL = os.environ.get("TRAINING") == "all"
SIZES = [(640, 8)]
RECIPES: dict[str, dict[str, Any]] = {"LoRA": {"method": "LoRA"}}
if ALL:
    SIZES.append((384, 6))
    RECIPES |= {
        "Full": {"method": "Full"},
        "checkpointing": {"method": "LoRA", "gradientCheckpointing": True},
    }


@pytest.fixture(scope="module", params=SIZES, ids=str)
def model(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of so many dimensions and layers."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  the import takes seconds

    hidden, layers = request.param
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("model") / "model"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def measured(model: Path, recipe: TrainRecipe) -> int:
    """Return the memory that a process takes for the steps."""
    command = [
        sys.executable,
        str(step_memory.__file__),
        str(model),
        recipe.model_dump_json(by_alias=True),
    ]
    # Freed memory goes back to the kernel at once, so that the peak is what exists at one time.
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    done = subprocess.run(
        [*command, str(LENGTH)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("fields", RECIPES.values(), ids=RECIPES)
def test_estimate_is_near_the_memory_of_a_process(model, fields):
    recipe = TrainRecipe.model_validate(
        {"dtype": "FP32", "microBatchSize": 4, **fields}
    )
    estimate = estimate_memory(BaseModel("model", model, ""), recipe, LENGTH).total
    memory = measured(model, recipe)
    ratio = estimate / memory
    print(
        f"{fields}: estimated {estimate >> 20} MiB, measured {memory >> 20} MiB, ratio {ratio:.2f}"
    )
    assert LEAST < ratio < MOST
