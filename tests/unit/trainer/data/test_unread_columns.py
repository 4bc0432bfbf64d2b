"""Columns that no field reads: a text in them makes a record invalid, or is counted."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.trainer.formats import FORMATS, write_parquet
from support.trainer.models import write_jsonl
from support.trainer.prepared import packed_documents, prepare, prepare_config
from support.trainer.stages import run_to_failure

from finetune_trainer.contract import Columns, Environment, ExitCode
from finetune_trainer.data.reading.columns import FieldColumns
from finetune_trainer.data.reading.formats import read_records
from finetune_trainer.data.reading.source_file import SourceFile
from finetune_trainer.data.reading.unread import PartlyRead
from finetune_trainer.data.records.records import InvalidRecord

ALPACA = {"instruction": "the file?", "input": "some reader", "output": "a socket"}
COLUMNS = {"prompt": "instruction", "completion": "output"}
MESSAGES = [
    {"role": "user", "content": "the file,\nor?"},
    {"role": "assistant", "content": "a socket"},
]


@pytest.mark.parametrize("extension", FORMATS)
def test_column_with_text_is_refused_by_name(
    environment: Environment, manifest_dir: Path, tokenizer_folder: Path, extension: str
) -> None:
    FORMATS[extension](manifest_dir / f"data.{extension}", [ALPACA] * 4)
    config = prepare_config(tokenizer_folder, f"data.{extension}", columns=COLUMNS)
    message, code = run_to_failure(config, environment)
    assert code == ExitCode.DATA
    [_, line] = message.splitlines()
    assert line.startswith(
        "4 \N{MULTIPLICATION SIGN}: column input: its text is not used: write columns: "
        '{prompt: "{{ instruction }}\\n\\n{{ input }}", completion: output}, '
        "or leave it out with columns: {ignored: [input]}; first data."
    )


@pytest.mark.parametrize("extension", FORMATS)
def test_allowed_column_with_text_is_counted_and_named(
    *,
    environment: Environment,
    manifest_dir: Path,
    tokenizer_folder: Path,
    capsys: pytest.CaptureFixture[str],
    extension: str,
) -> None:
    records = [ALPACA | {"id": f"row-{number}"} for number in range(4)]
    records[2]["input"] = ""
    FORMATS[extension](manifest_dir / f"data.{extension}", records)
    config = prepare_config(
        tokenizer_folder, f"data.{extension}", columns=COLUMNS, unrendered="Warn"
    )
    result = prepare(config, environment)
    assert result.unrendered == 3
    assert result.invalid == 0
    assert result.records == 4
    assert len(packed_documents(environment)) == 4
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "columns" in line] == [
        f"prepare: data.{extension}: columns with a text that is not used, as prepare.unrendered allows: input",
        f"prepare: data.{extension}: columns that are not read: id",
    ]


@pytest.mark.parametrize(
    "value",
    [
        "web",
        "row-12/a:b.c",
        "2024-01-31",
        "2024-01-31 10:00:00",
        "https://example.com/a?b=c&d=e#f",
        "",
        5,
        1.5,
        True,
        None,
        ["a", "b"],
        {"a": {"b": ["c"]}},
        "the file, or?",
        ["a socket", "the file,\n\nor?"],
    ],
    ids=str,
)
def test_label_and_repeated_text_may_stay_unread(value: Any) -> None:
    record = {"messages": MESSAGES, "more": value}
    assert FieldColumns().select(record) == {"messages": MESSAGES}


@pytest.mark.parametrize(
    "value",
    [
        "some words",
        "漢字",
        ["a", "some words"],
        {"a": {"b": ["some words"]}},
        "x" * 201,
    ],
    ids=str,
)
def test_text_in_any_depth_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRecord, match="column more: its text is not used: leave"):
        FieldColumns().select({"messages": MESSAGES, "more": value})


def test_several_columns_are_named_together() -> None:
    record = {"prompt": "a", "completion": "b", "system": "Be old.", "body text": "c d"}
    with pytest.raises(InvalidRecord) as raised:
        FieldColumns().select(record)
    assert str(raised.value) == (
        "columns system, body text: their text is not used: write columns: "
        "{prompt: \"{{ system }}\\n\\n{{ prompt }}\\n\\n{{ record['body text'] }}\"}, "
        "or leave it out with columns: {ignored: [system, body text]}"
    )


@pytest.mark.parametrize(
    ("record", "columns", "fix"),
    [
        ({"messages": MESSAGES}, None, "{system: system_message}"),
        ({"conversations": MESSAGES}, None, "{system: system_message, messages: conversations}"),
        ({"instruction": "a", "output": "b"}, None, "{system: system_message, instruction: instruction}"),
        ({"chat": MESSAGES}, {"messages": "chat"}, "{system: system_message, messages: chat}"),
        ({"q": "a", "output": "b"}, {"instruction": "q"}, "{system: system_message, instruction: q, output: output}"),
    ],
    ids=["messages", "ShareGPT", "Alpaca", "named messages", "named Alpaca"],
)  # fmt: skip
@pytest.mark.parametrize("text", ["Be kind.", "Kindly"])
def test_system_message_under_another_name_has_its_line(
    record: dict[str, Any], columns: dict[str, str] | None, *, fix: str, text: str
) -> None:
    record = {**record, "system_message": text}
    named = Columns.model_validate(columns) if columns else None
    with pytest.raises(InvalidRecord) as raised:
        FieldColumns(named).select(record)
    assert f"write columns: {fix}, or leave it out" in str(raised.value)
    read = Columns.model_validate(yaml.safe_load(fix))
    [first, *_] = FieldColumns(read).select(record)["messages"]
    assert first == {"role": "system", "content": text}


@pytest.mark.parametrize("column", ["mask_history", "train_on_inputs"])
def test_column_that_asks_for_other_turns_is_refused(column: str) -> None:
    record = {"messages": MESSAGES, column: True}
    with pytest.raises(InvalidRecord, match=f"{column} is true, but all turns of the"):
        FieldColumns().select(record)
    read = FieldColumns().select({**record, column: False})
    assert read == {"messages": MESSAGES}


def test_question_of_a_pair_is_not_lost() -> None:
    record = {"question": "the file?", "chosen": "a socket", "rejected": "no way"}
    with pytest.raises(InvalidRecord, match="column question: its text is not used"):
        FieldColumns(objective="DPO").select(record)
    columns = Columns(prompt="{{ question }}\n")
    assert FieldColumns(columns, "DPO").select(record) == {
        "prompt": "the file?\n",
        "chosen": "a socket",
        "rejected": "no way",
    }


def test_rest_of_an_object_with_a_field_is_looked_at() -> None:
    columns = Columns(text="answer.text")
    record = {"answer": {"text": "the file", "n": 1, "note": "the file"}}
    assert FieldColumns(columns).select(record) == {"text": "the file"}
    record["answer"]["note"] = "some words"
    with pytest.raises(InvalidRecord, match="column answer: its text is not used"):
        FieldColumns(columns).select(record)


def test_form_that_the_manifest_does_not_choose_is_left_out() -> None:
    columns = FieldColumns(Columns(messages="messages"))
    record = {"messages": MESSAGES, "text": "<user>the file", "source": "web"}
    assert columns.select(record) == {"messages": MESSAGES}
    assert columns.notes == ["columns left out, as the manifest names others: text"]


def test_allowed_record_is_marked_and_others_are_not() -> None:
    columns = FieldColumns(unrendered="Warn")
    marked = columns.select({"text": "a b", "more": "some words"})
    assert isinstance(marked, PartlyRead)
    assert not isinstance(columns.select({"text": "a b", "more": "web"}), PartlyRead)


def test_record_that_its_weight_leaves_out_is_not_counted(
    environment: Environment, manifest_dir: Path, tokenizer_folder: Path
) -> None:
    records = [{"text": "the file", "more": "some words"}] * 40
    write_jsonl(manifest_dir / "data.jsonl", records)
    result = prepare(
        prepare_config(tokenizer_folder, unrendered="Warn", weight=0.5), environment
    )
    assert 0 < result.unused < 40
    assert result.unrendered == 40 - result.unused


def test_every_row_of_a_table_decides_which_columns_count(
    tmp_path: Path,
) -> None:
    records = [{"text": "the file", "more": "web", "n": 1}] * 300
    with_text = [{"text": "the file", "more": "some words", "n": 1}]
    refused = {}
    for name, rows in {
        "late": records + with_text,
        "early": with_text + records,
    }.items():
        path = tmp_path / f"{name}.parquet"
        write_parquet(path, rows)
        read = read_records(SourceFile(path), "Auto")
        refused[name] = [
            line for line, fields in read if isinstance(fields, InvalidRecord)
        ]
    assert refused == {"late": [301], "early": [1]}
