"""The stage prepare with data sets whose columns have other names than the fields of records."""

from pathlib import Path
from typing import Any

import pytest
from support.trainer.formats import FORMATS, write_parquet
from support.trainer.models import write_jsonl
from support.trainer.prepared import (
    make_tokenizer,
    packed_documents,
    prepare,
    prepare_again,
    prepare_config,
)
from support.trainer.stages import run_to_failure

from finetune_trainer.contract import Environment, ExitCode

CHAT = [
    {"role": "user", "content": "the file?"},
    {"role": "assistant", "content": "a socket"},
]


@pytest.fixture
def model(tokenizer_folder: Path) -> Path:
    return tokenizer_folder


@pytest.mark.parametrize("extension", FORMATS)
@pytest.mark.parametrize(
    ("columns", "named", "plain"),
    [
        (
            {"prompt": "instruction", "completion": "output"},
            {"instruction": "a", "output": " b", "text": "c", "prompt": "d"},
            {"prompt": "a", "completion": " b"},
        ),
        (
            {"completion": "answer"},
            {"prompt": "a", "answer": " b"},
            {"prompt": "a", "completion": " b"},
        ),
        ({"text": "body text"}, {"body text": "a", "messages": "x"}, {"text": "a"}),
        ({"messages": "chat"}, {"chat": CHAT, "text": "x"}, {"messages": CHAT}),
    ],
    ids=["both", "one", "text", "messages"],
)
def test_columns_are_read_as_the_fields(
    *,
    model: Path,
    environment: Environment,
    manifest_dir: Path,
    extension: str,
    columns: dict[str, str],
    named: dict[str, Any],
    plain: dict[str, Any],
) -> None:
    FORMATS[extension](manifest_dir / f"named.{extension}", [named])
    FORMATS[extension](manifest_dir / f"plain.{extension}", [plain])
    prepare(prepare_config(model, f"named.{extension}", columns=columns), environment)
    of_named = packed_documents(environment)
    prepare_again(prepare_config(model, f"plain.{extension}"), environment)
    assert of_named == packed_documents(environment)


@pytest.mark.parametrize("extension", ["jsonl", "json", "parquet"])
def test_dot_leads_into_an_object_unless_a_column_has_it(
    model: Path, environment: Environment, manifest_dir: Path, extension: str
) -> None:
    for row in (
        {"answer": {"text": "a socket", "more": 1}},
        {"answer.text": "a socket", "answer": {"text": "x"}},
    ):
        FORMATS[extension](manifest_dir / f"data.{extension}", [row])
        prepare_again(
            prepare_config(model, f"data.{extension}", columns={"text": "answer.text"}),
            environment,
        )
        of_named = packed_documents(environment)
        write_jsonl(manifest_dir / "plain.jsonl", [{"text": "a socket"}])
        prepare_again(prepare_config(model, "plain.jsonl"), environment)
        assert of_named == packed_documents(environment)


@pytest.mark.parametrize(
    ("extension", "expected"),
    [
        (
            "jsonl",
            "data.jsonl:1: has no column label for completion; its columns are prompt, answer",
        ),
        (
            "json",
            "data.json:2: has no column label for completion; its columns are prompt, answer",
        ),
        (
            "csv",
            "it has no column label, which the manifest names under columns; it has prompt, answer",
        ),
        (
            "parquet",
            "data.parquet: has no column label, which the manifest names under columns; it has prompt, answer",
        ),
    ],
)
def test_missing_column_is_named_with_those_there_are(
    *,
    model: Path,
    environment: Environment,
    manifest_dir: Path,
    extension: str,
    expected: str,
) -> None:
    FORMATS[extension](
        manifest_dir / f"data.{extension}", [{"prompt": "a", "answer": "b"}]
    )
    message, code = run_to_failure(
        prepare_config(model, f"data.{extension}", columns={"completion": "label"}),
        environment,
    )
    assert code == ExitCode.DATA
    assert expected in message


def test_tools_have_a_column_of_their_own(
    tmp_path: Path, environment: Environment, manifest_dir: Path
) -> None:
    make_tokenizer(
        tmp_path / "model",
        chat_template="{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    tools = [{"type": "function", "function": {"name": "add"}}]
    write_jsonl(
        manifest_dir / "named.jsonl",
        [{"chat": CHAT, "functions": tools}, {"chat": CHAT}],
    )
    write_jsonl(
        manifest_dir / "plain.jsonl",
        [{"messages": CHAT, "tools": tools}, {"messages": CHAT}],
    )
    columns = {"messages": "chat", "tools": "functions"}
    write_parquet(manifest_dir / "data.parquet", [{"chat": CHAT}])
    message, _ = run_to_failure(
        prepare_config(tmp_path / "model", "data.parquet", columns=columns), environment
    )
    assert "has no column functions" in message

    prepare(
        prepare_config(
            tmp_path / "model", "named.jsonl", columns=columns, context_length=256
        ),
        environment,
    )
    of_named = packed_documents(environment)
    prepare_again(
        prepare_config(tmp_path / "model", "plain.jsonl", context_length=256),
        environment,
    )
    assert of_named == packed_documents(environment)
    assert len({tuple(tokens) for tokens, _ in of_named}) == 2
