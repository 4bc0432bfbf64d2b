"""Models that a training left unchanged, read by vLLM's build for CPUs with SERVING=all: it answers as the base model.

Each family has one process with vLLM's engine, which loads what every method has published. `test_vllm.py` starts
whole servers.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainer.base_models import make_base
from support.trainer.round_trips import METHODS, can, publish_unchanged
from support.trainer.strings import many_strings
from support.trainer.vllm_server import vllm_environment, vllm_python
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.skipif(
    os.environ.get("SERVING") != "all",
    reason="SERVING=all runs it: 6 GB once, half a minute or more for each family",
)
SERVED = ("llama-tied",)
TEXTS = many_strings()
PROMPTS = [list(range(start, start + 9)) for start in (5, 105, 305, 405)]
TOKENS = 12
ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest

texts, prompts, tokens, models = json.load(sys.stdin)
chosen = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
answers = {}
for name, (folder, adapter) in models.items():
    options = {"enable_lora": True, "max_lora_rank": 16} if adapter else {}
    llm = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=4, **options)
    tokenizer = llm.get_tokenizer()
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], chosen, use_tqdm=False,
        lora_request=LoRARequest("adapter", 1, adapter) if adapter else None,
    )
    answers[name] = [list(output.outputs[0].token_ids) for output in outputs]
    answers[name + " tokens"] = [tokenizer.encode(text) for text in texts]
    del llm
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
    models: dict[str, tuple[Path, Path | None]] = {"base": (base, None)}
    for method in METHODS:
        if not can(name, method):
            continue
        (folder / method).mkdir()
        environment = publish_unchanged(base, method, folder / method)
        assert environment.manifest_dir
        models[method] = (environment.manifest_dir / "merged" / "latest", None)
        # vLLM serves adapters of layers, and none with whole layers.
        if method in {"LoRA", "QLoRA"}:
            adapter = environment.manifest_dir / "adapter" / "latest"
            models[f"{method} adapter"] = (base, adapter)
    return models


@pytest.mark.parametrize("name", SERVED)
def test_vllm_answers_as_the_base_model(name: str, tmp_path: Path) -> None:
    base = make_base(name, tmp_path / "base" / name, is_wide=True)
    models = published(name, base, tmp_path)
    request: list[Any] = [TEXTS, PROMPTS, TOKENS, models]
    done = subprocess.run(
        [vllm_python(), "-P", "-c", ENGINE, str(tmp_path / "answers.json")],
        input=json.dumps(request, default=str),
        env=vllm_environment(VLLM_ENABLE_V1_MULTIPROCESSING="0"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    answers = json.loads((tmp_path / "answers.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(base)
    expected = [tokenizer(text).input_ids for text in TEXTS]
    for model in models:
        assert answers[model] == greedy(base), model
        assert answers[f"{model} tokens"] == expected, model
