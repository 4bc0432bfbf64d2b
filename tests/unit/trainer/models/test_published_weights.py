"""The published weights: the base model's names, and no value that a cast makes infinite."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.operator.adapters import make_adapter
from support.trainer.base_models import make_base

from finetune_trainer.contract import Lora, ModelSource, TrainConfig
from finetune_trainer.models.base_model import BaseModel
from finetune_trainer.models.language_model import language_names
from finetune_trainer.models.loading import load_base
from finetune_trainer.models.stored_weights import StoredWeights
from finetune_trainer.models.trained.merge import load_merged, save_merged
from finetune_trainer.models.trained.published_check import check_published
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.training.methods.lora import attach_adapter, trainable_adapter
from finetune_trainer.training.methods.registry import load_trainable

torch.set_num_threads(1)

MLP = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_base("llama-3", tmp_path / "base")


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory) -> Path:
    return make_base("gemma3", tmp_path_factory.mktemp("multimodal") / "base")


def change(base: Path, name: str, value: float) -> None:
    """Set one weight of a tensor."""
    weights = load_file(base / "model.safetensors")
    weights[name].view(-1)[3] = value
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})


def merge(base: Path, folder: Path, dtype: torch.dtype, **options: Any) -> Path:
    """Publish a random adapter, and return the folder."""
    adapter = make_adapter(folder / "adapter", base, **options)
    (folder / "published").mkdir()
    save_merged(base, adapter, dtype, folder / "published")
    return folder / "published"


@pytest.mark.parametrize("name", [MLP, "model.norm.weight"])
def test_finite_weight_that_fp16_makes_infinite_is_refused(base, tmp_path, name):
    change(base, name, -1e5)
    expected = f"{name} has a weight of 100000, which is infinite in float16.*65504: set push.dtype to BF16"
    with pytest.raises(ConfigInvalid, match=expected):
        merge(base, tmp_path, torch.float16, scale=0.1)
    # evaluate loads the same weights.
    with pytest.raises(ConfigInvalid, match=expected):
        load_merged(base, tmp_path / "adapter", torch.float16)
    with pytest.raises(ConfigInvalid, match=expected):
        load_base(base, torch.float16)
    load_base(base, torch.bfloat16)


def test_weight_beyond_bf16_names_fp32(base, tmp_path):
    change(base, "model.norm.weight", 3.4e38)
    with pytest.raises(
        ConfigInvalid, match=r"infinite in bfloat16.*push.dtype to FP32"
    ):
        merge(base, tmp_path, torch.bfloat16)


def test_infinite_weight_of_the_base_is_named_and_kept(base, tmp_path, capfd):
    change(base, "model.norm.weight", float("inf"))
    published = merge(base, tmp_path, torch.float16)
    assert StoredWeights(published).read("model.norm.weight").isinf().sum() == 1
    assert (
        "model.norm.weight has infinite or NaN values in the base model"
        in capfd.readouterr().out
    )


def test_infinite_weight_of_an_adapted_layer_is_refused(base, tmp_path):
    change(base, MLP, float("inf"))
    with pytest.raises(ConfigInvalid, match=f"{MLP} of the base model has infinite"):
        merge(base, tmp_path, torch.float32)


def test_nan_that_training_stored_is_refused(base, tmp_path):
    trained = load_file(base / "model.safetensors")
    trained[MLP][0, 0] = float("nan")
    (tmp_path / "trained").mkdir()
    save_file(trained, tmp_path / "trained" / "model.safetensors")
    (tmp_path / "published").mkdir()
    with pytest.raises(ConfigInvalid, match=f"the trained {MLP} has infinite or NaN"):
        save_merged(base, tmp_path / "trained", torch.float32, tmp_path / "published")


def test_second_copy_of_a_tied_weight_is_trained_too(tmp_path):
    """Else the two would differ, and transformers would take the stored output head in place of the trained weight."""
    base = make_base("qwen2.5", tmp_path / "base")
    embedding = "model.embed_tokens.weight"
    weights = load_file(base / "model.safetensors")
    weights["lm_head.weight"] = weights[embedding].clone()
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    trained = {name: tensor * 2 for name, tensor in weights.items()}
    trained.pop("lm_head.weight")
    for name in ("trained", "published"):
        (tmp_path / name).mkdir()
    save_file(trained, tmp_path / "trained" / "model.safetensors")
    save_merged(base, tmp_path / "trained", torch.float32, tmp_path / "published")
    published = load_file(tmp_path / "published" / "model.safetensors")
    assert torch.equal(published["lm_head.weight"], 2 * weights[embedding])
    assert torch.equal(published[embedding], 2 * weights[embedding])


@pytest.mark.parametrize("method", ["LoRA", "Full"])
def test_names_without_the_prefix_of_the_model_are_kept(tmp_path, method):
    """GPT-2's files have such names, and buffers that the model no longer has."""
    base = make_base("gpt2", tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    weights = {
        name.removeprefix("transformer."): tensor for name, tensor in weights.items()
    }
    weights["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    config = TrainConfig.model_validate(
        {
            "identity": "t", "prepare": "p", "model": {"uri": "m"}, "checkpoint": {},
            "recipe": {"dtype": "FP32", "method": method},
        }
    )  # fmt: skip
    source = BaseModel("m", base, digest="")
    trainable = load_trainable(source, config, torch.device("cpu"))
    for tensor in trainable.weights.values():
        tensor.add_(0.1)
    for name in ("trained", "published"):
        (tmp_path / name).mkdir()
    trainable.format.write(trainable.weights, tmp_path / "trained")
    save_merged(base, tmp_path / "trained", torch.float32, tmp_path / "published")
    published = load_file(tmp_path / "published" / "model.safetensors")
    assert published.keys() == weights.keys()
    tokens = torch.arange(7, 40)[None]
    with torch.no_grad():
        expected = trainable.module.eval()(tokens, use_cache=False).logits
        actual = load_base(tmp_path / "published", torch.float32)(
            tokens, use_cache=False
        ).logits
    assert (actual - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"torch_dtype": "float32"}, {"torch_dtype": "bfloat16"}),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}),
        ({}, {"torch_dtype": "bfloat16"}),
        (
            {"dtype": "float32", "part": {"dtype": "float32", "a": {"dtype": "float16"}}},
            {"dtype": "bfloat16", "part": {"dtype": "bfloat16", "a": {"dtype": "float16"}}},
        ),
        ({"auto_map": {"AutoModel": "code.Model"}, "dtype": None}, {"dtype": "bfloat16"}),
    ],
)  # fmt: skip
def test_config_changes_in_the_data_type_alone(base, tmp_path, before, after):
    path = base / "config.json"
    rest = json.loads(path.read_text())
    rest.pop("torch_dtype")
    path.write_text(json.dumps(rest | before))
    published = merge(base, tmp_path, torch.bfloat16)
    assert json.loads((published / "config.json").read_text()) == rest | after


