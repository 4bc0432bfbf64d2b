"""Columns of Parquet that nothing reads: a text in any row and of any type is named."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from finetune_trainer.data.reading import parquet_tables
from finetune_trainer.data.reading.formats import read_records
from finetune_trainer.data.reading.json_files import ReadRecord
from finetune_trainer.data.reading.source_file import SourceFile
from finetune_trainer.data.records.records import InvalidRecord
from finetune_trainer.runtime.errors import DataInvalid

ROWS = 400
WORDS = "some words"


def read(path: Path, table: Any) -> list[ReadRecord]:
    parquet.write_table(table, path)
    return list(read_records(SourceFile(path), "Auto"))


def texts(count: int = ROWS) -> Any:
    return pa.array(["x y"] * count)


LATE: dict[str, tuple[Any, Any]] = {
    "string": (pa.string(), WORDS),
    "large string": (pa.large_string(), WORDS),
    "string view": (pa.string_view(), WORDS),
    "binary": (pa.binary(), WORDS.encode()),
    "binary view": (pa.binary_view(), WORDS.encode()),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), WORDS),
    "list": (pa.list_(pa.string()), [WORDS]),
    "list view": (pa.list_view(pa.string()), [WORDS]),
    "fixed list": (pa.list_(pa.string(), 1), [WORDS]),
    "object": (pa.struct({"a": pa.struct({"b": pa.string()})}), {"a": {"b": WORDS}}),
    "map": (pa.map_(pa.string(), pa.string()), [("k", WORDS)]),
    "map of bytes": (pa.map_(pa.string(), pa.binary()), [("k", WORDS.encode())]),
}


@pytest.mark.parametrize("kind", LATE)
def test_text_in_the_last_row_is_refused(tmp_path: Path, kind: str) -> None:
    arrow_type, value = LATE[kind]
    column = pa.array([None] * (ROWS - 1) + [value], arrow_type)
    records = read(tmp_path / "a.parquet", pa.table({"text": texts(), "c": column}))
    invalid = {
        line: str(record)
        for line, record in records
        if isinstance(record, InvalidRecord)
    }
    assert list(invalid) == [ROWS]
    assert "column c: its text is not used" in invalid[ROWS]


def test_images_and_numbers_as_bytes_are_no_text(tmp_path: Path) -> None:
    images = pa.array([b"\x89PNG\r\n\x1a\n\0\0\xff", b"\0\0a b"], pa.binary())
    table = pa.table({"text": texts(2), "picture": images})
    assert [fields for _, fields in read(tmp_path / "a.parquet", table)] == [
        {"text": "x y"}
    ] * 2


def test_text_as_bytes_is_read(tmp_path: Path) -> None:
    table = pa.table({"text": pa.array(["caf\u00e9 au lait".encode()], pa.binary())})
    assert read(tmp_path / "a.parquet", table) == [(1, {"text": "caf\u00e9 au lait"})]


def test_map_with_a_key_twice_is_refused(tmp_path: Path) -> None:
    column = pa.array([[("k", "a"), ("k", "b")]], pa.map_(pa.string(), pa.string()))
    table = pa.table({"text": texts(1), "c": column})
    [(_, record)] = read(tmp_path / "a.parquet", table)
    assert "a map has a key twice" in str(record)


def test_column_twice_is_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays(
        [pa.array(["a"]), pa.array(["b"])], names=["text", "text"]
    )
    with pytest.raises(DataInvalid, match="it has the column text twice"):
        read(tmp_path / "a.parquet", table)


def test_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    read(path, pa.table({"text": texts()}))
    content = bytearray(path.read_bytes())
    content[10:40] = bytes(30)
    path.write_bytes(content)
    with pytest.raises(DataInvalid, match=r"a\.parquet: damaged: "):
        list(read_records(SourceFile(path), "Auto"))


def test_large_rows_are_read_in_small_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_tables, "BATCH_BYTES", 1)
    table = pa.table({"text": texts(5)})
    assert len(read(tmp_path / "a.parquet", table)) == 5
