"""Data sets in four formats, and every defect of a file or a record, with the message for it."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from support.trainer.formats import FORMATS, write_csv
from support.trainer.models import write_jsonl
from support.trainer.prepared import IDENTITY, packed_documents, prepare, prepare_config
from support.trainer.stages import run_to_failure

from finetune_trainer.contract import Environment, ExitCode
from finetune_trainer.data.reading import json_window
from finetune_trainer.data.reading.formats import read_records
from finetune_trainer.data.reading.source_file import SourceFile

CONVERSATION = [
    {"role": "user", "content": 'the "file",\nor?'},
    {"role": "assistant", "content": "a socket"},
]


@pytest.fixture
def model(tokenizer_folder: Path) -> Path:
    return tokenizer_folder


@pytest.mark.parametrize(
    "rows",
    [
        [{"messages": CONVERSATION}, {"messages": CONVERSATION * 2}],
        [
            {"prompt": 'the "file",\nor?', "completion": " é", "more": "x"},
            {"prompt": "", "completion": "b", "more": ""},
        ],
        [{"text": 'the "file",\nor?'}, {"text": "漢🙂"}],
    ],
    ids=["messages", "prompt and completion", "text"],
)
def test_same_records_yield_the_same_rows_in_every_format(
    model: Path,
    environment: Environment,
    manifest_dir: Path,
    rows: list[dict[str, Any]],
) -> None:
    packed = {}
    for extension, write in FORMATS.items():
        write(manifest_dir / f"data.{extension}", rows)
        result = prepare(prepare_config(model, f"data.{extension}"), environment)
        assert result.records == 2
        packed[extension] = packed_documents(environment)
        (environment.stage_dir("prepare", IDENTITY) / "result.json").unlink()

    assert packed["jsonl"] == packed["json"] == packed["csv"] == packed["parquet"]
    assert len(packed["jsonl"]) == 2


def test_format_can_be_set_for_an_unknown_extension(
    model: Path, environment: Environment, manifest_dir: Path
) -> None:
    write_csv(manifest_dir / "data.txt", [{"text": "the file"}])

    assert (
        prepare(prepare_config(model, "data.txt", format="CSV"), environment).records
        == 1
    )


def test_bom_blank_lines_and_carriage_returns_are_ignored(
    model: Path, environment: Environment, manifest_dir: Path
) -> None:
    (manifest_dir / "data.jsonl").write_bytes(
        b'\xef\xbb\xbf{"text": "the file"}\r\n\r\n  \n{"text": "a socket"}\r\n'
    )

    result = prepare(prepare_config(model), environment)
    assert result.records == 2
    assert result.invalid == 0


GOOD = '{"text": "the file"}\n'
BAD_LINES = [
    (
        b'{"text": "the fi\xffle"}',
        "data.jsonl:2: byte 0xff at position 17 is not UTF-8",
    ),
    (
        b'{"text": "half \\ud800"}',
        "data.jsonl:2: text: character 6 is a lone surrogate (\\ud800)",
    ),
    (
        b'{"text": "the file"',
        "data.jsonl:2: not JSON: Expecting ',' delimiter at column 20",
    ),
    (b'["the file"]', "data.jsonl:2: a record is a JSON object {…}, this is a list"),
    (b"null", "data.jsonl:2: a record is a JSON object {…}, this is null"),
    (b"[" * 100_000, "data.jsonl:2: nested too deeply"),
    (b'{"words": "the file"}', "data.jsonl:2: text is missing"),
    (b'{"text": null}', "data.jsonl:2: text is null"),
    (b'{"text": 5}', "data.jsonl:2: text must be a string, it is a number"),
    (b'{"text": " "}', "data.jsonl:2: text is empty: there is nothing to learn"),
    (
        b'{"prompt": "a", "completion": "b"}',
        "data.jsonl:2: has prompt and completion, but earlier records have text: use one shape per data set",
    ),
    (
        b'{"text": "a", "prompt": "a", "completion": "b"}',
        "data.jsonl:2: has prompt and completion and also text: choose with columns: {prompt: prompt, completion:",
    ),
]


@pytest.mark.parametrize(
    ("line", "expected"), BAD_LINES, ids=[expected[14:40] for _, expected in BAD_LINES]
)
def test_invalid_line_is_reported_with_its_reason(
    model: Path,
    environment: Environment,
    manifest_dir: Path,
    line: bytes,
    expected: str,
) -> None:
    (manifest_dir / "data.jsonl").write_bytes(
        GOOD.encode() + line + b"\n" + GOOD.encode()
    )

    message, code = run_to_failure(prepare_config(model), environment)
    assert code == ExitCode.DATA
    assert expected in message
    assert "1 of 3 records are invalid" in message


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "a"}, "completion is missing"),
        ({"prompt": "a", "completion": None}, "completion is null"),
        (
            {"prompt": "a", "completion": ""},
            "completion is empty: there is nothing to learn",
        ),
        (
            {"prompt": ["a"], "completion": "b"},
            "prompt is a list of messages and completion is a string: write completion as",
        ),
        (
            {"input": "a", "output": "b"},
            "needs messages, prompt and completion, or text; it has input, output",
        ),
        ({}, "needs messages, prompt and completion, or text; it has nothing"),
        (
            {"messages": "hello"},
            "messages must be a list of {role, content}, it is a string",
        ),
        ({"messages": []}, "no message has the role assistant (roles: none)"),
        (
            {"messages": ["hello"]},
            "messages[0] must be an object with role and content, it is a string",
        ),
        (
            {"messages": [{"speaker": "gpt", "text": "a"}]},
            "messages[0].role is missing: a message has role and content, or from and value; it has speaker, text",
        ),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content is missing"),
        (
            {"messages": [{"role": "assistant", "content": [1]}]},
            "messages[0].content[0] must be a part such as {type: text, text: …}, it is a number",
        ),
        (
            {"messages": [{"role": "assistant", "content": ""}]},
            "messages[0].content is empty",
        ),
        (
            {"messages": CONVERSATION[:1]},
            "no message has the role assistant (roles: user)",
        ),
    ],
    ids=str,
)
def test_invalid_record_is_reported_with_its_reason(
    model: Path,
    environment: Environment,
    manifest_dir: Path,
    record: dict[str, Any],
    expected: str,
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", [record])

    message, code = run_to_failure(prepare_config(model), environment)
    assert code == ExitCode.DATA
    assert f"data.jsonl:1: {expected}" in message


def test_line_longer_than_the_limit_is_rejected(
    model: Path,
    environment: Environment,
    manifest_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json_window, "LONGEST_RECORD", 1 << 20)
    (manifest_dir / "data.jsonl").write_bytes(GOOD.encode() + b"x" * (1 << 21))
    (manifest_dir / "data.json").write_bytes(b'[{"text": "' + b"x" * (1 << 22))

    message, _ = run_to_failure(prepare_config(model), environment)
    assert "data.jsonl:2: the line is longer than 1 MiB" in message
    message, _ = run_to_failure(prepare_config(model, "data.json"), environment)
    assert "data.json:1: not JSON, or a record longer than 1 MiB" in message


@pytest.mark.parametrize("name", ["jsonl", "json", "csv"])
def test_file_is_streamed_and_not_read_into_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"data.{name}"
    FORMATS[name](
        path, [{"text": f"{number} " + "the file " * 200} for number in range(3000)]
    )
    tracemalloc.start()
    try:
        count = sum(1 for _ in read_records(SourceFile(path), "Auto"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert count == 3000
    assert path.stat().st_size > 5_000_000
    assert peak < 1_000_000


def test_json_records_do_not_depend_on_the_chunk_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"prompt": "é\n" * length, "completion": 10**length} for length in range(12)
    ]
    source = SourceFile(tmp_path / "data.json")
    source.path.write_text(json.dumps(rows, indent=2, ensure_ascii=False))
    in_one_chunk = list(read_records(source, "JSON"))

    for size in range(1, 40):
        monkeypatch.setattr(json_window, "JSON_CHUNK", size)
        assert list(read_records(source, "JSON")) == in_one_chunk
    assert [fields for _, fields in in_one_chunk] == rows
    assert [line for line, _ in in_one_chunk] == [
        2 + 4 * number for number in range(12)
    ]


def bytes_read() -> int:
    """Return the bytes that this process has read."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("name", ["jsonl", "json", "csv"])
def test_source_is_read_once(
    tokenizer_folder: Path, environment: Environment, manifest_dir: Path, name: str
) -> None:
    """Most bytes are in a column that is not used, so that tokenizing takes no time."""
    data = manifest_dir / f"data.{name}"
    row: dict[str, object] = {"text": "the file", "more": "x" * 200_000}
    if name == "csv":
        lines = ["text,more", *[",".join(map(str, row.values()))] * 100]
        data.write_text("".join(f"{line}\n" for line in lines))
    else:
        FORMATS[name](data, [row] * 100)
    config = prepare_config(tokenizer_folder, f"data.{name}", unrendered="Warn")
    before = bytes_read()
    assert prepare(config, environment).records == 100

    size = data.stat().st_size
    assert size < bytes_read() - before < 1.1 * size
