"""Data as it comes: four formats, and all that can be wrong with them, each said in words that help."""

import csv
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from support.models import write_jsonl
from support.prepared import IDENTITY, packed_documents, prepare, prepare_config
from support.stages import refusal

from finetune_trainer.contract import Environment, ExitCode
from finetune_trainer.data import records
from finetune_trainer.data.records import read_records

Write = Callable[[Path, list[dict[str, Any]]], object]


def write_json(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(rows, indent=1))


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        for row in rows:
            table.writerow({name: cell if isinstance(cell, str) else json.dumps(cell) for name, cell in row.items()})


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    parquet.write_table(pa.Table.from_pylist(rows), path)


FORMATS: dict[str, Write] = {"jsonl": write_jsonl, "json": write_json, "csv": write_csv, "parquet": write_parquet}
CONVERSATION = [{"role": "user", "content": 'the "file",\nor?'}, {"role": "assistant", "content": "a socket"}]


@pytest.fixture
def model(tokenizer_folder: Path) -> Path:
    return tokenizer_folder


@pytest.mark.parametrize(
    "rows",
    [
        [{"messages": CONVERSATION}, {"messages": CONVERSATION[::-1]}],
        [
            {"prompt": 'the "file",\nor?', "completion": " é", "more": "x"},
            {"prompt": "", "completion": "b", "more": ""},
        ],
        [{"text": 'the "file",\nor?'}, {"text": "漢🙂"}],
    ],
    ids=["messages", "prompt and completion", "text"],
)
def test_the_same_records_give_the_same_rows_in_every_format(
    model: Path, environment: Environment, here: Path, rows: list[dict[str, Any]]
) -> None:
    found = {}
    for form, write in FORMATS.items():
        write(here / f"data.{form}", rows)
        result = prepare(prepare_config(model, f"data.{form}"), environment)
        assert result.records == 2
        found[form] = packed_documents(environment)
        (environment.stage_dir("prepare", IDENTITY) / "result.json").unlink()

    assert found["jsonl"] == found["json"] == found["csv"] == found["parquet"]
    assert len(found["jsonl"]) == 2


def test_the_format_can_be_said_where_the_ending_does_not(model: Path, environment: Environment, here: Path) -> None:
    write_csv(here / "data.txt", [{"text": "the file"}])

    assert prepare(prepare_config(model, "data.txt", format="csv"), environment).records == 1


def test_byte_order_marks_blank_lines_and_carriage_returns_are_no_records(
    model: Path, environment: Environment, here: Path
) -> None:
    (here / "data.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "the file"}\r\n\r\n  \n{"text": "a socket"}\r\n')

    result = prepare(prepare_config(model), environment)
    assert (result.records, result.invalid) == (2, 0)


GOOD = '{"text": "the file"}\n'
BAD_LINES = [
    (b'{"text": "the fi\xffle"}', "data.jsonl:2: byte 0xff at position 17 is not UTF-8"),
    (b'{"text": "half \\ud800"}', "data.jsonl:2: text: character 6 is a lone surrogate (\\ud800)"),
    (b'{"text": "the file"', "data.jsonl:2: not JSON: Expecting ',' delimiter at column 20"),
    (b'["the file"]', "data.jsonl:2: a record is a JSON object {…}, this is a list"),
    (b"null", "data.jsonl:2: a record is a JSON object {…}, this is null"),
    (b"[" * 100_000, "data.jsonl:2: nested too deeply"),
    (b'{"words": "the file"}', "data.jsonl:2: text is missing"),
    (b'{"text": null}', "data.jsonl:2: text is null"),
    (b'{"text": 5}', "data.jsonl:2: text must be a string, it is a number"),
    (b'{"text": " "}', "data.jsonl:2: text is empty: there is nothing to learn"),
    (
        b'{"prompt": "a", "completion": "b"}',
        "data.jsonl:2: has prompt and completion where earlier records have text: use one shape per file",
    ),
    (
        b'{"text": "a", "prompt": "a", "completion": "b"}',
        "data.jsonl:2: has prompt and completion and also text: keep only one of them in the file",
    ),
]


@pytest.mark.parametrize(("line", "words"), BAD_LINES, ids=[words[14:40] for _, words in BAD_LINES])
def test_a_bad_line_is_named_with_its_reason(
    model: Path, environment: Environment, here: Path, line: bytes, words: str
) -> None:
    (here / "data.jsonl").write_bytes(GOOD.encode() + line + b"\n" + GOOD.encode())

    message, code = refusal(prepare_config(model), environment)
    assert code == ExitCode.DATA
    assert words in message
    assert "1 of 3 records are invalid" in message


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "a"}, "completion is missing"),
        ({"prompt": "a", "completion": None}, "completion is null"),
        ({"prompt": "a", "completion": ""}, "completion is empty: there is nothing to learn"),
        ({"prompt": ["a"], "completion": "b"}, "prompt must be a string, it is a list"),
        ({"input": "a", "output": "b"}, "needs messages, prompt and completion, or text; it has input, output"),
        ({}, "needs messages, prompt and completion, or text; it has nothing"),
        ({"messages": "hello"}, "messages must be a list of {role, content}, it is a string"),
        ({"messages": []}, "no message has the role assistant (roles: none)"),
        ({"messages": ["hello"]}, "messages[0] must be an object with role and content, it is a string"),
        ({"messages": [{"from": "gpt", "value": "a"}]}, "messages[0].role is missing"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content is missing"),
        ({"messages": [{"role": "assistant", "content": [1]}]}, "messages[0].content must be a string, it is a list"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages[0].content is empty"),
        ({"messages": CONVERSATION[:1]}, "no message has the role assistant (roles: user)"),
    ],
    ids=str,
)
def test_a_record_that_is_no_record_says_what_it_lacks(
    model: Path, environment: Environment, here: Path, record: dict[str, Any], words: str
) -> None:
    write_jsonl(here / "data.jsonl", [record])

    message, code = refusal(prepare_config(model), environment)
    assert code == ExitCode.DATA
    assert f"data.jsonl:1: {words}" in message


