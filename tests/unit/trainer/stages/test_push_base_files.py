"""Push takes tokenizer, processors and templates from the base model, and names a base of the hub only."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.trainer.base_models import make_base
from support.trainer.pushes import push, push_config, push_environment, with_targets
from support.trainer.stages import run_to_failure

from finetune_trainer.contract import (
    DatasetSource,
    Environment,
    EvaluateResult,
    ExitCode,
    ModelSource,
    PrepareResult,
    PushConfig,
    PushTarget,
    Score,
)
from finetune_trainer.contract.uris import hub_id
from finetune_trainer.publishing.base_files import (
    chat_templates,
    copy_base_files,
    name_tokenizer_class,
    set_chat_templates,
)
from finetune_trainer.publishing.model_card import front_matter
from finetune_trainer.runtime.stage_folder import write_result

ADAPTER = PushTarget(uri="pvc://models/adapter", format="Adapter")
MERGED = PushTarget(uri="pvc://models/merged")


def write_prepared(environment: Environment) -> None:
    """Write a result of prepare that says that the records are conversations."""
    write_result(
        environment.stage_dir("prepare", "d1"),
        PrepareResult(
            identity="d1", digest="sha256:0", records=1, invalid=0, truncated=0, dropped=0, train_rows=1,
            validation_rows=0, train_tokens=9, data_digest="sha256:0", conversations=True,
        ),
    )  # fmt: skip


def publish(base: Path, folder: Path) -> tuple[Path, Path]:
    """Push a random adapter in both formats and return the folders of the model and of the adapter."""
    environment = push_environment(folder, base)
    write_prepared(environment)
    push(with_targets(push_config(base), MERGED, ADAPTER, dtype="FP32"), environment)
    models = folder / "claims" / "models"
    return models / "merged" / "latest", models / "adapter" / "latest"


@pytest.mark.parametrize("name", ["llama-tied", "llama-3", "gemma3"])
def test_base_files_are_published_byte_for_byte(tmp_path: Path, name: str) -> None:
    base = make_base(name, tmp_path / "base")
    (base / "training_args.json").write_text("{}")
    own = {"config.json", "generation_config.json", "model.safetensors"}
    files = {
        path.relative_to(base): path.read_bytes()
        for path in base.rglob("*")
        if path.is_file() and path.name not in {*own, "training_args.json"}
    }
    for folder in publish(base, tmp_path):
        for path, content in files.items():
            assert (folder / path).read_bytes() == content, path
        assert not (folder / "training_args.json").exists()
        generation = json.loads((folder / "generation_config.json").read_text())
        assert 2 in generation["eos_token_id"]


def test_template_that_training_invented_is_the_only_change(tmp_path: Path) -> None:
    base = make_base("mistral", tmp_path / "base")
    before = json.loads((base / "tokenizer_config.json").read_text())
    for folder in publish(base, tmp_path):
        after = json.loads((folder / "tokenizer_config.json").read_text())
        assert "message['role']" in after.pop("chat_template")
        assert after == before
        assert not (folder / "chat_template.jinja").exists()


def test_template_of_a_processor_is_published_for_the_tokenizer(tmp_path: Path) -> None:
    base = make_base("mistral", tmp_path / "base")
    template = "{% for m in messages %}[{{ m.content }}]{{ eos_token }}{% endfor %}"
    write_json(base / "chat_template.json", {"chat_template": template})
    for folder in publish(base, tmp_path):
        assert chat_templates(folder) == {"default": template}
        settings = json.loads((folder / "chat_template.json").read_text())
        assert settings == {"chat_template": template}


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({"chat_template": "old"}, {}, {"default": "new"}),
        (
            {
                "chat_template": [
                    {"name": "default", "template": "old"},
                    {"name": "rag", "template": "r"},
                ]
            },
            {},
            {"default": "new", "rag": "r"},
        ),
        ({}, {"chat_template.jinja": "old"}, {"default": "new"}),
        (
            {"chat_template": "old"},
            {
                "chat_template.jinja": "old",
                "additional_chat_templates/rag.jinja": "r",
            },
            {"default": "new", "rag": "r"},
        ),
        ({"eos_token": "x"}, {}, {"default": "new"}),
        (None, {}, {"default": "new"}),
    ],
    ids=["text", "list", "file", "files-and-text", "none", "no-config"],
)
def test_template_is_changed_in_the_form_that_the_base_uses(
    tmp_path: Path,
    config: dict[str, Any] | None,
    files: dict[str, str],
    expected: dict[str, str],
) -> None:
    if config is not None:
        write_json(tmp_path / "tokenizer_config.json", config)
    (tmp_path / "additional_chat_templates").mkdir()
    for name, template in files.items():
        (tmp_path / name).write_text(template)
    if not any("/" in name for name in files):
        (tmp_path / "additional_chat_templates").rmdir()
    set_chat_templates(tmp_path, {"default": "new"})
    assert chat_templates(tmp_path) == expected
    for name, template in files.items():
        new = (tmp_path / name).read_text()
        assert new == ("new" if template == "old" else template)
    if config and "chat_template" in config:
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
        assert type(settings["chat_template"]) is type(config["chat_template"])
        assert "old" not in json.dumps(settings)


def test_named_template_is_added_to_the_base_form(tmp_path: Path) -> None:
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": "old"})
    set_chat_templates(tmp_path, {"default": "old", "tool_use": "tools"})
    assert chat_templates(tmp_path) == {"default": "old", "tool_use": "tools"}


def test_processor_template_changes_with_the_tokenizer(tmp_path: Path) -> None:
    for name in ("tokenizer_config.json", "chat_template.json"):
        write_json(tmp_path / name, {"chat_template": "old"})
    set_chat_templates(tmp_path, {"default": "new"})
    template = json.loads((tmp_path / "chat_template.json").read_text())
    assert template == {"chat_template": "new"}


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ("other", "new"),
        ({"default": "other", "rag": "r"}, {"default": "new", "rag": "r"}),
    ],
)
def test_other_template_of_a_processor_is_replaced_as_well(
    tmp_path: Path, known: Any, expected: Any
) -> None:
    """Servers read it before the tokenizer's, which is the trained template already."""
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": "new"})
    write_json(tmp_path / "processor_config.json", {"chat_template": known, "a": 1})
    set_chat_templates(tmp_path, {"default": "new"})
    settings = json.loads((tmp_path / "processor_config.json").read_text())
    assert settings == {"chat_template": expected, "a": 1}


