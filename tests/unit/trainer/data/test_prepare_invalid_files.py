"""Files that are no data set, and records that may be left out."""

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from support.trainer.formats import write_parquet
from support.trainer.models import write_jsonl
from support.trainer.prepared import packed_documents, prepare, prepare_config
from support.trainer.stages import run_to_failure

from finetune_trainer.contract import Environment, ExitCode


@pytest.fixture
def model(tokenizer_folder: Path) -> Path:
    return tokenizer_folder


BAD_FILES = [
    (
        "data.jsonl",
        b"",
        "data.jsonl has no records; add records or correct datasets[0].uri",
    ),
    ("data.json", b"", "data.json has no records"),
    ("data.json", b" [ ] ", "data.json has no records"),
    ("data.csv", b"", "data.csv has no records"),
    ("data.csv", b"text\n", "data.csv has no records"),
    (
        "data.csv",
        b"the file,a socket\nx,y\n",
        "data.csv:1: the first line must name the columns",
    ),
    (
        "data.csv",
        b"texte;more\nx;y\n",
        "it has more, texte: write columns: {text: texte}",
    ),
    ("data.csv", b"text,more\na,b\nc\n", "data.csv:3: 1 cells, but the header names 2"),
    ("data.csv", b'text\n"a\nb"\n"c\n', "data.csv:4: not CSV: unexpected end of data"),
    (
        "data.csv",
        b"text\nthe fi\xe9le\n",
        "data.csv:2: text: character 7 is byte 0xe9, not UTF-8: save the file as UTF-8",
    ),
    ("data.csv", b"messages\n[oops\n", "data.csv:2: messages is not JSON"),
    (
        "data.json",
        b'[\n{"text": "a"},\n{"text": }\n]',
        "data.json:3: not JSON: Expecting value",
    ),
    (
        "data.json",
        b'[{"text": "a"}\n{"text": "b"}]',
        "data.json:2: not JSON: expected , and found {",
    ),
    ("data.json", b'[{"text": "a"},\n', "data.json:2: not JSON: Expecting value"),
    (
        "data.json",
        b'[{"text": "a"}]\n[{"text": "b"}]',
        "a record is a JSON object {…}, this is a list: put all into one array; first data.json:1, data.json:2",
    ),
    (
        "data.json",
        b'[\n{"text": "a"},\n12,\n"b"]',
        "data.json:3: a record is a JSON object {…}, this is a number",
    ),
    (
        "data.json",
        b'[{"text": "a"},\n{"text": "\xff"}]',
        "data.json:2: text: character 1 is byte 0xff, not UTF-8",
    ),
    ("data.parquet", b"PAR?", "data.parquet: not Parquet"),
    (
        "data.xlsx",
        b"",
        "data.xlsx: .xlsx is a spreadsheet: save its table as CSV",
    ),
    ("data", b"", "unknown file extension (none)"),
    ("data.jsonl.bz2", b"", "compressed files must be unpacked, except .gz and .zst"),
    ("data.parquet.gz", b"", "compressed Parquet files must be unpacked"),
    ("data.jsonl.gz", b"plain text", "data.jsonl.gz: not gzip, or damaged: "),
    ("data.csv.zst", b"plain text", "data.csv.zst: not zstd, or damaged: "),
]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    BAD_FILES,
    ids=[message[:45] for _, _, message in BAD_FILES],
)
def test_invalid_file_is_reported_with_the_location(
    model: Path, environment: Environment, name: str, content: bytes, expected: str
) -> None:
    assert environment.manifest_dir
    (environment.manifest_dir / name).write_bytes(content)

    message, code = run_to_failure(prepare_config(model, name), environment)
    assert code == (
        ExitCode.CONFIG
        if re.search("extension|unpacked|spreadsheet", expected)
        else ExitCode.DATA
    )
    assert expected in message


def test_parquet_file_without_the_columns_is_rejected(
    model: Path, environment: Environment, manifest_dir: Path
) -> None:
    write_parquet(manifest_dir / "data.parquet", [{"words": "a"}])

    message, _ = run_to_failure(prepare_config(model, "data.parquet"), environment)
    assert "needs messages, prompt and completion, or text; it has words" in message


def test_invalid_parquet_row_is_reported_with_its_number(
    model: Path, environment: Environment, manifest_dir: Path
) -> None:
    texts = pa.array([b"the file", b"\xff", b"a socket", None]).view(pa.string())
    parquet.write_table(pa.table({"text": texts}), manifest_dir / "data.parquet")

    message, code = run_to_failure(prepare_config(model, "data.parquet"), environment)
    assert code == ExitCode.DATA
    assert (
        "data.parquet:2: holds bytes that are not UTF-8\ndata.parquet:4: text is null"
        in message
    )


def test_folder_is_rejected_as_a_data_set(
    model: Path, environment: Environment, manifest_dir: Path
) -> None:
    (manifest_dir / "data").mkdir()

    message, code = run_to_failure(prepare_config(model, "data"), environment)
    assert code == ExitCode.CONFIG
    assert (
        "data is a folder: name a file in it, or several by a pattern such as data/*.jsonl"
        in message
    )


def test_failure_names_each_reason_once_with_a_count(
    model: Path, environment: Environment, manifest_dir: Path
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", [{"text": "good"}] + [{"x" * 300: 1}] * 50)

    message, _ = run_to_failure(prepare_config(model), environment)
    assert message.splitlines()[0].startswith(
        "50 of 51 records are invalid, more than prepare.maxInvalidFraction (0)"
    )
    assert message.splitlines()[1:] == [
        "50 \N{MULTIPLICATION SIGN}: text is missing; first data.jsonl:2, data.jsonl:3, data.jsonl:4"
    ]


def test_failure_names_at_most_ten_reasons(
    model: Path, environment: Environment, manifest_dir: Path
) -> None:
    texts = ["good", *(f"\ud800{'a' * number}"[::-1] for number in range(50))]
    write_jsonl(manifest_dir / "data.jsonl", [{"text": text} for text in texts])

    message, _ = run_to_failure(prepare_config(model), environment)
    assert [line.split(": ")[0] for line in message.splitlines()[1:]] == [
        f"data.jsonl:{number}" for number in range(2, 12)
    ]
    assert len(message.encode()) < 2048


def test_invalid_records_within_limit_are_counted_and_skipped(
    model: Path,
    environment: Environment,
    manifest_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", [{"text": "good"}] * 3 + [{"text": 1}])

    result = prepare(prepare_config(model, max_invalid_fraction=0.25), environment)
    assert result.records == 4
    assert result.invalid == 1
    assert len(packed_documents(environment)) == 3
    assert (
        "data.jsonl:4: text must be a string, it is a number" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"too_long": "Drop", "context_length": 16},
            "2 records are longer than prepare.contextLength (16); raise it",
        ),
        (
            {"validation_fraction": 0.5, "seed": 10},
            "all valid records are in the validation split",
        ),
    ],
)
def test_data_set_without_training_rows_is_rejected(
    model: Path,
    environment: Environment,
    manifest_dir: Path,
    changes: dict[str, Any],
    expected: str,
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", [{"text": "the file number " * 20}] * 2)

    message, code = run_to_failure(prepare_config(model, **changes), environment)
    assert code == ExitCode.DATA
    assert f"no training rows: {expected}" in message
