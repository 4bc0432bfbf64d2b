"""Attention by the boundaries of documents: a row of many documents trains as one document a row does.

The kernel needs a GPU. A function of PyTorch's operations stands in for it, with the same arguments.
"""

import pytest
import torch
from support.trainer.document_kernel import attention_of_each_document
from support.trainer.families import FAMILIES, make_family_model
from support.trainer.models import make_tiny_model
from support.trainer.training import documents, run_train, train_config, write_rows

from finetune_trainer.contract import Samples
from finetune_trainer.data.packing.rows import PackedRows
from finetune_trainer.models.base_model import BaseModel
from finetune_trainer.training.batches import Documents, load_batch
from finetune_trainer.training.methods.registry import load_trainable
from finetune_trainer.training.model import document_attention
from finetune_trainer.training.model.model import (
    ISOLATION_TOLERANCE,
    TrainedModel,
    check_isolation,
    probe,
)
from finetune_trainer.training.samples import SampleGenerator

torch.set_num_threads(1)
LORA = {"rank": 4, "dropout": 0.0}


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(document_attention, "varlen_attn", attention_of_each_document)
    monkeypatch.setattr(document_attention, "runs_on", lambda _device, _dtype: True)


def trained_model(folder, **changes):
    config = train_config(folder, lora=LORA, **changes)
    torch.manual_seed(0)
    model = TrainedModel(
        load_trainable(BaseModel("m", folder, ""), config, torch.device("cpu")),
        torch.device("cpu"),
        config.recipe,
    )
    for parameter in model.trainable.values():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def loss_and_gradients(model, batch):
    model.model.train()
    for parameter in model.trainable.values():
        parameter.grad = None
    loss = model.loss_sum(batch)
    loss.backward()
    return loss.item(), {
        name: parameter.grad.clone() for name, parameter in model.trainable.items()
    }


@pytest.fixture(scope="module", params=["llama-untied", "qwen2.5", "gemma3", "mistral"])
def folder(request, tmp_path_factory):
    return make_family_model(
        FAMILIES[request.param], tmp_path_factory.mktemp("models") / request.param
    )


def test_packed_documents_train_as_one_document_a_row(folder, tmp_path, kernel):
    packed = PackedRows(write_rows(tmp_path, documents(24, longest=30)), "train")
    alone = PackedRows(
        write_rows(
            tmp_path, documents(24, longest=30), prepared="q" * 16, packing=False
        ),
        "train",
    )
    assert len(packed) < len(alone) == 24
    model = trained_model(folder)
    expected, gradients = loss_and_gradients(model, load_batch(alone, range(24)))
    assert document_attention.enable(model, "FP32")
    batch = load_batch(packed, range(len(packed)), flat=True)
    assert batch.tokens.shape == (1, batch.size)
    loss, flat_gradients = loss_and_gradients(model, batch)
    assert loss == pytest.approx(expected, rel=1e-6)
    for name, gradient in gradients.items():
        assert torch.allclose(
            flat_gradients[name],
            gradient,
            rtol=0,
            atol=1e-5 * float(gradient.abs().max()),
        )


def test_sliding_window_is_that_of_the_mask(tmp_path, kernel):
    family = FAMILIES["mistral"]
    options = family.options | {"sliding_window": 4}
    folder = make_family_model(type(family)(family.config, options), tmp_path / "model")
    model = trained_model(folder)
    with_mask = probe(model)
    assert document_attention.enable(model, "FP32")
    assert torch.allclose(probe(model), with_mask, atol=1e-4)


def test_boundaries_are_where_positions_restart():
    batch_documents = Documents.at(torch.tensor([[0, 1, 2, 0, 0, 1]]).numpy())
    assert (
        batch_documents.boundaries.tolist(),
        batch_documents.boundaries.dtype,
        batch_documents.longest,
    ) == (
        [0, 3, 4, 6],
        torch.int32,
        3,
    )


def test_flat_batch_leaves_out_padding(tmp_path):
    rows = PackedRows(write_rows(tmp_path, documents(9), packing=False), "train")
    padded = load_batch(rows, range(9))
    flat = load_batch(rows, range(9), flat=True)
    assert flat.tokens.shape == (1, flat.size)
    assert flat.size == padded.size < padded.tokens.numel()
    assert torch.equal(flat.targets, padded.targets)
    assert torch.equal(flat.tokens[0, flat.target_positions + 1], flat.targets)
    assert flat.documents
    assert len(flat.documents.boundaries) == 10


def test_model_with_other_attention_keeps_its_mask(tmp_path, kernel, capsys):
    folder = make_family_model(FAMILIES["granite-hybrid"], tmp_path / "model")
    model = trained_model(folder)
    name = model.base.config._attn_implementation
    assert not document_attention.enable(model, "FP32")
    assert not model.is_flat
    assert model.base.config._attn_implementation == name
    assert "keeps attention with a mask: " in capsys.readouterr().out


def test_model_with_dropout_in_its_attention_keeps_its_mask(tmp_path, kernel, capsys):
    family = FAMILIES["llama-untied"]
    folder = make_family_model(
        type(family)(family.config, family.options | {"attention_dropout": 0.1}),
        tmp_path / "m",
    )
    model = trained_model(folder)
    before = torch.get_rng_state()
    assert not document_attention.enable(model, "FP32")
    assert torch.equal(torch.get_rng_state(), before)
    assert (
        "keeps attention with a mask: attention with dropout" in capsys.readouterr().out
    )


