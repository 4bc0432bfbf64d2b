"""An adapter that changes nothing gives the base model again: its weights, its tokens and its configuration."""

import json
import os
import subprocess
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from support.trainer.base_models import BASES, make_base
from support.trainer.models import SENTENCES
from support.trainer.stages import environment_in, run_to_result
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune_trainer.contract import (
    DatasetSource,
    Environment,
    Lineage,
    ModelSource,
    PrepareResult,
    PushConfig,
    PushRecipe,
    PushResult,
    PushTarget,
    TrainConfig,
)
from finetune_trainer.models.base_model import BaseModel
from finetune_trainer.models.stored_weights import StoredWeights
from finetune_trainer.runtime.artifacts import atomic_folder, seal
from finetune_trainer.runtime.stage_folder import write_result
from finetune_trainer.training.methods.registry import load_trainable

torch.set_num_threads(1)

TEXTS = [
    *SENTENCES,
    *(f"{text} — «{text.upper()}»\n\n\t{text[::-1]}" for text in SENTENCES),
    *("", " ", "\n", "\r\n\n", "naïve  ﬁancé\u200b", "中文と한국어 😀👩‍👩‍👧", "<s></s><|im_end|>x<pad>"),
    *("<|im_start|>user\nIs 1+1=2?<|im_end|>\n", "\x00\x7f\ufffd", "a" * 300, "▁▁ ▁", "<0x41>"),
]  # fmt: skip
TOKENS = torch.arange(5, 60)[None]
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
"""Base models of which transformers joins the tensors of experts."""
CASES = [
    (base, method)
    for base in BASES
    for method in METHODS
    if not (method == "Full" and base in FUSED)
    and not (method == "experts" and not BASES[base].experts)
    and not (method == "whole-layers" and base == "gpt2")
]
TRANSFORMERS_4 = "transformers==4.57.6"


@pytest.fixture(scope="session")
def bases(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {name: make_base(name, folder / name) for name in BASES}


def train_config(base: Path, recipe: dict[str, Any]) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "identity": "train",
            "prepare": "prepare",
            "model": {"uri": f"file://{base}"},
            "checkpoint": {},
            "recipe": {"dtype": "FP32", **recipe},
        }
    )


def recipe_of(base: Path, method: str) -> dict[str, Any]:
    """Return the recipe of a method, with the names that this model's layers have."""
    recipe = json.dumps(METHODS[method])
    model = AutoModelForCausalLM.from_pretrained(base)
    names = {
        id(module): name.rpartition(".")[2] for name, module in model.named_modules()
    }
    for place, module in (
        ("HEAD", model.get_output_embeddings()),
        ("EMBEDDING", model.get_input_embeddings()),
    ):
        recipe = recipe.replace(place, names[id(module)])
    values: dict[str, Any] = json.loads(recipe)
    if method == "experts":
        values["lora"]["target_modules"] += BASES[base.name].experts
    return values


def push_untrained(base: Path, method: str, folder: Path) -> Environment:
    """Publish what a training has before its first step, to `merged` and, if it is an adapter, to `adapter`."""
    environment = environment_in(folder)
    config = train_config(base, recipe_of(base, method))
    source = BaseModel(str(base), base, digest="")
    trainable = load_trainable(source, config, torch.device("cpu"))
    with atomic_folder(environment.stage_dir("train", "train") / "output") as output:
        # Tied weights share memory, which a file cannot.
        weights = {name: each.clone() for name, each in trainable.weights.items()}
        trainable.format.write(weights, output)
        seal(output)
    write_result(
        environment.stage_dir("prepare", "prepare"),
        PrepareResult(
            identity="prepare", digest="sha256:0", records=1, invalid=0, truncated=0, dropped=0, train_rows=1,
            validation_rows=0, train_tokens=9, data_digest="sha256:0", conversations=True,
        ),
    )  # fmt: skip
    targets = [PushTarget(uri="merged")]
    if method != "Full":
        targets.append(PushTarget(uri="adapter", format="Adapter"))
    push = PushConfig(
        identity="push",
        prepare="prepare",
        train="train",
        model=ModelSource(uri=f"file://{base}"),
        datasets=(DatasetSource(uri="data.jsonl"),),
        recipe=PushRecipe(targets=tuple(targets), dtype="FP32"),
        lineage=Lineage(pipeline="default/round-trip"),
    )
    run_to_result(push, environment, PushResult)
    return environment


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS, use_cache=False).logits


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def same_tokenizer(folder: Path, base: Path) -> bool:
    published = AutoTokenizer.from_pretrained(folder)
    stored = AutoTokenizer.from_pretrained(base)
    if stored.chat_template:
        assert published.chat_template == stored.chat_template
    assert published.chat_template
    return [published(text).input_ids for text in TEXTS] == [
        stored(text).input_ids for text in TEXTS
    ]


