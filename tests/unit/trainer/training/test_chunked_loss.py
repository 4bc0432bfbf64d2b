"""The loss in chunks: the same loss and gradients as from all logits at once, in less memory."""

import math

import pytest
import torch
from support.trainer.families import FAMILIES, make_family_model
from support.trainer.training import documents, run_train, train_config, write_rows

from finetune_trainer.data.packing.rows import PackedRows
from finetune_trainer.models.base_model import BaseModel
from finetune_trainer.training.batches import load_batch
from finetune_trainer.training.methods.registry import load_trainable
from finetune_trainer.training.model import loss
from finetune_trainer.training.model.loss import chunk_size, chunked_cross_entropy
from finetune_trainer.training.model.model import TrainedModel

torch.set_num_threads(1)
CPU = torch.device("cpu")


def trained_model(folder, **changes):
    config = train_config(folder, **changes)
    model = TrainedModel(
        load_trainable(BaseModel("m", folder, ""), config, CPU), CPU, config.recipe
    )
    torch.manual_seed(0)
    for parameter in model.trainable.values():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def loss_and_gradients(model, batch):
    torch.manual_seed(7)  # dropout
    for parameter in model.trainable.values():
        parameter.grad = None
    loss = model.loss_sum(batch)
    loss.backward()
    return loss.item(), {
        name: parameter.grad.clone() for name, parameter in model.trainable.items()
    }


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lora": {"rank": 4, "target_modules": ["q_proj", "lm_head"], "dropout": 0.1}},
        {"lora": {"rank": 4, "modules_to_save": ["lm_head"]}},
        {"method": "Full", "lora": None},
        {"neftune_noise_alpha": 5.0},
    ],
    ids=["LoRA", "adapted head", "whole head", "Full", "noise"],
)
def test_chunked_loss_and_gradients_are_those_of_all_logits(
    tiny_model, tmp_path, changes
):
    rows = PackedRows(write_rows(tmp_path, documents(12)), "train")
    batch = load_batch(rows, range(len(rows)))
    model = trained_model(tiny_model, **changes)
    model.model.train()
    dropout = changes.get("lora") or {}
    if dropout.get(
        "dropout"
    ):  # the order of random numbers differs between one call of the head and several
        model.model.eval()
    model.largest_loss = math.inf
    expected, gradients = loss_and_gradients(model, batch)
    model.largest_loss = 7
    assert len(batch.targets) % 7
    loss, loss_gradients = loss_and_gradients(model, batch)
    assert loss == pytest.approx(expected, rel=1e-6)
    for name, gradient in gradients.items():
        assert torch.allclose(
            loss_gradients[name],
            gradient,
            rtol=1e-4,
            atol=1e-5 * float(gradient.abs().max()),
        )


def test_only_one_chunk_of_logits_exists_at_a_time():
    sizes = []

    def head(inputs):
        sizes.append(len(inputs))
        return inputs @ torch.ones(4, 50)

    inputs = torch.randn(20, 4, requires_grad=True)
    chunked_cross_entropy(head, inputs, torch.zeros(20, dtype=torch.long), 8).backward()
    assert sizes == [8, 8, 4, 4, 8, 8]  # forward, then again for the gradients


def test_chunk_of_a_large_vocabulary_takes_a_gibibyte():
    assert chunk_size(131_072) * 131_072 * 4 == loss.CHUNK_BYTES
    assert chunk_size(1 << 40) == 1


def test_model_that_changes_its_logits_is_not_chunked(tmp_path):
    capped = FAMILIES["gemma3"]
    options = capped.options | {"final_logit_softcapping": 2.0}
    folder = make_family_model(
        type(capped)(capped.config, options, capped.targets), tmp_path / "model"
    )
    assert trained_model(folder, dtype="FP32").largest_loss == math.inf
    plain = make_family_model(capped, tmp_path / "plain")
    assert trained_model(plain, dtype="FP32").largest_loss == chunk_size(320)


def test_training_in_chunks_ends_as_without(tiny_model, tmp_path, monkeypatch):
    write_rows(tmp_path, documents(60), documents(8, seed=5))
    lora = {"rank": 4, "dropout": 0.0}
    expected = run_train(train_config(tiny_model, lora=lora), tmp_path)
    monkeypatch.setattr(loss, "CHUNK_BYTES", 4 * 320 * 5)
    result = run_train(train_config(tiny_model, lora=lora, identity="c" * 16), tmp_path)
    assert result.validation_loss == pytest.approx(expected.validation_loss, rel=1e-4)
