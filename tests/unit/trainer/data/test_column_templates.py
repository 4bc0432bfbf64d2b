"""Fields that a template writes from several columns."""

from pathlib import Path
from typing import Any

import pytest
from support.trainer.formats import FORMATS
from support.trainer.models import write_jsonl
from support.trainer.prepared import packed_documents, prepare, prepare_config
from support.trainer.stages import run_to_failure

from finetune_trainer.contract import Columns, Environment, ExitCode
from finetune_trainer.data.reading.columns import FieldColumns
from finetune_trainer.data.records.records import InvalidRecord

PROMPT = "{{ instruction }}{% if input %}\n\n{{ input }}{% endif %}\n"
ALPACA = [
    {"instruction": "the file?", "input": "a reader", "output": "a socket"},
    {"instruction": "the file?", "input": "", "output": "no way"},
]


def selected(columns: dict[str, str], record: dict[str, Any]) -> dict[str, Any]:
    return FieldColumns(Columns.model_validate(columns)).select(record)


@pytest.mark.parametrize("extension", FORMATS)
def test_template_writes_the_prompt_of_several_columns(
    environment: Environment,
    manifest_dir: Path,
    tokenizer_folder: Path,
    extension: str,
) -> None:
    FORMATS[extension](manifest_dir / f"data.{extension}", ALPACA)
    columns = {"prompt": PROMPT, "completion": "output"}
    prepare(
        prepare_config(tokenizer_folder, f"data.{extension}", columns=columns),
        environment,
    )
    of_template = packed_documents(environment)

    plain = [
        {"prompt": "the file?\n\na reader\n", "completion": "a socket"},
        {"prompt": "the file?\n", "completion": "no way"},
    ]
    write_jsonl(manifest_dir / "plain.jsonl", plain)
    (environment.stage_dir("prepare", "b" * 16) / "result.json").unlink()
    prepare(prepare_config(tokenizer_folder, "plain.jsonl"), environment)
    assert of_template == packed_documents(environment)


@pytest.mark.parametrize(
    ("template", "record", "text"),
    [
        ("{{ a }} {{ b }}", {"a": "x y", "b": 1}, "x y 1"),
        ("{{ a }}{{ b }}", {"a": "x y", "b": None}, "x y"),
        ("{{ a.b }}", {"a": {"b": "x y", "c": "d"}}, "x y"),
        ("{{ a }}{{ b | default('') }}", {"a": "x y"}, "x y"),
        ("{{ record['body text'] }}", {"body text": "x y"}, "x y"),
        ("{{ tags | join(', ') }}", {"tags": ["x", "y"]}, "x, y"),
        ("{{ range }}", {"range": "x y"}, "x y"),
        ("{{ a }}\n", {"a": "<x> & y"}, "<x> & y\n"),
    ],
)
def test_template_writes_the_values_of_columns(
    template: str, record: dict[str, Any], text: str
) -> None:
    assert selected({"text": template}, record) == {"text": text}