WHOLE_FILES = [
    ("data.jsonl", b"", "data.jsonl has no records; add records or correct dataset.uri"),
    ("data.json", b"", "data.json has no records"),
    ("data.json", b" [ ] ", "data.json has no records"),
    ("data.csv", b"", "data.csv has no records"),
    ("data.csv", b"text\n", "data.csv has no records"),
    ("data.csv", b"the file,a socket\nx,y\n", "data.csv:1: the first line must name the columns"),
    ("data.csv", b"text;more\nx;y\n", "separated by commas); found text;more"),
    ("data.csv", b"text,more\na,b\nc\n", "data.csv:3: 1 cells where the header names 2"),
    ("data.csv", b'text\n"a\nb"\n"c\n', "data.csv:4: not CSV: unexpected end of data"),
    (
        "data.csv",
        b"text\nthe fi\xe9le\n",
        "data.csv:2: text: character 7 is byte 0xe9, not UTF-8: save the file as UTF-8",
    ),
    ("data.csv", b"messages\n[oops\n", "data.csv:2: messages is not JSON"),
    ("data.json", b'{"text": "a"}', "data.json:1: the file begins with {, not with ["),
    ("data.json", b'[\n{"text": "a"},\n{"text": }\n]', "data.json:3: not JSON: Expecting value"),
    ("data.json", b'[{"text": "a"}\n{"text": "b"}]', "data.json:2: not JSON: expected , and found {"),
    ("data.json", b'[{"text": "a"},\n', "data.json:2: not JSON: Expecting value"),
    ("data.json", b'[\n{"text": "a"},\n12,\n"b"]', "data.json:3: a record is a JSON object {…}, this is a number"),
    ("data.json", b'[{"text": "a"},\n{"text": "\xff"}]', "data.json:2: text: character 1 is byte 0xff, not UTF-8"),
    ("data.parquet", b"PAR?", "data.parquet: not Parquet"),
    (
        "data.xlsx",
        b"",
        "unknown file extension .xlsx: set dataset.format to jsonl, json, csv or parquet",
    ),
    ("data", b"", "unknown file extension (none)"),
    ("data.jsonl.gz", b"", "compressed files must be unpacked"),
]


@pytest.mark.parametrize(("name", "content", "words"), WHOLE_FILES, ids=[words[:45] for _, _, words in WHOLE_FILES])
def test_what_is_wrong_with_a_file_is_said_with_the_place(
    model: Path, environment: Environment, name: str, content: bytes, words: str
) -> None:
    assert environment.manifest_dir
    (environment.manifest_dir / name).write_bytes(content)

    message, code = refusal(prepare_config(model, name), environment)
    assert code == (ExitCode.CONFIG if "extension" in words or "compressed" in words else ExitCode.DATA)
    assert words in message