def test_all_linear_adapts_the_language_model_only(multimodal):
    model = attach_adapter(
        load_base(multimodal, torch.float32), Lora(), ModelSource(uri="m"), seed=1
    )
    adapted = {name for name, _ in model.named_parameters() if ".lora_" in name}
    assert len(adapted) == 2 * 2 * 7
    assert all(".language_model.layers." in name for name in adapted)


def test_name_that_a_tower_has_too_adapts_the_language_model(multimodal):
    base = load_base(multimodal, torch.float32)
    names = Lora(target_modules=("q_proj", "*.v_proj"), modules_to_save=("lm_head",))
    model = attach_adapter(base, names, ModelSource(uri="m"), seed=1)
    adapted = {name for name, _ in model.named_parameters() if ".lora_" in name}
    assert len(adapted) == 2 * 2 * 2
    assert not any("vision_tower" in name for name in adapted)


def test_name_of_a_tower_is_refused(multimodal):
    base = load_base(multimodal, torch.float32)
    with pytest.raises(
        ConfigInvalid, match="out_proj matches only layers that read images"
    ):
        attach_adapter(
            base, Lora(target_modules=("out_proj",)), ModelSource(uri="m"), seed=1
        )


def test_text_model_is_a_language_model_in_all_its_layers(base):
    model = load_base(base, torch.float32)
    assert language_names(model) == {name for name, _ in model.named_modules() if name}


def test_merge_of_a_multimodal_base_keeps_names_and_towers(multimodal, tmp_path, capfd):
    model = load_base(multimodal, torch.float32)
    trainable = trainable_adapter(model, Lora(), ModelSource(uri="m"), seed=1)
    for tensor in trainable.weights.values():
        torch.nn.init.normal_(tensor, std=0.1)
    adapter = tmp_path / "adapter"
    published = tmp_path / "published"
    adapter.mkdir()
    published.mkdir()
    trainable.format.write(trainable.weights, adapter)
    save_merged(multimodal, adapter, torch.float32, published)
    # Layer by layer, in the memory of a single layer.
    assert "merging in memory" not in capfd.readouterr().out

    stored = StoredWeights(multimodal)
    merged = StoredWeights(published)
    assert merged.meta.keys() == stored.meta.keys()
    changed = {
        name
        for name in stored.meta
        if not torch.equal(merged.read(name), stored.read(name))
    }
    assert len(changed) == 2 * 7
    assert all(name.startswith("language_model.model.layers.") for name in changed)
    tokens = torch.arange(7, 40)[None]
    with torch.no_grad():
        expected = trainable.module.eval()(tokens, use_cache=False).logits
        actual = load_base(published, torch.float32)(tokens, use_cache=False).logits
    assert (actual - expected).abs().max() < 1e-4


def break_folder(folder: Path, how: str) -> None:
    """Damage a published folder in one way."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    if how == "missing":
        weights.pop(MLP)
    elif how == "new":
        weights["model.other.weight"] = torch.ones(2)
    elif how == "shape":
        weights[MLP] = weights[MLP].T.contiguous()
    elif how == "config":
        config = json.loads((folder / "config.json").read_text())
        config.pop("rope_theta")
        (folder / "config.json").write_text(json.dumps(config))
    elif how == "tokenizer":
        (folder / "tokenizer.json").write_text("{")
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("missing", f"the tensor {MLP} is missing"),
        ("new", "the tensor model.other.weight is new"),
        ("shape", f"the tensor {MLP} has the shape"),
        ("config", "the key rope_theta of config.json has changed"),
        ("tokenizer", "cannot be loaded"),
    ],
)
def test_folder_that_differs_from_the_base_is_refused(base, tmp_path, how, problem):
    published = merge(base, tmp_path, torch.float32)
    for path in base.glob("token*"):
        (published / path.name).write_bytes(path.read_bytes())
    # `new` is allowed if a shared weight was separated, which the config then says.
    config = json.loads((base / "config.json").read_text())
    for folder in (base, published):
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))  # fmt: skip
    check_published(published, base)
    break_folder(published, how)
    with pytest.raises(ConfigInvalid, match=problem):
        check_published(published, base)
