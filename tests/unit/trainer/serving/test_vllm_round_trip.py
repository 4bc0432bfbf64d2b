"""Models that a training left unchanged, read by vLLM's build for CPUs with SERVING=all: it answers as the base model.

Each family has one process with vLLM's engine, which loads the merged model and then the adapter. `test_round_trip.py`
shows that all methods publish the same files, so that only one family has all of them. `test_vllm.py` starts whole
servers.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainer.base_models import BASES, make_base
from support.trainer.round_trips import METHODS, can, publish_unchanged
from support.trainer.strings import many_strings
from support.trainer.vllm_server import vllm_environment, vllm_python
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.skipif(
    os.environ.get("SERVING") != "all",
    reason="SERVING=all runs it: 6 GB once, a minute or more for each family",
)
NOT_SERVED = {
    "lfm2": "vLLM needs conv_dim in config.json, which LFM2 has on hubs and this tiny model has not",
    "qwen3-next": "vLLM's linear attention on a CPU needs BF16, in which answers are not equal",
}
"""Base models that vLLM's build for CPUs cannot load itself, with its reason."""
NO_TRITON = "vLLM's LoRA of experts needs Triton, which its build for CPUs lacks"
NO_ADAPTER = {
    "qwen3-moe": NO_TRITON,
    "mixtral": NO_TRITON,
    "gpt2": "vLLM has no LoRA for GPT2LMHeadModel",
}
"""Base models whose adapters this build cannot load."""
ALL_METHODS = ("llama-tied",)
"""Base models of which what every method publishes is served."""
TEXTS = many_strings()
PROMPTS = [list(range(start, start + 9)) for start in (5, 105, 305, 405)]
TOKENS = 12
MESSAGES = [
    {"role": "user", "content": "Which parser?"},
    {"role": "assistant", "content": "The first."},
    {"role": "user", "content": "And now?"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
ENGINE = """
import json, sys, traceback
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest

request = json.load(sys.stdin)
chosen = SamplingParams(temperature=0, max_tokens=request["count"], ignore_eos=True)

def answer(folder, adapter):
    options = {"enable_lora": True, "max_lora_rank": 16} if adapter else {}
    llm = LLM(
        folder, dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=4,
        limit_mm_per_prompt={"image": 0}, **options,
    )
    tokenizer = llm.get_tokenizer()
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in request["prompts"]], chosen, use_tqdm=False,
        lora_request=LoRARequest("adapter", 1, adapter) if adapter else None,
    )
    chats = []
    for tools in (None, request["tools"]) if request["has_template"] else ():
        chats.append(tokenizer.apply_chat_template(
            request["messages"], tools=tools, tokenize=False, add_generation_prompt=True,
        ))
    return {
        "answers": [list(output.outputs[0].token_ids) for output in outputs],
        "tokens": [tokenizer.encode(text) for text in request["texts"]],
        "chats": chats,
    }

answers = {}
for name, (folder, adapter) in request["models"].items():
    try:
        answers[name] = answer(folder, adapter)
    except Exception:
        answers[name] = {"error": traceback.format_exc()[-1500:]}
    cleanup_dist_env_and_memory()
open(sys.argv[1], "w").write(json.dumps(answers))
"""


def greedy(folder: Path) -> list[list[int]]:
    """Return the tokens with which transformers continues each prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    answers = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(TOKENS):
            with torch.no_grad():
                logits = model(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    return answers


def published(
    name: str, base: Path, folder: Path
) -> dict[str, tuple[Path, Path | None]]:
    """Return the model, and perhaps the adapter, of each method that can train the base model."""
    models: dict[str, tuple[Path, Path | None]] = {}
    methods = METHODS if name in ALL_METHODS else ("LoRA",)
    for method in methods:
        if not can(name, method):
            continue
        (folder / method).mkdir()
        environment = publish_unchanged(base, method, folder / method)
        assert environment.manifest_dir
        models[method] = (environment.manifest_dir / "merged" / "latest", None)
        # vLLM serves adapters of layers, and none with whole layers.
        if method in {"LoRA", "QLoRA"} and name not in NO_ADAPTER:
            adapter = environment.manifest_dir / "adapter" / "latest"
            models[f"{method} adapter"] = (base, adapter)
    return models


def served(
    models: dict[str, tuple[Path, Path | None]], folder: Path, *, has_template: bool
) -> dict[str, Any]:
    """Return what vLLM makes of each model: answers, tokens and chats, or an error."""
    request = {
        "models": models,
        "texts": TEXTS,
        "prompts": PROMPTS,
        "count": TOKENS,
        "messages": MESSAGES,
        "tools": TOOLS,
        "has_template": has_template,
    }
    done = subprocess.run(
        [vllm_python(), "-P", "-c", ENGINE, str(folder / "answers.json")],
        input=json.dumps(request, default=str),
        env=vllm_environment(VLLM_ENABLE_V1_MULTIPROCESSING="0"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    answers: dict[str, Any] = json.loads((folder / "answers.json").read_text())
    return answers


def expected_of(base: Path, *, has_template: bool) -> dict[str, Any]:
    """Return what transformers makes of the base model."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    chats = [
        tokenizer.apply_chat_template(
            MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True
        )
        for tools in ((None, TOOLS) if has_template else ())
    ]
    return {
        "answers": greedy(base),
        "tokens": [tokenizer(text).input_ids for text in TEXTS],
        "chats": chats,
    }


@pytest.mark.parametrize("name", [name for name in BASES if name not in NOT_SERVED])
def test_vllm_answers_as_the_base_model(name: str, tmp_path: Path) -> None:
    base = make_base(name, tmp_path / "base" / name, is_wide=True)
    has_template = BASES[name].templates != "none"
    models = published(name, base, tmp_path)
    answers = served(models, tmp_path, has_template=has_template)
    expected = expected_of(base, has_template=has_template)
    faults = {}
    for model in models:
        if "error" in answers[model]:
            faults[model] = answers[model]["error"]
            continue
        different = [key for key in expected if answers[model][key] != expected[key]]
        if different:
            faults[model] = ", ".join(different)
    assert faults == {}, "\n".join(
        f"{model}: {fault}" for model, fault in faults.items()
    )
