"""An EOS token that no file of the tokenizer has: transformers would add a token that the model has never read."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.trainer.base_models import make_base
from support.trainer.models import write_jsonl
from support.trainer.prepared import prepare, prepare_config
from support.trainer.stages import run_to_failure

from finetune_trainer.contract import Environment, ExitCode

RECORDS = [{"prompt": "the file?", "completion": " a socket"}] * 8


@pytest.fixture(scope="module", params=["qwen2.5", "llama-tied", "gemma"])
def base(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return make_base(request.param, tmp_path_factory.mktemp("base") / "base")


@pytest.fixture
def model(base: Path, tmp_path: Path) -> Path:
    """A copy of the base model that a test may change."""
    return shutil.copytree(base, tmp_path / "model")


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_unknown_end_is_refused_with_the_token_of_the_model(
    model: Path, environment: Environment, manifest_dir: Path
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", RECORDS)
    edit(model / "tokenizer_config.json", eos_token="<|end|>")
    edit(model / "special_tokens_map.json", eos_token="<|end|>")
    # The number of </s> in these tokenizers.
    edit(model / "config.json", eos_token_id=2)
    message, code = run_to_failure(prepare_config(model), environment)
    assert code == ExitCode.CONFIG
    assert message == (
        f"file://{model}: eos_token is <|end|>, which is no token of tokenizer.json: "
        "set eos_token in tokenizer_config.json to the token that ends the model's texts, such as </s>"
    )


def test_end_among_the_added_tokens_is_used(
    model: Path, environment: Environment, manifest_dir: Path
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", RECORDS)
    edit(model / "tokenizer_config.json", eos_token="<|im_end|>")
    edit(model / "special_tokens_map.json", eos_token="<|im_end|>")
    assert prepare(prepare_config(model), environment).invalid == 0


def test_end_that_only_the_settings_add_is_used(
    model: Path, environment: Environment, manifest_dir: Path
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", RECORDS)
    added = {"500": {"content": "<|end|>", "special": True}}
    edit(
        model / "tokenizer_config.json",
        eos_token="<|end|>",
        added_tokens_decoder=added,
    )
    edit(model / "special_tokens_map.json", eos_token="<|end|>")
    assert prepare(prepare_config(model), environment).invalid == 0
