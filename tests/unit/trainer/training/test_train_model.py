"""The adapted model: isolation of packed documents, the loss, the adapter's layers, and loading."""

import json

import numpy as np
import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from support.trainer.training import document, run_train, train_config, write_rows
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from finetune_trainer.contract import Lora, ModelSource
from finetune_trainer.data.packing.rows import PackedRows
from finetune_trainer.models.base_model import BaseModel
from finetune_trainer.models.loading import check_context_length, dtype_of, load_base
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.training.batches import StepSampler, load_batch
from finetune_trainer.training.methods.lora import attach_adapter, trainable_adapter
from finetune_trainer.training.model.model import TrainedModel, check_isolation

torch.set_num_threads(1)


def adapted(tiny_model, *, seed=3, noise=True, **recipe):
    config = train_config(tiny_model, **recipe)
    base = load_base(tiny_model, dtype_of(config.recipe.dtype, tiny_model))
    assert config.recipe.lora
    model = TrainedModel(
        trainable_adapter(base, config.recipe.lora, config.model, seed),
        torch.device("cpu"),
        config.recipe,
    )
    if noise:  # a new adapter does not change the output; a trained one does
        for parameter in model.trainable.values():
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.fixture
def pair():
    return document(0, 12, prompt=4), document(100, 9, prompt=2)


@pytest.fixture
def packed(tmp_path, pair):
    return PackedRows(write_rows(tmp_path, pair, context_length=24), "train")


@pytest.mark.parametrize("batch_size", [1, 2])
def test_packed_document_has_the_logits_it_has_alone(
    tiny_model, packed, pair, batch_size
):
    model = adapted(tiny_model).model.eval()
    batch = load_batch(packed, np.zeros(batch_size, dtype=int))
    starts = {
        int(tokens[0]): index
        for index, tokens in enumerate([pair[0].tokens, pair[1].tokens])
    }
    first = starts[int(packed.read([0]).tokens[0, 0])]
    order = [pair[first], pair[1 - first]]
    second = slice(len(order[0].tokens), len(order[0].tokens) + len(order[1].tokens))
    with torch.no_grad():
        together = model(
            input_ids=batch.tokens, position_ids=batch.positions, use_cache=False
        ).logits
        alone = model(
            input_ids=torch.from_numpy(order[1].tokens.astype(np.int64))[None],
            use_cache=False,
        ).logits
        leaking = model(input_ids=batch.tokens, use_cache=False).logits
    for row in together:
        torch.testing.assert_close(row[second], alone[0], atol=2e-6, rtol=0)
    assert (leaking[0][second] - alone[0]).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", ["FP32", "BF16"])
def test_model_without_document_isolation_is_rejected(tiny_model, dtype, monkeypatch):
    model = adapted(tiny_model, dtype=dtype)
    check_isolation(model, "m")
    monkeypatch.setattr(
        "transformers.masking_utils.find_packed_sequence_indices",
        lambda _positions: None,
    )
    with pytest.raises(
        ConfigInvalid,
        match=r"attend to each other in this architecture \(LlamaForCausalLM\)",
    ):
        check_isolation(model, "m")


def test_packed_loss_and_gradients_equal_those_unpacked(tiny_model, packed, pair):
    model = adapted(tiny_model, lora={"rank": 4, "dropout": 0.0})
    ours = model.loss_sum(load_batch(packed, np.array([0])))
    ours.backward()
    gradients = {name: p.grad.clone() for name, p in model.trainable.items()}
    model.model.zero_grad()
    theirs = torch.zeros(())
    for sequence in pair:
        labels = torch.from_numpy(
            np.where(sequence.loss_mask, sequence.tokens, -100).astype(np.int64)
        )[None]
        output = model.model(
            input_ids=torch.from_numpy(sequence.tokens.astype(np.int64))[None],
            labels=labels,
        )
        theirs = theirs + output.loss * int(sequence.loss_mask[1:].sum())
    theirs.backward()
    torch.testing.assert_close(ours, theirs)
    for name, parameter in model.trainable.items():
        torch.testing.assert_close(
            gradients[name], parameter.grad, atol=1e-6, rtol=1e-4
        )


