from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune_trainer.data.packing import SPLITS, Document, PackedRows, PackedWriter

CONTEXT = 16
PAD = 9
lengths = st.lists(st.integers(2, CONTEXT), max_size=300)
anywhere = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def document(number: int, length: int) -> Document:
    """Tokens that name their document; everything counted but the first."""
    counted = np.ones(length, dtype=np.uint8)
    counted[0] = 0
    return Document(np.arange(length, dtype=np.int32) + 1000 * (number + 1), counted)


def write(folder: Path, documents: list[Document]) -> None:
    folder.mkdir(exist_ok=True)
    with PackedWriter(folder, CONTEXT, PAD) as writer:
        for each in documents:
            writer.add("train", each)


def documents_in(rows: PackedRows) -> list[tuple[list[int], list[int]]]:
    """Split the rows where positions begin again."""
    found = []
    for tokens, positions, counted in zip(rows.tokens, rows.positions, rows.loss_mask, strict=True):
        starts = [*np.flatnonzero(positions == 0), len(tokens)]
        for first, behind in pairwise(starts):
            assert positions[first:behind].tolist() == list(range(behind - first))
            found.append((tokens[first:behind].tolist(), counted[first:behind].tolist()))
    return found


@anywhere
@given(lengths=lengths)
def test_every_document_stands_whole_in_one_row_and_only_once(tmp_path: Path, lengths: list[int]) -> None:
    documents = [document(number, length) for number, length in enumerate(lengths)]
    write(tmp_path, documents)

    rows = PackedRows(tmp_path, "train")
    paddings = [found for found in documents_in(rows) if found[0][0] == PAD]
    others = [found for found in documents_in(rows) if found[0][0] != PAD]

    assert sorted(others) == sorted((each.tokens.tolist(), each.loss_mask.tolist()) for each in documents)
    assert all(set(tokens) == {PAD} and not any(counted) for tokens, counted in paddings)
    assert rows.token_count == sum(lengths)
    assert len(rows) * CONTEXT == rows.token_count + sum(len(tokens) for tokens, _ in paddings)


@anywhere
@given(lengths=lengths)
def test_the_same_documents_give_the_same_bytes(tmp_path: Path, lengths: list[int]) -> None:
    for name in ("once", "again"):
        write(tmp_path / name, [document(number, length) for number, length in enumerate(lengths)])

    for file in (tmp_path / "once").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_rows_are_nearly_full_where_documents_are_short(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0).integers(2, CONTEXT // 2, 2000)
    write(tmp_path, [document(number, int(length)) for number, length in enumerate(drawn)])

    rows = PackedRows(tmp_path, "train")
    assert rows.token_count / rows.tokens.size > 0.97


def test_a_split_without_documents_has_no_rows(tmp_path: Path) -> None:
    write(tmp_path, [])

    for split in SPLITS:
        rows = PackedRows(tmp_path, split)
        assert len(rows) == 0
        assert rows.tokens.shape == rows.positions.shape == rows.loss_mask.shape == (0, CONTEXT)
        assert rows.context_length == CONTEXT


def test_rows_are_mapped_and_cannot_be_written_to(tmp_path: Path) -> None:
    write(tmp_path, [document(0, 5)])
    rows = PackedRows(tmp_path, "train")

    assert isinstance(rows.tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        rows.tokens[0, 0] = 1


def test_an_unfinished_folder_has_no_index(tmp_path: Path) -> None:
    def fail() -> None:
        with PackedWriter(tmp_path, CONTEXT, PAD) as writer:
            writer.add("train", document(0, 5))
            raise KeyError

    with pytest.raises(KeyError):
        fail()

    assert not (tmp_path / "rows.json").exists()
