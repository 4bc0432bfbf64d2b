"""Files that hold their records in another way than their name says: they are read, or the cause and the fix named."""

import codecs
import json
from pathlib import Path

import pytest
from support.trainer.prepared import prepare, prepare_config
from support.trainer.stages import run_to_failure

from finetune_trainer.contract import Environment
from finetune_trainer.data.reading.columns import FieldColumns
from finetune_trainer.data.reading.formats import read_records
from finetune_trainer.data.reading.source_file import SourceFile

RECORDS = [
    {"prompt": "the file?", "completion": "a [socket]"},
    {"prompt": 'a "reader"', "completion": "no {way}"},
]
INDENTED = [json.dumps(record, indent=2) for record in RECORDS]
LINES = "\n".join(map(json.dumps, RECORDS))

LAYOUTS = {
    "lines": LINES,
    "lines with blank lines": f"\n\n{LINES}\n\n",
    "array": json.dumps(RECORDS),
    "indented array": json.dumps(RECORDS, indent=2),
    "array, a record a line": "[\n" + ",\n".join(map(json.dumps, RECORDS)) + "\n]\n",
    "indented objects": "\n".join(INDENTED),
    "indented objects with commas": ",\n".join(INDENTED),
    "indented with tabs": "\n".join(json.dumps(row, indent="\t") for row in RECORDS),
    "list in an object": json.dumps({"data": RECORDS}),
    "indented list in an object": json.dumps(
        {"records": RECORDS, "version": 1, "license": "MIT"}, indent=1
    ),
}


@pytest.mark.parametrize("extension", ["jsonl", "json"])
@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8], ids=["", "BOM"])
@pytest.mark.parametrize("text", LAYOUTS.values(), ids=LAYOUTS)
def test_json_is_read_as_the_file_holds_it(
    tmp_path: Path, text: str, mark: bytes, extension: str
) -> None:
    path = tmp_path / f"data.{extension}"
    path.write_bytes(mark + text.encode())
    source = SourceFile(path)
    read = list(read_records(source, "Auto"))
    assert [fields for _, fields in read] == RECORDS
    assert source.bytes_read == path.stat().st_size
    lines = text.splitlines()
    for (line, _), record in zip(read, RECORDS, strict=True):
        assert json.dumps(record["prompt"]) in "\n".join(lines[line - 1 : line + 2])


@pytest.mark.parametrize(
    ("extension", "layout", "notes"),
    [
        ("jsonl", "lines", []),
        ("json", "array", []),
        ("jsonl", "array", ["holds a JSON array, and is read as such"]),
        ("json", "lines", ["holds JSON Lines, and is read as such"]),
        (
            "jsonl",
            "indented objects",
            ["holds JSON objects over several lines, and is read as such"],
        ),
    ],
)
def test_other_layout_is_noted(
    tmp_path: Path, extension: str, layout: str, notes: list[str]
) -> None:
    path = tmp_path / f"data.{extension}"
    path.write_text(LAYOUTS[layout])
    columns = FieldColumns()
    assert len(list(read_records(SourceFile(path), "Auto", columns))) == 2
    assert columns.notes == notes


def test_damaged_first_line_leaves_the_other_lines(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "the fi\n' + LINES)
    read = [fields for _, fields in read_records(SourceFile(path), "Auto")]
    assert read[1:] == RECORDS
    assert str(read[0]).startswith("not JSON")


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("extension", ["csv", "tsv"])
def test_cells_may_have_another_separator(
    tmp_path: Path, separator: str, extension: str
) -> None:
    path = tmp_path / f"data.{extension}"
    rows = [["prompt", "completion", "n"], ['"a, b; c | d"', "x y", "1"]]
    path.write_text("\r\n".join(separator.join(row) for row in rows))
    assert list(read_records(SourceFile(path), "Auto")) == [
        (2, {"prompt": "a, b; c | d", "completion": "x y"})
    ]


FILES: list[tuple[str, bytes, str]] = [
    (
        "data.jsonl",
        LINES.encode("utf-16"),
        "data.jsonl: the file is UTF-16 or binary: save it as UTF-8, for example with: iconv -f UTF-16 -t UTF-8",
    ),
    ("data.csv", "text\na b\n".encode("utf-16-le"), "data.csv: the file is UTF-16"),
    (
        "data.jsonl",
        '{"text": "café au"}\n'.encode("latin-1"),
        "data.jsonl:1: byte 0xe9 at position 14 is not UTF-8: save the file as UTF-8, for example with iconv -f LATIN1",
    ),
    ("data.jsonl", b"PAR1\x15\x04", "the file is Parquet: set the data set's format"),
    ("data.jsonl", b"\x1f\x8b\x08\0", "compressed by gzip: add .gz to its name"),
    (
        "data.csv",
        b"PK\x03\x04",
        "a ZIP archive or a spreadsheet: save its table as CSV",
    ),
    (
        "data.jsonl",
        b"version https://git-lfs.github.com/spec/v1\n",
        "a pointer of Git LFS: run git lfs pull",
    ),
    (
        "data.txt",
        b"the file\n",
        '.txt is plain text: write {"text": "…"} for each document, one a line',
    ),
    (
        "data.jsonl",
        b"the file\na socket\n",
        '2 \N{MULTIPLICATION SIGN}: not JSON: Expecting value at column 1: for plain text write {"text": "…"}',
    ),
    (
        "data.jsonl",
        b'[{"role": "user", "content": "a"}]\n[{"role": "user", "content": "b"}]\n',
        'this is a list: write {"messages": […]}',
    ),
    (
        "data.json",
        json.dumps({"train": RECORDS, "test": RECORDS}).encode(),
        "data.json:1: the file has test beside its list of records: write this list alone into the file",
    ),
    (
        "data.json",
        json.dumps({"version": "1", "data": RECORDS}).encode(),
        "if data is the list of records, write this list alone into the file",
    ),
    (
        "data.json",
        json.dumps({"data": RECORDS}).encode() + b"\n{}",
        "something follows the object with the list of records",
    ),
    (
        "data.csv",
        b"text,text\na,b\n",
        "names the column text twice: rename one of them",
    ),
    ("data.csv", b'"text\n', "data.csv:1: not CSV: unexpected end of data"),
    (
        "data.csv",
        b"prompt,completion\na,b,c\n",
        "3 cells, but the header names 2: quote cells that hold the separator",
    ),
]


@pytest.mark.parametrize(
    ("name", "content", "expected"), FILES, ids=[text[:40] for _, _, text in FILES]
)
def test_file_that_cannot_be_read_names_cause_and_fix(
    *,
    environment: Environment,
    manifest_dir: Path,
    tokenizer_folder: Path,
    name: str,
    content: bytes,
    expected: str,
) -> None:
    (manifest_dir / name).write_bytes(content)
    message, _ = run_to_failure(prepare_config(tokenizer_folder, name), environment)
    assert expected in message


def test_compressed_file_shows_its_layout_too(
    environment: Environment, manifest_dir: Path, tokenizer_folder: Path
) -> None:
    import gzip  # noqa: PLC0415  for this test only

    text = json.dumps(RECORDS * 500, indent=2)
    (manifest_dir / "data.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    config = prepare_config(tokenizer_folder, "data.jsonl.gz")
    assert prepare(config, environment).records == 1000