def test_names_of_code_that_is_not_published_are_removed(tmp_path: Path) -> None:
    base = tmp_path / "base"
    folder = tmp_path / "folder"
    base.mkdir()
    folder.mkdir()
    settings = {"eos_token": "x", "auto_map": {"AutoTokenizer": "code.Tokenizer"}}
    write_json(base / "tokenizer_config.json", settings)
    (base / "code.py").write_text("")
    copy_base_files(base, folder)
    after = json.loads((folder / "tokenizer_config.json").read_text())
    assert after == {"eos_token": "x"}
    assert [path.name for path in folder.iterdir()] == ["tokenizer_config.json"]


@pytest.mark.parametrize(
    ("settings", "loaded", "expected"),
    [
        ({}, "TokenizersBackend", "PreTrainedTokenizerFast"),
        (None, "GPT2Tokenizer", "GPT2Tokenizer"),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, "Qwen2Tokenizer", "Qwen2Tokenizer"),
        ({"tokenizer_class": "GemmaTokenizerFast"}, "GemmaTokenizer", "GemmaTokenizerFast"),
        ({"tokenizer_class": "LlamaTokenizerFast"}, "TokenizersBackend", "LlamaTokenizerFast"),
    ],
)  # fmt: skip
def test_adapter_names_the_class_of_its_tokenizer(
    tmp_path: Path, settings: dict[str, str] | None, loaded: str, expected: str
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    if settings is not None:
        write_json(tmp_path / "tokenizer_config.json", settings)
    name_tokenizer_class(tmp_path, loaded)
    after = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert after["tokenizer_class"] == expected


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("hf://org/name", "org/name"),
        ("hf://org/name@main", "org/name"),
        ("hf://org/name@main/data/train.jsonl", "org/name"),
        ("hf://org/na.me_1-x/train.jsonl", "org/na.me_1-x"),
        ("hf://org/a--b", None),
        ("hf://org/name.git", None),
        ("hf://org/name-", None),
        ("pvc://models/base", None),
        ("s3://bucket/org/name", None),
        ("file:///org/name", None),
        ("org/name", None),
        ("https://host/data.jsonl?signature=1", None),
    ],
)
def test_metadata_name_only_repositories_of_the_hub(
    uri: str, expected: str | None, tmp_path: Path
) -> None:
    from huggingface_hub import ModelCard  # noqa: PLC0415
    from huggingface_hub.utils._validators import validate_repo_id  # noqa: PLC0415

    assert hub_id(uri) == expected
    if expected:
        validate_repo_id(expected)
    changes: dict[str, object] = {"datasets": (DatasetSource(uri=uri),)}
    if not uri.endswith((".jsonl", "=1")):
        changes["model"] = ModelSource(uri=uri)
    config = push_config(tmp_path).model_copy(update=changes)
    is_hub_model = "model" in changes
    scores = EvaluateResult(
        identity="e1",
        digest="sha256:2",
        scores={"pvc://t/my task.yaml": {"acc": Score(value=0.5), "nan": Score(value=float("nan"))}},
    )  # fmt: skip
    environment = Environment(workspace=tmp_path)
    text = front_matter(config, "names", ["lora"], scores, environment)
    card = ModelCard(f"---\n{text}\n---\n")
    assert card.data.get("base_model") == (expected if is_hub_model else None)
    assert card.data.get("datasets") == ([expected] if expected else None)
    (result,) = getattr(card.data, "eval_results")  # noqa: B009  it is set at run time
    assert result.dataset_type == "my-task.yaml"