@pytest.mark.parametrize(
    ("template", "record", "reason"),
    [
        (
            "{{ instrution }}",
            {"instruction": "a", "more": 1},
            "'instrution' is undefined; the columns are instruction, more; for a column that may be absent write",
        ),
        ("{{ a }}", {"a": ["x"]}, "a template writes a list: choose a text in it"),
        ("{{ a.b }}", {"a": {"c": "x"}}, "has no attribute 'b'"),
        ("{{ a.__class__ }}", {"a": "x"}, "unsafe"),
        ("{% for x in a %}{% endfor %}", {"a": 1}, "not iterable"),
        ("{{ a / 0 }}", {"a": 1}, "division by zero"),
        ("{{ a * 1000000000 }}", {"a": "x"}, "operator * is not available"),
        ("{{ '%999999999s' % a }}", {"a": "x"}, "operator % is not available"),
        ("{% if a.append(1) %}{% endif %}", {"a": [1]}, "unsafe"),
    ],
)
def test_template_that_fails_makes_the_record_invalid(
    template: str, record: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRecord) as raised:
        selected({"text": template}, record)
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"text": "{{ a "}, "datasets[0].columns text is no template of Jinja"),
        ({"text": "{{ a | random }}"}, "of Jinja: No filter named 'random'"),
        ({"text": "{{ a | nope }}"}, "No filter named 'nope'"),
        (
            {"prompt": "{{ a }}\\n\\n{{ b }}", "completion": "c"},
            "prompt has the two characters \\n: write it in double quotes",
        ),
        (
            {"messages": "{{ a }}"},
            "messages has a template, but a template writes text: name the column with the list",
        ),
    ],
)
def test_invalid_template_is_an_error_of_the_manifest(
    *,
    environment: Environment,
    manifest_dir: Path,
    tokenizer_folder: Path,
    columns: dict[str, str],
    expected: str,
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", [{"a": "x"}])
    message, code = run_to_failure(
        prepare_config(tokenizer_folder, columns=columns), environment
    )
    assert code == ExitCode.CONFIG
    assert expected in message


def test_latex_in_a_template_is_no_line_break() -> None:
    assert selected({"text": "{{ a }} \\nabla"}, {"a": "x"}) == {"text": "x \\nabla"}


@pytest.mark.parametrize(
    ("template", "read"),
    [
        ("{{ a }} {{ b.c }}", ["a", "b"]),
        ("{{ record['body text'] }}", ["body text"]),
        ("{{ record.a }}", ["a"]),
        ("{% for name in record %}{{ name }}{% endfor %}", ["a", "b", "body text"]),
        ("{% set a = 'x' %}{{ a }}{{ b }}", ["b"]),
    ],
)
def test_table_is_read_in_the_columns_of_the_template(
    template: str, read: list[str]
) -> None:
    columns = FieldColumns(Columns(text=template))
    assert columns.among(["a", "b", "body text"]) == read


def test_table_without_a_column_of_the_template_is_refused() -> None:
    columns = FieldColumns(Columns(prompt="{{ instrution }}", completion="output"))
    assert columns.problem(["instruction", "output"]) == (
        "has no column instrution, which the manifest names under columns; it has instruction, output; "
        "did you mean instruction?"
    )


WORDS = {"a": "some long words", "b": "Paris", "c": "x y"}


@pytest.mark.parametrize(
    ("columns", "cut"),
    [
        ({"text": "{{ a | truncate(5) }}", "ignored": ["c"]}, "a"),
        ({"text": "{{ a[:4] }} {{ b }}", "ignored": ["c"]}, "a"),
        ({"text": "{{ a.split(' ')[0] }}", "ignored": ["c"]}, "a"),
        ({"text": "{{ record['a'][5:] }}", "ignored": ["c"]}, "a"),
        ({"text": "{{ a }}{{ b[:2] }}", "ignored": ["c"]}, "b"),
        ({"text": "{% if c %}{{ a }}{% endif %}"}, "c"),
        ({"text": "{% for k in ['a'] %}{{ record[k] }}{% endfor %}"}, "c"),
        ({"instruction": "{{ a[:4] }}", "output": "c"}, "a"),
    ],
)
def test_column_that_a_template_cuts_is_refused(
    columns: dict[str, Any], cut: str
) -> None:
    with pytest.raises(InvalidRecord, match=f"column {cut}: the template writes a par"):
        selected(columns, WORDS)


@pytest.mark.parametrize(
    "columns",
    [
        {"text": "{{ a | upper }} {{ c | wordwrap(2) }}"},
        {"text": "{% if b == 'Paris' %}{{ a }}{% endif %}", "ignored": ["c"]},
        {"text": "{{ a[:4] }}", "ignored": ["a", "c"]},
        {"prompt": "{{ a[:4] }}", "completion": "a", "ignored": ["c"]},
        {"text": "{{ record | tojson }}"},
    ],
)
def test_column_that_is_written_or_ignored_is_used(columns: dict[str, Any]) -> None:
    assert selected(columns, WORDS)


def test_allowed_cut_is_noted() -> None:
    columns = Columns.model_validate({"text": "{{ a[:4] }}", "ignored": ["c"]})
    reader = FieldColumns(columns, unrendered="Warn")
    assert reader.select({"a": "some words"}) == {"text": "some"}
    reader.add_final_notes()
    assert reader.notes == [
        "columns of which a template writes a part only, as prepare.unrendered allows: a"
    ]


def test_json_of_a_template_has_plain_characters() -> None:
    text = selected({"text": "{{ tags | tojson }}"}, {"tags": ["it's <é>"]})["text"]
    assert text == '["it\'s <é>"]'
