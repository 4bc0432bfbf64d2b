"""Rows as they are read: every corruption is found then, and nothing is read before."""

import shutil
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest
from support.trainer.training import (
    document,
    documents,
    environment,
    train_config,
    write_rows,
)

from finetune_trainer.data.documents import Document
from finetune_trainer.data.packing import rows as packing_rows
from finetune_trainer.data.packing.row_format import record_size
from finetune_trainer.data.packing.rows import PackedRows
from finetune_trainer.data.packing.writer import PackedWriter
from finetune_trainer.runtime.errors import DataInvalid
from finetune_trainer.stages.train import check_tokens, open_rows
from finetune_trainer.training.batches import StepSampler, load_batch

CONTEXT = 32
SIZE = record_size(CONTEXT)


@pytest.fixture
def folder(tmp_path):
    return write_rows(tmp_path, documents(60), documents(60, seed=5))


def assert_corrupt(folder: Path, row: int) -> None:
    """Check that the other rows can be read and this row cannot."""
    rows = PackedRows(folder, "train")
    rows.read(index for index in range(len(rows)) if index != row)
    message = rf"train-00000.rows.*row {row}.*: delete .* and run prepare again"
    with pytest.raises(DataInvalid, match=message):
        rows.read([row])


@pytest.mark.parametrize(
    "position", [0, 4 * CONTEXT + 1, SIZE - 1], ids=["token", "flag", "checksum"]
)
def test_flipped_bit_is_found_when_the_row_is_read(folder, position):
    file = folder / "train-00000.rows"
    data = bytearray(file.read_bytes())
    data[3 * SIZE + position] ^= 0x10
    file.write_bytes(data)
    assert_corrupt(folder, 3)


def test_row_in_the_place_of_another_is_found(folder):
    file = folder / "train-00000.rows"
    data = bytearray(file.read_bytes())
    data[3 * SIZE : 4 * SIZE] = data[5 * SIZE : 6 * SIZE]
    file.write_bytes(data)
    assert_corrupt(folder, 3)


def test_truncated_file_is_found(folder):
    file = folder / "train-00000.rows"
    rows = file.stat().st_size // SIZE
    file.write_bytes(file.read_bytes()[:-1])
    assert_corrupt(folder, rows - 1)


@pytest.mark.parametrize("other", ["train-00001.rows", "validation-00000.rows"])
def test_file_of_another_split_or_part_is_found(tmp_path, other):
    with PackedWriter(tmp_path, CONTEXT, 0) as writer:
        for _ in range(2):
            writer.add("train", document(0, CONTEXT))
            writer.add("validation", document(0, CONTEXT))
            writer.end_part()
    assert len(PackedRows(tmp_path, "train").read([0, 1]).tokens) == 2
    shutil.copy(tmp_path / other, tmp_path / "train-00000.rows")
    with pytest.raises(
        DataInvalid, match=r"train-00000.rows: row 0 does not match its checksum"
    ):
        PackedRows(tmp_path, "train").read([0])


def test_rows_of_many_parts_are_read_in_any_order(tmp_path, monkeypatch):
    monkeypatch.setattr(packing_rows, "MAX_OPEN_FILES", 3)
    lengths = [5 + number % 20 for number in range(40)]
    with PackedWriter(tmp_path, CONTEXT, 0) as writer:
        for number, length in enumerate(lengths):
            writer.add("train", document(number, length))
            writer.end_part()
    rows = PackedRows(tmp_path, "train")
    order = np.random.default_rng(0).permutation(len(lengths)).tolist()
    read = rows.read(order)
    assert read.lengths.tolist() == [lengths[number] for number in order]
    first_tokens = [document(number, 5).tokens[0] for number in order]
    assert read.tokens[:, 0].tolist() == first_tokens
    with pytest.raises(IndexError):
        rows.read([len(lengths)])


def test_index_counts_targets_and_finds_the_largest_token(tmp_path):
    pair = [document(0, 10, prompt=4), document(5, 6, prompt=2)]
    rows = PackedRows(write_rows(tmp_path, pair, context_length=CONTEXT), "train")
    assert rows.target_count == 6 + 4
    assert rows.largest_token == max(int(added.tokens.max()) for added in pair)
    assert rows.token_count == 16
    assert len(rows) == 1


def test_row_of_one_document_never_restarts_positions(tmp_path):
    pair = [document(0, 10), document(5, 6)]
    rows = PackedRows(write_rows(tmp_path, pair, packing=False), "train")
    read = rows.read([0, 1])
    assert not rows.packed
    assert read.positions.tolist() == [list(range(CONTEXT))] * 2
    assert read.lengths.tolist() == [10, 6]
    for tokens, added in zip(read.tokens, pair, strict=True):
        length = len(added.tokens)
        assert tokens[:length].tolist() == added.tokens.tolist()


def test_padding_is_known_even_if_a_document_ends_with_its_token(tmp_path):
    tokens = np.array([5, 6, 0, 0], dtype="<i4")
    loss_mask = np.array([0, 1, 0, 0], dtype="u1")
    ending = Document(tokens, loss_mask)
    rows = PackedRows(write_rows(tmp_path, [ending], packing=False), "train")
    assert rows.read([0]).lengths.tolist() == [4]


def bytes_read() -> int:
    """Return the bytes that this process has read."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_start_of_training_reads_two_percent_of_the_rows(tmp_path):
    """Open and check 1 GiB of rows and read the first step's batch; writing it reads nothing back either."""
    context = 8192
    count = 2**30 // record_size(context) + 1
    try:
        before_writing = bytes_read()
        folder = write_rows(
            tmp_path, repeat(document(0, context), count), context_length=context
        )
        size = sum(file.stat().st_size for file in folder.iterdir())
        before = bytes_read()
        config = train_config(
            tmp_path / "no-model", micro_batch_size=8, gradient_accumulation_steps=4
        )
        rows, validation_rows, _ = open_rows(config, environment(tmp_path))
        check_tokens((rows, validation_rows), vocabulary=320)
        wanted = StepSampler.of(config.recipe, len(rows), config.seed).rows_for_step(0)
        batch = load_batch(rows, wanted)
        read = bytes_read() - before
    finally:
        shutil.rmtree(tmp_path / "prepare")

    assert size >= 2**30
    assert batch.size == 32 * context
    assert 32 * record_size(context) <= read < 0.02 * size
    assert before - before_writing < 0.02 * size
