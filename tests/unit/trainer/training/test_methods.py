"""The methods of training: what each of them trains, and that the trained model can be loaded, merged and evaluated."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from support.trainer.families import FAMILIES, make_family_model
from support.trainer.training import (
    document,
    run_train,
    stage_folder,
    train_config,
    write_rows,
)
from transformers import AutoModelForCausalLM

from finetune_trainer.data.packing.rows import PackedRows
from finetune_trainer.models.base_model import BaseModel
from finetune_trainer.models.loading import load_base
from finetune_trainer.models.trained.merge import load_merged, save_merged, with_adapter
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.training.batches import load_batch
from finetune_trainer.training.methods.registry import load_trainable
from finetune_trainer.training.model.embedding_noise import (
    document_lengths,
    embedding_noise,
)

torch.set_num_threads(1)
CPU = torch.device("cpu")
FULL = {"method": "Full", "lora": None}
SHORT = {"max_steps": 6, "eval_steps": 3}


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory):
    return make_family_model(
        FAMILIES["llama-tied"], tmp_path_factory.mktemp("models") / "tied"
    )


@pytest.fixture(scope="module")
def untied_model(tmp_path_factory):
    return make_family_model(
        FAMILIES["llama-untied"], tmp_path_factory.mktemp("models") / "untied"
    )


def output(workspace: Path, identity: str) -> Path:
    return stage_folder(workspace, identity) / "output"


def loaded(folder: Path, **changes: object):
    config = train_config(folder, **changes)
    return load_trainable(BaseModel("m", folder, ""), config, CPU)


def logits(model, tokens):
    with torch.inference_mode():
        return model(input_ids=tokens, use_cache=False).logits.float()


@pytest.fixture
def tokens():
    return torch.randint(3, 320, (2, 24), generator=torch.Generator().manual_seed(1))


def test_full_training_lowers_the_loss_and_transformers_loads_it(
    tiny_model, packed, tokens
):
    result = run_train(
        train_config(tiny_model, identity="full", max_steps=40, eval_steps=10, **FULL),
        packed,
    )
    folder = output(packed, "full")
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "manifest.json",
        "model.safetensors",
    }
    assert result.validation_loss
    assert result.validation_loss < 5.0  # ln 320 = 5.77 before training
    trained, base = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (folder, tiny_model)
    )
    assert all(
        not torch.equal(*pair)
        for pair in zip(trained.parameters(), base.parameters(), strict=True)
    )
    assert torch.equal(
        logits(trained, tokens),
        logits(load_merged(tiny_model, folder, torch.float32), tokens),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_model_is_published_as_it_is_evaluated(
    tiny_model, packed, tokens, tmp_path, dtype
):
    run_train(train_config(tiny_model, identity="published", **SHORT, **FULL), packed)
    save_merged(tiny_model, output(packed, "published"), dtype, tmp_path)
    published = load_base(tmp_path, dtype)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(
        dtype
    ).removeprefix("torch.")
    assert (
        load_file(tmp_path / "model.safetensors").keys()
        == load_file(tiny_model / "model.safetensors").keys()
    )
    assert torch.equal(
        logits(published, tokens),
        logits(load_merged(tiny_model, output(packed, "published"), dtype), tokens),
    )


def test_full_training_of_tied_weights_keeps_them_tied(tied_model, packed, tmp_path):
    run_train(train_config(tied_model, identity="tied", **SHORT, **FULL), packed)
    assert not [
        name
        for name in load_file(output(packed, "tied") / "model.safetensors")
        if "lm_head" in name
    ]
    save_merged(tied_model, output(packed, "tied"), torch.float32, tmp_path)
    published = load_base(tmp_path, torch.float32)
    assert published.lm_head.weight is published.model.embed_tokens.weight


def test_full_training_keeps_fp32_weights_under_bf16(tiny_model):
    trainable = loaded(tiny_model, dtype="BF16", **FULL)
    assert {tensor.dtype for tensor in trainable.weights.values()} == {torch.float32}
    assert all(parameter.requires_grad for parameter in trainable.module.parameters())


def test_qlora_stores_every_layer_but_the_head_in_4_bits(tiny_model):
    model = loaded(tiny_model, method="QLoRA", dtype="BF16").module
    layers = {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "quant_state")
    }
    assert {module.weight.dtype for module in layers.values()} == {torch.uint8}
    assert len(layers) == 7 * model.config.num_hidden_layers
    assert model.get_output_embeddings().weight.dtype == torch.bfloat16


def test_qlora_validation_does_not_change_its_weights(tiny_model, tokens):
    model = loaded(tiny_model, method="QLoRA", dtype="BF16").module
    before = logits(model.train(), tokens)
    logits(model.eval(), tokens)
    assert torch.equal(logits(model.train(), tokens), before)


def test_qlora_adapter_merges_into_the_stored_model(tiny_model, packed, tokens):
    run_train(
        train_config(
            tiny_model, identity="qlora", method="QLoRA", dtype="BF16", **SHORT
        ),
        packed,
    )
    folder = output(packed, "qlora")
    attached = with_adapter(tiny_model, folder, torch.float32)
    merged = load_merged(tiny_model, folder, torch.float32)
    assert torch.allclose(logits(attached, tokens), logits(merged, tokens), atol=1e-4)


def test_qlora_without_bitsandbytes_names_the_package(tiny_model, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(
        ConfigInvalid,
        match=r"QLoRA needs bitsandbytes: pip install 'finetune-operator\[qlora\]'",
    ):
        loaded(tiny_model, method="QLoRA")


@pytest.mark.parametrize(
    ("recipe", "uses"),
    [
        ({}, False),
        (FULL, False),
        ({"method": "QLoRA"}, True),
        ({"optimizer": {"name": "AdamW8Bit"}}, True),
    ],
    ids=str,
)
def test_only_some_recipes_import_bitsandbytes(tiny_model, recipe, uses):
    assert train_config(tiny_model, **recipe).uses_bitsandbytes() == uses


def test_quantized_module_to_save_is_refused(tiny_model):
    message = r"modulesToSave: q_proj has weights in 4 bits, which cannot be trained: .*train\.lora\.targetModules"
    with pytest.raises(ConfigInvalid, match=message):
        loaded(
            tiny_model, method="QLoRA", lora={"rank": 4, "modules_to_save": ["q_proj"]}
        )
    loaded(tiny_model, method="QLoRA", lora={"rank": 4, "modules_to_save": ["lm_head"]})


@pytest.mark.parametrize("modules", [("lm_head",), ("embed_tokens", "lm_head")])
def test_modules_to_save_are_trained_whole_and_merged(
    untied_model, packed, tokens, modules
):
    identity = "-".join(modules)
    lora = {"rank": 4, "modules_to_save": modules}
    run_train(
        train_config(untied_model, identity=identity, lora=lora, dtype="BF16", **SHORT),
        packed,
    )
    folder = output(packed, identity)
    saved = load_file(folder / "adapter_model.safetensors")
    stored = load_file(untied_model / "model.safetensors")
    for module in modules:
        (name,) = (name for name in saved if module in name)
        (original,) = (tensor for key, tensor in stored.items() if module in key)
        assert saved[name].dtype == torch.float32
        assert not torch.equal(saved[name], original.float())
    attached = with_adapter(untied_model, folder, torch.float32)
    assert isinstance(attached, PeftModel)
    merged = load_merged(untied_model, folder, torch.float32)
    assert torch.allclose(logits(attached, tokens), logits(merged, tokens), atol=1e-4)


@pytest.mark.parametrize(
    "modules",
    [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]],
    ids="-".join,
)
def test_tied_modules_to_save_stay_tied(tied_model, packed, tokens, modules):
    identity = f"tied-{'-'.join(modules)}"
    lora = {"rank": 4, "modules_to_save": modules}
    run_train(train_config(tied_model, identity=identity, lora=lora, **SHORT), packed)
    folder = output(packed, identity)
    merged = load_merged(tied_model, folder, torch.float32)
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    assert torch.allclose(
        logits(with_adapter(tied_model, folder, torch.float32), tokens),
        logits(merged, tokens),
        atol=1e-4,
    )


def test_unknown_module_to_save_is_rejected(tiny_model):
    with pytest.raises(
        ConfigInvalid, match=r"modulesToSave: lm_haed is no layer .* are .*lm_head"
    ):
        loaded(tiny_model, lora={"modules_to_save": ["lm_haed"]})


def test_noise_of_a_document_depends_on_its_own_length():
    positions = torch.tensor([[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5]])
    lengths = document_lengths(positions, torch.zeros_like(positions, dtype=torch.bool))
    assert lengths.tolist() == [[4, 4, 4, 4, 2, 2], [6] * 6]
    embedding = torch.nn.Embedding(8, 16)
    tokens = torch.ones(2, 6, dtype=torch.long)
    torch.manual_seed(0)
    with embedding_noise(embedding, lengths, alpha=5):
        noise = (embedding(tokens) - embedding.weight[1]).abs().amax(-1)
    limits = 5 / torch.sqrt(16 * lengths)
    assert (noise <= limits).all()
    assert (noise > limits / 2).all()  # the largest of 16 uniform numbers
    assert torch.equal(embedding(tokens), embedding.weight[tokens])


@pytest.mark.parametrize("flat", [False, True])
def test_noise_of_a_document_does_not_depend_on_padding(tmp_path, flat):
    output = write_rows(tmp_path, [document(0, 11), document(5, 7)], packing=False)
    batch = load_batch(PackedRows(output, "train"), np.arange(2), flat=flat)
    lengths = document_lengths(batch.positions, batch.is_padding)
    assert lengths.flatten().tolist() == [11.0] * (11 if flat else 16) + [7.0] * (
        7 if flat else 16
    )


def test_noise_changes_training_and_not_validation(tiny_model, packed):
    """With a learning rate of 0 the weights stay, and with them the validation loss."""
    results = {}
    for alpha in (None, 5.0):
        recipe = {
            "max_steps": 1,
            "eval_steps": 1,
            "neftune_noise_alpha": alpha,
            "optimizer": {"learning_rate": 1e-30},
        }
        results[alpha] = run_train(
            train_config(tiny_model, identity=f"noise-{alpha}", **recipe), packed
        )
    assert results[None].loss != results[5.0].loss
    assert results[None].validation_loss == results[5.0].validation_loss