def test_a_parquet_file_without_the_columns_says_which_it_has(
    model: Path, environment: Environment, here: Path
) -> None:
    write_parquet(here / "data.parquet", [{"words": "a"}])

    message, _ = refusal(prepare_config(model, "data.parquet"), environment)
    assert "needs the columns messages, prompt and completion, or text; it has words" in message


def test_a_bad_parquet_row_is_named_by_its_number(model: Path, environment: Environment, here: Path) -> None:
    texts = pa.array([b"the file", b"\xff", b"a socket", None]).view(pa.string())
    parquet.write_table(pa.table({"text": texts}), here / "data.parquet")

    message, code = refusal(prepare_config(model, "data.parquet"), environment)
    assert code == ExitCode.DATA
    assert "data.parquet:2: holds bytes that are not UTF-8\ndata.parquet:4: text is null" in message


def test_a_folder_is_no_data_set(model: Path, environment: Environment, here: Path) -> None:
    (here / "data").mkdir()

    message, code = refusal(prepare_config(model, "data"), environment)
    assert code == ExitCode.CONFIG
    assert "is a folder: set dataset.uri to one file in it" in message


def test_ten_of_many_bad_records_are_named_and_fit_the_termination_message(
    model: Path, environment: Environment, here: Path
) -> None:
    write_jsonl(here / "data.jsonl", [{"text": "good"}] + [{"x" * 300: 1}] * 50)

    message, _ = refusal(prepare_config(model), environment)
    assert message.splitlines()[0].startswith("50 of 51 records are invalid, more than dataset.maxInvalidFraction (0)")
    assert [line.split(": ")[0] for line in message.splitlines()[1:]] == [f"data.jsonl:{n}" for n in range(2, 12)]
    assert len(message.encode()) < 2048


def test_as_many_bad_records_as_allowed_are_counted_and_left_out(
    model: Path, environment: Environment, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(here / "data.jsonl", [{"text": "good"}] * 3 + [{"text": 1}])

    result = prepare(prepare_config(model, max_invalid_fraction=0.25), environment)
    assert (result.records, result.invalid) == (4, 1)
    assert len(packed_documents(environment)) == 3
    assert "data.jsonl:4: text must be a string, it is a number" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"too_long": "drop", "context_length": 16}, "2 records are longer than prepare.contextLength (16); raise it"),
        ({"validation_fraction": 0.5, "seed": 10}, "all valid records are in the validation split"),
    ],
)
def test_where_nothing_to_train_on_is_left_the_reason_is_said(
    model: Path, environment: Environment, here: Path, changes: dict[str, Any], words: str
) -> None:
    write_jsonl(here / "data.jsonl", [{"text": "the file number " * 20}] * 2)

    message, code = refusal(prepare_config(model, **changes), environment)
    assert code == ExitCode.DATA
    assert f"no training rows: {words}" in message


def test_a_line_without_end_does_not_fill_the_memory(
    model: Path, environment: Environment, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "LONGEST_RECORD", 1 << 20)
    (here / "data.jsonl").write_bytes(GOOD.encode() + b"x" * (1 << 21))
    (here / "data.json").write_bytes(b'[{"text": "' + b"x" * (1 << 22))

    message, _ = refusal(prepare_config(model), environment)
    assert "data.jsonl:2: the line is longer than 1 MiB" in message
    message, _ = refusal(prepare_config(model, "data.json"), environment)
    assert "data.json:1: not JSON, or a record longer than 1 MiB" in message


@pytest.mark.parametrize("form", ["jsonl", "json", "csv"])
def test_a_file_is_read_without_being_held(tmp_path: Path, form: Any) -> None:
    path = tmp_path / f"data.{form}"
    FORMATS[form](path, [{"text": f"{number} " + "the file " * 200} for number in range(3000)])
    tracemalloc.start()
    try:
        count = sum(1 for _ in read_records(path, form))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert count == 3000
    assert path.stat().st_size > 5_000_000
    assert peak < 1_000_000


def test_json_records_are_whole_wherever_the_chunks_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": "é\n" * length, "n": 10**length} for length in range(12)]
    (tmp_path / "data.json").write_text(json.dumps(rows, indent=2, ensure_ascii=False))
    whole = list(read_records(tmp_path / "data.json", "json"))

    for size in range(1, 40):
        monkeypatch.setattr(records, "JSON_CHUNK", size)
        assert list(read_records(tmp_path / "data.json", "json")) == whole
    assert [fields for _, fields in whole] == rows
    assert [line for line, _ in whole] == [2 + 4 * number for number in range(12)]