def test_card_and_adapter_of_a_local_base_name_no_repository(
    tmp_path: Path, tiny_model: Path
) -> None:
    from huggingface_hub import ModelCard  # noqa: PLC0415

    _, adapter = publish(tiny_model, tmp_path)
    card = ModelCard.load(adapter / "README.md")
    assert card.data.get("base_model") is None
    assert f"load it from `file://{tiny_model}`" in card.text


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (ModelSource(uri="hf://org/name"), ("org/name", None)),
        (ModelSource(uri="hf://org/name@v2"), ("org/name", "v2")),
        (ModelSource(uri="hf://org/name", revision="v2"), ("org/name", "v2")),
        (ModelSource(uri="pvc://models/base", revision="v2"), (None, None)),
    ],
)
def test_adapter_config_names_a_base_that_peft_finds(
    tmp_path: Path,
    tiny_model: Path,
    source: ModelSource,
    expected: tuple[str | None, str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch  # noqa: PLC0415
    from peft import AutoPeftModelForCausalLM  # noqa: PLC0415

    from finetune_trainer.contract import Lora  # noqa: PLC0415
    from finetune_trainer.models.loading import load_base  # noqa: PLC0415
    from finetune_trainer.training.methods.lora import trainable_adapter  # noqa: PLC0415

    adapter = tmp_path / "adapter"
    adapter.mkdir()
    base = load_base(tiny_model, torch.float32)
    trainable = trainable_adapter(base, Lora(), source, seed=1)
    trainable.format.write(trainable.weights, adapter)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    name, revision = expected
    assert (settings["base_model_name_or_path"], settings["revision"]) == expected
    if name and not revision:
        # transformers takes a folder of this name in place of the repository.
        shutil.copytree(tiny_model, tmp_path / name)
        monkeypatch.chdir(tmp_path)
        AutoPeftModelForCausalLM.from_pretrained(adapter)


def test_folder_that_differs_from_the_base_is_not_published(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finetune_trainer.models.trained.published_weights import PublishedWeights  # noqa: PLC0415

    def wrong(self: PublishedWeights) -> dict[str, Any]:
        config = json.loads((tiny_model / "config.json").read_text())
        return config | {"rope_parameters": {"rope_theta": 1.0, "rope_type": "default"}}

    monkeypatch.setattr(PublishedWeights, "config", wrong)
    environment = push_environment(tmp_path, tiny_model)
    config: PushConfig = with_targets(push_config(tiny_model), MERGED)
    message, code = run_to_failure(config, environment)
    assert code == ExitCode.CONFIG
    assert "the key rope_parameters of config.json has changed" in message
    assert not list((tmp_path / "claims" / "models").iterdir())