class InOrder(Trainer):
    """HF's Trainer without shuffling, so that it sees the same rows in the same order."""

    def _get_train_sampler(self, *_):
        return None


def test_five_steps_give_the_weights_of_hf_trainer(tiny_model, tmp_path):
    rows_folder = write_rows(tmp_path, [document(17 * i, 14) for i in range(40)])
    plain = {
        "lora": {"rank": 4, "dropout": 0.0},
        "max_steps": 5,
        "eval_steps": None,
    }
    optimizer = {
        "learning_rate": 1e-2,
        "scheduler": "Constant",
        "warmup_fraction": 0.0,
        "max_grad_norm": 0.5,
    }
    config = train_config(tiny_model, **plain, optimizer=optimizer)
    run_train(config, tmp_path)
    ours = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    ours = PeftModel.from_pretrained(
        ours, tmp_path / "train" / config.identity / "output"
    )

    rows = PackedRows(rows_folder, "train")
    sampler = StepSampler.of(config.recipe, len(rows), config.seed)
    records = []
    for row in np.concatenate([sampler.rows_for_step(step) for step in range(5)]):
        read = rows.read([row])
        tokens = read.tokens[0].astype(np.int64)
        labels = np.where(read.loss_mask[0], tokens, -100)
        records.append(
            {"input_ids": tokens, "position_ids": read.positions[0], "labels": labels}
        )
    model = adapted(tiny_model, seed=config.seed, noise=False, **plain).model
    model.config.use_cache = False
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "theirs"),
        max_steps=5,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=0.5,
        weight_decay=0.0,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        seed=config.seed,
    )
    InOrder(model=model, args=arguments, train_dataset=records).train()
    theirs = dict(model.named_parameters())
    moved = 0.0
    for name, parameter in ours.named_parameters():
        if "lora_" in name:
            torch.testing.assert_close(parameter, theirs[name], atol=2e-5, rtol=0)
            moved = max(moved, parameter.abs().max().item())
    assert moved > 1e-2


@pytest.mark.parametrize("dtype", ["FP32", "BF16"])
@pytest.mark.parametrize("variant", ["LoRA", "RsLoRA", "DoRA"])
def test_adapter_is_fp32_in_every_variant_and_dtype(tiny_model, dtype, variant):
    model = adapted(tiny_model, dtype=dtype, lora={"variant": variant})
    assert {tensor.dtype for tensor in model.weights.values()} == {torch.float32}
    assert next(p for p in model.model.parameters() if not p.requires_grad).dtype == (
        torch.bfloat16 if dtype == "BF16" else torch.float32
    )
    scaling = model.model.base_model.model.model.layers[0].self_attn.q_proj.scaling[
        "default"
    ]
    assert scaling == pytest.approx(32 / 4 if variant == "RsLoRA" else 32 / 16)
    magnitudes = [name for name in model.weights if "magnitude" in name]
    assert bool(magnitudes) == (variant == "DoRA")


def test_head_is_computed_only_at_target_positions(tiny_model, packed):
    model = adapted(tiny_model)
    batch = load_batch(packed, np.array([0]))
    computed = []
    head = model.model.get_output_embeddings()
    head.register_forward_hook(
        lambda _module, _inputs, output: computed.append(output.shape[:-1].numel())
    )
    model.loss_sum(batch)
    model.model(input_ids=batch.tokens)
    assert computed == [
        len(batch.targets),
        24,
    ]  # the second call, outside of the loss, computes all positions