@pytest.mark.parametrize(("name", "method"), CASES)
def test_untrained_model_is_published_as_the_base(bases, name, method, tmp_path):
    base = bases[name]
    environment = push_untrained(base, method, tmp_path)
    assert environment.manifest_dir
    merged = environment.manifest_dir / "merged" / "latest"

    published = StoredWeights(merged)
    stored = StoredWeights(base)
    assert published.meta.keys() == stored.meta.keys()
    for tensor in stored.meta:
        assert torch.equal(published.read(tensor), stored.read(tensor)), tensor
    assert json.loads((merged / "config.json").read_text()) == json.loads(
        (base / "config.json").read_text()
    )
    expected = logits(load(base))
    assert torch.equal(logits(load(merged)), expected)
    assert same_tokenizer(merged, base)
    written = {"config.json", "model.safetensors", "generation_config.json"}
    if BASES[name].templates == "none":
        written.add("tokenizer_config.json")
    for path in base.rglob("*"):
        if path.is_file() and path.name not in written:
            copied = merged / path.relative_to(base)
            assert copied.read_bytes() == path.read_bytes(), path.name
    PUBLISHED.append((base, merged))
    if method != "Full":
        adapter = environment.manifest_dir / "adapter" / "latest"
        assert torch.equal(
            logits(PeftModel.from_pretrained(load(base), str(adapter))), expected
        )
        assert same_tokenizer(adapter, base)
        PUBLISHED.append((base, adapter))


PUBLISHED: list[tuple[Path, Path]] = []
"""Base models, and what the tests before have published from them."""
READER = """
import json, sys
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
import torch
torch.set_num_threads(1)
IGNORED = {"dtype", "torch_dtype", "_name_or_path", "transformers_version"}

def read(folder, has_model):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    result = {"tokens": [tokenizer(text).input_ids for text in TEXTS]}
    if has_model:
        config = AutoConfig.from_pretrained(folder).to_dict()
        result["config"] = {key: value for key, value in config.items() if key not in IGNORED}
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            result["logits"] = model(torch.arange(5, 60)[None], use_cache=False).logits.tolist()
    return result

TEXTS, pairs = json.load(sys.stdin)
for base, published, has_model in pairs:
    expected, actual = read(base, has_model), read(published, has_model)
    for key in expected:
        if expected[key] != actual[key]:
            print(published, key, "differs")
print("read", len(pairs))
"""


@pytest.fixture
def transformers_4(tmp_path) -> Path:
    """A Python with transformers 4 and, behind it, the packages of this one, such as PyTorch."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", TRANSFORMERS_4], check=True)
    packages = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    (Path(packages) / "behind.pth").write_text(sysconfig.get_path("purelib"))
    return python


@pytest.mark.skipif(
    os.environ.get("TRAINING") != "all", reason="TRAINING=all runs it: pip, 2 minutes"
)
def test_transformers_4_reads_what_was_published(transformers_4):
    """Servers use a release of transformers of their own. This test reads what the tests before have published."""
    pairs = [
        (str(base), str(folder), (folder / "config.json").exists())
        for base, folder in PUBLISHED
    ]
    assert pairs
    done = subprocess.run(
        [transformers_4, "-c", READER],
        input=json.dumps([TEXTS, pairs]),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert done.stdout == f"read {len(pairs)}\n", done.stdout + done.stderr[-3000:]
