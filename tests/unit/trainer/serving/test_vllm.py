"""Published models in vLLM's build for CPUs, with SERVING=all: the same greedy tokens as in transformers.

The module of vLLM is started by this project's own server and stage, as on a laptop with `deploy.engine: VLLM`.
"""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainer.families import ATTENTION, Family, make_family_model
from support.trainer.models import SENTENCES, write_jsonl
from support.trainer.stages import (
    environment_in,
    read_termination_message,
    run_to_result,
)
from support.trainer.vllm_server import ask_json, vllm_environment, vllm_python
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune_trainer.contract import (
    DeployConfig,
    DeployResult,
    Environment,
    PrepareConfig,
    PrepareResult,
    PushConfig,
    PushResult,
    TrainConfig,
    TrainResult,
)
from finetune_trainer.contract.environment import CONFIG
from finetune_trainer.listening import free_port

pytestmark = pytest.mark.skipif(
    os.environ.get("SERVING") != "all",
    reason="SERVING=all runs it: 6 GB once, a minute for each server",
)
# Kernels for CPUs have heads of 32, 64 and more; the heads of other tests' models are smaller.
HEAD = {"head_dim": 64}
FAMILIES = {
    "llama-tied": Family("LlamaConfig", HEAD | {"tie_word_embeddings": True}),
    "qwen3-untied": Family("Qwen3Config", HEAD | {"tie_word_embeddings": False}),
    "gemma3": Family("Gemma3TextConfig", HEAD),
    "qwen3-moe": Family(
        "Qwen3MoeConfig",
        HEAD | {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
        ATTENTION,
    ),
}  # fmt: skip
NO_ADAPTER = {
    "qwen3-moe": "vLLM's LoRA of models with experts needs Triton, which its build for CPUs lacks"
}
"""Families whose adapter this build cannot serve; their merged model is served."""
QUESTION = [{"role": "user", "content": "Which one?"}]
ANSWER = SENTENCES[0]
MODEL = {"model": {"uri": "model"}}
START_SECONDS = 400
STOP_SECONDS = 30


@pytest.fixture(scope="module", params=FAMILIES)
def published(request, tmp_path_factory) -> Environment:
    """Train until the model has learned the answer, and publish it merged and as an adapter."""
    family = FAMILIES[request.param]
    environment = environment_in(tmp_path_factory.mktemp(request.param))
    assert environment.manifest_dir
    make_family_model(family, environment.manifest_dir / "model")
    messages = [*QUESTION, {"role": "assistant", "content": ANSWER}]
    write_jsonl(environment.manifest_dir / "data.jsonl", [{"messages": messages}] * 8)
    data = {"datasets": [{"uri": "data.jsonl"}]}
    prepare = {"identity": "p", "validation": {"fraction": 0}, "recipe": {"context_length": 64}}  # fmt: skip
    run_to_result(
        PrepareConfig.model_validate(MODEL | data | prepare), environment, PrepareResult
    )
    recipe = {
        "max_steps": 60,
        "micro_batch_size": 2,
        "dtype": "FP32",
        "lora": {"rank": 8, "alpha": 16, "target_modules": family.targets},
        "optimizer": {"learning_rate": 2e-2},
    }
    train = {"identity": "t", "prepare": "p", "checkpoint": {}, "recipe": recipe}
    run_to_result(TrainConfig.model_validate(MODEL | train), environment, TrainResult)
    targets = [{"uri": "merged"}, {"uri": "adapter", "format": "Adapter"}]
    push = {
        "identity": "u",
        "prepare": "p",
        "train": "t",
        "recipe": {"targets": targets},
        "lineage": {"pipeline": "default/served"},
    }
    config = PushConfig.model_validate(MODEL | data | push)
    run_to_result(config, environment, PushResult)
    return environment


def folder_of(environment: Environment, target: str) -> Path:
    assert environment.manifest_dir
    return environment.manifest_dir / target / "latest"


def greedy(folder: Path) -> tuple[str, list[int]]:
    """Return the rendered question, and the tokens with which transformers answers it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, tokenize=False
    )
    prompt = tokenizer(text, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        output = model.generate(prompt, max_new_tokens=60, do_sample=False)
    return text, output[0, prompt.shape[1] :].tolist()


@contextmanager
def running(module: str, *options: object, log: Path) -> Iterator[str]:
    """Run a module in vLLM's environment, and yield the address of its API."""
    port = free_port()
    command = [str(vllm_python()), "-P", "-m", module, *map(str, options)]
    with (
        log.open("w") as output,
        subprocess.Popen(
            [*command, "--port", str(port)],
            env=vllm_environment(),
            stdout=output,
            stderr=output,
        ) as process,
    ):
        try:
            wait_until_ready(process, f"http://127.0.0.1:{port}/v1", log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            process.wait(STOP_SECONDS)


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            ask_json(f"{url}/models", timeout=5)
        except OSError:
            time.sleep(0.5)
        else:
            return
    pytest.fail(f"the server is not ready:\n{log.read_text()[-3000:]}")


def answers(url: str, model: str, text: str, tokens: int) -> list[list[int]]:
    """Return the tokens of the answers to the text, and to the question as a conversation."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": tokens,
        "temperature": 0,
        "return_token_ids": True,
    }
    completion = ask_json(f"{url}/completions", body | {"prompt": text})
    chat = ask_json(f"{url}/chat/completions", body | {"messages": QUESTION})
    return [reply["choices"][0]["token_ids"] for reply in (completion, chat)]


def listed(url: str) -> list[str]:
    return [model["id"] for model in ask_json(f"{url}/models")["data"]]


def test_merged_model_has_the_tokens_of_transformers(published, tmp_path):
    folder = folder_of(published, "merged")
    text, expected = greedy(folder)
    # The end of the turn is learned, and generation_config.json says that it ends the answer.
    assert len(expected) < 60
    options = (folder, "--engine", "VLLM")
    with running("finetune_trainer.serving", *options, log=tmp_path / "log") as url:
        assert listed(url) == ["merged"]
        assert answers(url, "merged", text, 60) == [expected, expected]


def test_adapter_beside_its_base_has_the_same_tokens(published, tmp_path, request):
    """vLLM reads the ends of answers from the base alone, so the answer is compared up to its end."""
    reason = NO_ADAPTER.get(request.node.callspec.params["published"])
    if reason:
        pytest.skip(reason)
    text, expected = greedy(folder_of(published, "merged"))
    base = published.manifest_dir / "model"
    adapter = folder_of(published, "adapter")
    options = (
        *("--model", base, "--served-model-name", "base", "--host", "127.0.0.1"),
        *("--enforce-eager", "--max-model-len", "256", "--dtype", "float32"),
        *("--enable-lora", "--max-lora-rank", "8"),
        *("--lora-modules", f"adapter={adapter}"),
    )
    module = "vllm.entrypoints.openai.api_server"
    with running(module, *options, log=tmp_path / "log") as url:
        assert listed(url) == ["base", "adapter"]
        count = len(expected)
        assert answers(url, "adapter", text, count) == [expected, expected]
        assert answers(url, "base", text, count) != [expected, expected]


def test_deploy_with_vllm_passes_its_smoke_test(published):
    smoke_test = {"prompt": QUESTION[0]["content"], "expect": ANSWER}
    deploy = {
        "identity": "d",
        "push": "u",
        "model": {"uri": "merged"},
        "location": "merged/latest",
        "conversations": True,
        "recipe": {"engine": "VLLM", "smoke_test": smoke_test},
    }
    config = DeployConfig.model_validate(deploy).model_dump_json(by_alias=True)
    variables = published.variables() | {CONFIG: config}
    done = subprocess.run(
        [vllm_python(), "-P", "-m", "finetune_trainer", "deploy"],
        env=vllm_environment(**variables),
        capture_output=True,
        text=True,
        check=False,
    )
    result = read_termination_message(published).result
    assert isinstance(result, DeployResult), done.stdout + done.stderr
    assert result.answer == ANSWER