def test_kernel_that_rounds_otherwise_replaces_the_mask(tmp_path, kernel, monkeypatch):
    """The changes of single bits in bf16 grow from layer to layer, to much more in a few of many logits."""

    def rounding_otherwise(query, key, value, *others, **options):
        attended = attention_of_each_document(
            query.float(), key.float(), value.float(), *others, **options
        )
        return (attended * (1 + 1e-3 * torch.randn_like(attended))).to(query.dtype)

    model = trained_model(make_tiny_model(tmp_path / "model", layers=32), dtype="BF16")
    with_mask = probe(model)
    monkeypatch.setattr(document_attention, "varlen_attn", rounding_otherwise)
    assert document_attention.enable(model, "BF16")
    difference = (probe(model) - with_mask).abs()
    assert difference.max() > ISOLATION_TOLERANCE * with_mask.std()


def test_documents_that_attend_to_each_other_leave_the_mask(
    tmp_path, kernel, monkeypatch, capsys
):
    def without_boundaries(
        query, key, value, starts, _starts, longest, _longest, **options
    ):
        ends = starts[[0, -1]]
        return attention_of_each_document(
            query, key, value, ends, ends, int(ends[-1]), int(ends[-1]), **options
        )

    folder = make_family_model(FAMILIES["llama-untied"], tmp_path / "model")
    monkeypatch.setattr(document_attention, "varlen_attn", without_boundaries)
    assert not document_attention.enable(trained_model(folder), "BF16")
    assert "its logits differ from those with a mask" in capsys.readouterr().out


def test_all_weights_in_fp32_reach_the_kernel_in_one_type(tiny_model, kernel):
    """Rotary embeddings of fp32 states return fp32, and under autocast the values are bf16."""
    config = train_config(tiny_model, method="Full", lora=None, dtype="BF16")
    trainable = load_trainable(
        BaseModel("m", tiny_model, ""), config, torch.device("cpu")
    )
    model = TrainedModel(trainable, torch.device("cpu"), config.recipe)
    assert document_attention.enable(model, "BF16")


def test_attention_that_only_a_mask_describes_keeps_it(
    tiny_model, kernel, monkeypatch, capsys
):
    model = trained_model(tiny_model)
    monkeypatch.setattr(type(model.base), "_supports_flash_attn", False)
    assert not document_attention.enable(model, "BF16")
    assert (
        "keeps attention with a mask: only its mask describes its attention"
        in capsys.readouterr().out
    )


def test_kernel_that_fails_leaves_the_mask(tiny_model, kernel, monkeypatch, capsys):
    def fail(*_arguments, **_options):
        raise RuntimeError("no kernel image is available\nmore")

    monkeypatch.setattr(document_attention, "varlen_attn", fail)
    model = trained_model(tiny_model)
    assert not document_attention.enable(model, "BF16")
    check_isolation(model, "m")
    assert (
        "LlamaForCausalLM keeps attention with a mask: no kernel image is available\n"
        in capsys.readouterr().out
    )


def test_error_without_a_text_leaves_the_mask(tiny_model, kernel, monkeypatch, capsys):
    def fail(*_arguments, **_options):
        raise NotImplementedError

    monkeypatch.setattr(document_attention, "varlen_attn", fail)
    assert not document_attention.enable(trained_model(tiny_model), "BF16")
    assert (
        "keeps attention with a mask: NotImplementedError\n" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "change",
    [lambda attended: attended * float("nan"), lambda attended: attended * 2],
    ids=["nan", "other"],
)
def test_kernel_with_other_results_leaves_the_mask(
    tiny_model, kernel, monkeypatch, capsys, change
):
    def wrong(*arguments, **options):
        return change(attention_of_each_document(*arguments, **options))

    monkeypatch.setattr(document_attention, "varlen_attn", wrong)
    assert not document_attention.enable(trained_model(tiny_model), "BF16")
    assert (
        "keeps attention with a mask: its logits differ from those with a mask"
        in capsys.readouterr().out
    )


def test_kernel_is_not_asked_for_on_a_cpu(tiny_model, monkeypatch):
    monkeypatch.setattr(document_attention, "varlen_attn", None)
    assert not document_attention.enable(trained_model(tiny_model), "BF16")


def test_training_with_the_kernel_ends_as_without_it(tiny_model, tmp_path, monkeypatch):
    write_rows(tmp_path, documents(60), documents(8, seed=5))
    expected = run_train(train_config(tiny_model, lora=LORA), tmp_path)
    monkeypatch.setattr(document_attention, "varlen_attn", attention_of_each_document)
    monkeypatch.setattr(document_attention, "runs_on", lambda _device, _dtype: True)
    with_kernel = run_train(
        train_config(tiny_model, lora=LORA, identity="k" * 16), tmp_path
    )
    assert with_kernel.validation_loss == pytest.approx(
        expected.validation_loss, rel=1e-3
    )
    assert with_kernel.steps == expected.steps
    assert with_kernel.tokens == expected.tokens


def test_samples_are_those_of_a_model_with_a_mask(tiny_model, kernel):
    model = trained_model(tiny_model)
    generator = SampleGenerator(
        Samples(prompts=("w1 w2",), max_new_tokens=8), tiny_model, conversations=False
    )
    expected = generator.texts(model, lambda: None)
    assert document_attention.enable(model, "FP32")
    assert generator.texts(model, lambda: None) == expected
    assert model.base.config._attn_implementation == document_attention.NAME
