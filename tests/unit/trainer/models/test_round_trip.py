"""A training that changes nothing gives the base model again: its weights, its tokens and its configuration."""

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
from support.trainer.round_trips import cases, publish_unchanged
from support.trainer.strings import many_strings
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune_trainer.models.stored_weights import StoredWeights

torch.set_num_threads(1)

TEXTS = many_strings()
TOKENS = torch.arange(5, 60)[None]
CASES = cases()
TRANSFORMERS_4 = "transformers==4.57.6"


@pytest.fixture(scope="session")
def bases(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {name: make_base(name, folder / name) for name in BASES}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS, use_cache=False).logits


def is_equal(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether all bits are equal, but for zeros, such as a padding token's row: training moves them by RATE."""
    return torch.allclose(actual, expected, rtol=0, atol=1e-20)


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
def test_unchanged_model_is_published_as_the_base(bases, name, method, tmp_path):
    base = bases[name]
    environment = publish_unchanged(base, method, tmp_path)
    assert environment.manifest_dir
    merged = environment.manifest_dir / "merged" / "latest"

    published = StoredWeights(merged)
    stored = StoredWeights(base)
    assert published.meta.keys() == stored.meta.keys()
    for tensor in stored.meta:
        assert is_equal(published.read(tensor), stored.read(tensor)), tensor
    assert json.loads((merged / "config.json").read_text()) == json.loads(
        (base / "config.json").read_text()
    )
    expected = logits(load(base))
    assert is_equal(logits(load(merged)), expected)
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
        assert is_equal(
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
            logits = model(torch.arange(5, 60)[None], use_cache=False).logits
        # Training moves zeros, such as a padding token's row, by the learning rate.
        logits[logits.abs() < 1e-20] = 0
        result["logits"] = logits.tolist()
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