def test_target_module_matches_by_suffix_or_pattern(tiny_model):
    def adapted_layers(*names):
        model = adapted(tiny_model, lora={"target_modules": names})
        return {
            name.split(".lora_")[0].split("model.layers.")[1] for name in model.weights
        }

    assert adapted_layers("q_proj") == {"0.self_attn.q_proj", "1.self_attn.q_proj"}
    assert adapted_layers("layers.1.self_attn.v_proj", "down_proj") == {
        "1.self_attn.v_proj",
        "0.mlp.down_proj",
        "1.mlp.down_proj",
    }
    assert adapted_layers("layers.0.*.gate_proj") == {"0.mlp.gate_proj"}
    assert len(adapted_layers("all-linear")) == 14


@pytest.mark.parametrize(
    "names", [("query",), ("q_proj", "query"), ("all-linear", "q_proj"), ("self_attn",)]
)
def test_unknown_target_module_is_rejected_listing_layers(tiny_model, names):
    with pytest.raises(ConfigInvalid, match=r"down_proj.*q_proj"):
        adapted(tiny_model, lora={"target_modules": names})


def test_model_with_too_few_positions_is_rejected(tiny_model):
    with pytest.raises(
        ConfigInvalid, match="supports 512 positions, the packed rows have 513"
    ):
        check_context_length(BaseModel("m", tiny_model, "sha256:0"), 513)


def copy_of(tiny_model, folder):
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_model_with_remote_code_is_rejected(tiny_model, tmp_path):
    folder = copy_of(tiny_model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    with pytest.raises(ConfigInvalid, match="cannot be loaded"):
        load_base(folder, torch.float32)
    assert not (tmp_path / "executed").exists()


def test_pickled_weights_are_rejected(tiny_model, tmp_path):
    folder = copy_of(tiny_model, tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigInvalid, match="cannot be loaded"):
        load_base(folder, torch.float32)


def test_weights_that_lack_a_layer_are_rejected(tiny_model, tmp_path):
    """transformers alone would initialize the missing layer with random values."""
    folder = copy_of(tiny_model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ConfigInvalid, match=r"do not match its config.json.*layers\.2"):
        load_base(folder, torch.float32)


def test_initial_adapter_depends_on_the_seed(tiny_model):
    def weight_sums(seed):
        base = load_base(tiny_model, torch.float32)
        model = attach_adapter(base, Lora(), ModelSource(uri="m"), seed)
        return [
            p.sum().item() for name, p in model.named_parameters() if "lora_A" in name
        ]

    assert weight_sums(1) == weight_sums(1) != weight_sums(2)


def test_gradients_do_not_depend_on_copies_of_inputs_in_fp32(
    tiny_model, packed, monkeypatch
):
    monkeypatch.setattr(
        torch.compiler, "is_compiling", lambda: True
    )  # compiled layers are PEFT's

    def gradients(*, copies):
        model = adapted(tiny_model, dtype="BF16", lora={"rank": 4, "dropout": 0.0})
        layers = [
            module for module in model.model.modules() if isinstance(module, LoraLayer)
        ]
        assert {layer.cast_input_dtype_enabled for layer in layers} == {False}
        for layer in layers:
            layer.cast_input_dtype_enabled = copies
        model.loss_sum(load_batch(packed, [0])).backward()
        return [parameter.grad for parameter in model.trainable.values()]

    for ours, theirs in zip(
        gradients(copies=False), gradients(copies=True), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_untrained_dora_on_a_bf16_base_changes_no_logit(tiny_model):
    model = adapted(
        tiny_model, dtype="BF16", lora={"variant": "DoRA", "rank": 4}, noise=False
    ).model.eval()
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        with_adapter = model(input_ids=tokens).logits
        with model.disable_adapter():
            assert torch.equal(with_adapter, model(input_ids=tokens).logits)
    assert (
        model.base_model.model.model.layers[0]
        .mlp.up_proj.lora_magnitude_vector["default"]
        .weight
        > 0
    ).all()


def test_dora_on_a_layer_with_zero_rows_is_rejected(tiny_model):
    with pytest.raises(
        ConfigInvalid,
        match=r"1 rows of .*lm_head are zero.*remove this layer from targetModules",
    ):
        adapted(tiny_model, lora={"variant": "DoRA", "target_modules": ("lm_head",)})
