"""The packing of documents into rows, and the rows as they are read."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune_trainer.data.documents import SPLITS, Document
from finetune_trainer.data.packing.rows import PackedRows
from finetune_trainer.data.packing.writer import PackedWriter

CONTEXT = 16
PAD = 9
lengths = st.lists(st.integers(2, CONTEXT), max_size=300)
property_test = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def document(number: int, length: int) -> Document:
    """Return a document whose tokens show its number; all tokens but the first are in the loss."""
    loss_mask = np.ones(length, dtype=np.uint8)
    loss_mask[0] = 0
    return Document(np.arange(length, dtype=np.int32) + 1000 * (number + 1), loss_mask)


def write(folder: Path, documents: list[Document]) -> None:
    folder.mkdir(exist_ok=True)
    with PackedWriter(folder, CONTEXT, PAD) as writer:
        for added in documents:
            writer.add("train", added)


def documents_in(rows: PackedRows) -> list[tuple[list[int], list[int]]]:
    """Return tokens and loss mask of every document, including padding: a document begins at position 0."""
    documents = []
    read = rows.read(range(len(rows)))
    for tokens, positions, loss_mask in zip(
        read.tokens, read.positions, read.loss_mask, strict=True
    ):
        starts = [*np.flatnonzero(positions == 0), len(tokens)]
        for start, end in pairwise(starts):
            assert positions[start:end].tolist() == list(range(end - start))
            documents.append(
                (tokens[start:end].tolist(), loss_mask[start:end].tolist())
            )
    return documents


@property_test
@given(lengths=lengths)
def test_every_document_is_undivided_in_exactly_one_row(
    tmp_path: Path, lengths: list[int]
) -> None:
    documents = [document(number, length) for number, length in enumerate(lengths)]
    write(tmp_path, documents)

    rows = PackedRows(tmp_path, "train")
    paddings: list[Any] = []
    others: list[Any] = []
    for tokens, loss_mask in documents_in(rows):
        is_padding = tokens[0] == PAD
        (paddings if is_padding else others).append((tokens, loss_mask))
    expected = [
        (added.tokens.tolist(), added.loss_mask.tolist()) for added in documents
    ]

    assert sorted(others) == sorted(expected)
    assert all(
        set(tokens) == {PAD} and not any(loss_mask) for tokens, loss_mask in paddings
    )
    assert rows.token_count == sum(lengths)
    assert len(rows) * CONTEXT == rows.token_count + sum(
        len(tokens) for tokens, _ in paddings
    )


@property_test
@given(lengths=lengths)
def test_same_documents_give_the_same_bytes(tmp_path: Path, lengths: list[int]) -> None:
    for name in ("once", "again"):
        write(
            tmp_path / name,
            [document(number, length) for number, length in enumerate(lengths)],
        )

    for file in (tmp_path / "once").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_short_documents_fill_rows_to_97_percent(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0).integers(2, CONTEXT // 2, 2000)
    write(
        tmp_path, [document(number, int(length)) for number, length in enumerate(drawn)]
    )

    rows = PackedRows(tmp_path, "train")
    assert rows.token_count / (len(rows) * CONTEXT) > 0.97


def test_split_without_documents_has_no_rows(tmp_path: Path) -> None:
    write(tmp_path, [])

    for split in SPLITS:
        rows = PackedRows(tmp_path, split)
        assert len(rows) == 0
        assert rows.read([]).tokens.shape == (0, CONTEXT)
        assert rows.context_length == CONTEXT


def test_failed_writer_leaves_no_index(tmp_path: Path) -> None:
    def fail() -> None:
        with PackedWriter(tmp_path, CONTEXT, PAD) as writer:
            writer.add("train", document(0, 5))
            raise KeyError

    with pytest.raises(KeyError):
        fail()

    assert not (tmp_path / "rows.json").exists()
