"""Rows of one document: the same training without packing, also for models that do not isolate documents."""

import numpy as np
import pytest
import torch
from support.trainer.models import prompt_records, write_jsonl
from support.trainer.prepared import (
    output_folder,
    packed_documents,
    prepare,
    prepare_config,
)
from support.trainer.training import (
    document,
    documents,
    run_train,
    train_config,
    write_rows,
)

from finetune_trainer.data.packing.rows import PackedRows
from finetune_trainer.models.loading import load_base
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.training.batches import batches, load_batch
from finetune_trainer.training.methods.lora import trainable_adapter
from finetune_trainer.training.model.model import TrainedModel

torch.set_num_threads(1)


def trained(tiny_model):
    """Return a model whose adapter changes the output, without dropout."""
    config = train_config(tiny_model, lora={"rank": 4, "dropout": 0.0})
    base = load_base(tiny_model, torch.float32)
    assert config.recipe.lora
    model = TrainedModel(
        trainable_adapter(base, config.recipe.lora, config.model, 3),
        torch.device("cpu"),
        config.recipe,
    )
    for parameter in model.trainable.values():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def loss_and_gradients(model, folder, batch_size):
    rows = PackedRows(folder, "train")
    model.model.zero_grad()
    loss = torch.zeros(())
    tokens = 0
    for batch in batches(rows, np.arange(len(rows)), batch_size):
        loss = loss + model.loss_sum(batch)
        tokens += batch.size
    loss.backward()
    return (
        loss.detach(),
        {name: p.grad.clone() for name, p in model.trainable.items()},
        tokens,
    )


@pytest.mark.parametrize("batch_size", [1, 3])
def test_unpacked_loss_and_gradients_equal_the_packed_ones(
    tiny_model, tmp_path, batch_size
):
    model = trained(tiny_model)
    packed = write_rows(tmp_path / "packed", documents(12), context_length=64)
    unpacked = write_rows(
        tmp_path / "unpacked", documents(12), context_length=64, packing=False
    )
    assert len(PackedRows(packed, "train")) < len(PackedRows(unpacked, "train")) == 12

    loss, gradients, tokens = loss_and_gradients(model, packed, batch_size)
    unpacked_loss, unpacked_gradients, unpacked_tokens = loss_and_gradients(
        model, unpacked, batch_size
    )
    lengths = [len(document.tokens) for document in documents(12)]
    assert tokens == unpacked_tokens == sum(lengths)
    torch.testing.assert_close(unpacked_loss, loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            unpacked_gradients[name], gradient, atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [((10, 17), 24), ((16, 3), 16), ((59, 4), 60)],
    ids=["rounded", "multiple", "at most"],
)
def test_batch_is_cut_to_its_longest_document(tmp_path, lengths, expected):
    pair = [document(number, length) for number, length in enumerate(lengths)]
    rows = PackedRows(
        write_rows(tmp_path, pair, context_length=60, packing=False), "train"
    )
    batch = load_batch(rows, np.array([0, 1]))
    assert batch.tokens.shape == batch.positions.shape == (2, expected)
    assert batch.positions.tolist() == [list(range(expected))] * 2
    assert batch.size == sum(lengths)
    expected_targets = np.concatenate(
        [document.tokens[document.loss_mask == 1] for document in pair]
    )
    assert batch.targets.tolist() == expected_targets.tolist()
    following = batch.tokens.flatten()[batch.target_positions + 1]
    assert following.tolist() == expected_targets.tolist()


def test_unpacked_rows_need_no_isolation(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "transformers.masking_utils.find_packed_sequence_indices",
        lambda _positions: None,
    )
    write_rows(tmp_path, documents(20), documents(4, seed=5))
    with pytest.raises(ConfigInvalid, match="attend to each other"):
        run_train(train_config(tiny_model), tmp_path)
    write_rows(tmp_path, documents(20), documents(4, seed=5), packing=False)
    assert run_train(train_config(tiny_model), tmp_path).validation_loss is not None


def test_prepare_without_packing_gives_a_row_a_record(
    tokenizer_folder, environment, manifest_dir
):
    write_jsonl(manifest_dir / "data.jsonl", prompt_records(40))
    result = prepare(prepare_config(tokenizer_folder, packing=False), environment)
    rows = PackedRows(output_folder(environment), "train")
    assert result.train_rows == len(rows) == len(packed_documents(environment)) == 40
    assert np.all(np.diff(rows.read(range(40)).positions, axis=1) == 1)
