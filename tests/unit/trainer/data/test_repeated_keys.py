"""An object with a key twice, and an integer that Python does not read: named by their lines."""

import json
from pathlib import Path

import pytest

from finetune_trainer.data.reading.formats import read_records
from finetune_trainer.data.reading.source_file import SourceFile
from finetune_trainer.data.records.records import InvalidRecord

GOOD = {"prompt": "a", "completion": "b"}
CALL = '{"name": "f", "arguments": {"a": 1, "a": 2}}'


def reasons(path: Path, content: str) -> dict[int, str]:
    """Return the reason of each invalid record by its line."""
    path.write_text(content)
    return {
        line: str(record)
        for line, record in read_records(SourceFile(path), "Auto")
        if isinstance(record, InvalidRecord)
    }


@pytest.mark.parametrize(
    ("name", "content", "line", "key"),
    [
        ("a.jsonl", f'{json.dumps(GOOD)}\n{{"text": "a", "text": "b"}}\n', 2, "text"),
        (
            "a.jsonl",
            '{"messages": [{"role": "user", "content": "a", "content": "b"}]}\n',
            1,
            "content",
        ),
        ("a.json", f'[\n{json.dumps(GOOD)},\n{{"x": {{"y": 1, "y": 1}}}}]', 3, "y"),
        ("a.json", '{\n "text": "a",\n "text": "b"\n}\n', 1, "text"),
        ("a.json", '{"data": [{"text": "a", "text": "b"}]}', 1, "text"),
        (
            "a.jsonl",
            json.dumps({"conversations": [{"from": "function_call", "value": CALL}]}),
            1,
            "a",
        ),
    ],
)
def test_key_twice_is_refused_with_line_and_key(
    tmp_path: Path, name: str, content: str, line: int, key: str
) -> None:
    by_line = reasons(tmp_path / name, content)
    assert list(by_line) == [line]
    assert (
        f"an object has the key {key} twice, so a value would be lost" in by_line[line]
    )


def test_records_behind_a_key_twice_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a", "text": "b"}, {"text": "c"}]')
    [_, (_, record)] = read_records(SourceFile(path), "Auto")
    assert record == {"text": "c"}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_endless_integer_is_refused_in_our_words(tmp_path: Path, name: str) -> None:
    text = f'{{"text": "a", "n": {"9" * 5000}}}\n'
    by_line = reasons(tmp_path / name, text)
    assert by_line == {1: "an integer has more than 4,300 digits: write it as a text"}


def test_table_with_carriage_returns_alone_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"prompt,completion\ra,b\rc,d\r")
    [_, (_, record)] = read_records(SourceFile(path), "Auto")
    assert record == {"prompt": "c", "completion": "d"}


def test_columns_without_a_name_are_kept_apart(tmp_path: Path) -> None:
    by_line = reasons(tmp_path / "a.csv", "text,,\na,some words,5\n")
    assert "column column 2: its text is not used" in by_line[2]
