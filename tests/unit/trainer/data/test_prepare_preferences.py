"""Preference records: what they may look like, what is trained of them, and every defect with its message."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.trainer.formats import FORMATS
from support.trainer.models import write_jsonl
from support.trainer.prepared import (
    make_tokenizer,
    output_folder,
    packed_documents,
    prepare,
    prepare_config,
)
from support.trainer.stages import run_to_failure

from finetune_trainer.contract import Environment, ExitCode
from finetune_trainer.data.packing.rows import PackedRows
from finetune_trainer.data.tokenizing import batch_tokenizer

USER = {"role": "user", "content": "the file or a socket?"}
FILE, SOCKET = (
    {"role": "assistant", "content": f"the {name}"} for name in ("file", "socket")
)
TEXTS = {
    "prompt": "Some writer",
    "chosen": " opens the file",
    "rejected": " closes a socket",
}
MESSAGES = {"prompt": [USER], "chosen": [FILE], "rejected": [SOCKET]}
TAGGED = (
    "{%- for m in messages -%}<{{ m.role }}>{%- if m.role == 'assistant' -%}{% generation %}{{ m.content }}"
    "{{ eos_token }}{% endgeneration %}{%- else -%}{{ m.content }}{%- endif -%}{%- endfor -%}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tokenizer(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def model(tokenizer: Any) -> Path:
    return Path(tokenizer.name_or_path)


def write(environment: Environment, records: list[dict[str, Any]]) -> None:
    assert environment.manifest_dir
    write_jsonl(environment.manifest_dir / "data.jsonl", records)


def rows_of(environment: Environment, tokenizer: Any) -> list[tuple[str, str]]:
    """Return text and trained text of every row."""
    return [
        (
            tokenizer.decode(tokens),
            tokenizer.decode(
                [
                    token
                    for token, is_target in zip(tokens, mask, strict=True)
                    if is_target
                ]
            ),
        )
        for tokens, mask in packed_documents(environment)
    ]


def prepared_rows(
    environment: Environment, tokenizer: Any, record: dict[str, Any], **changes: Any
) -> list[tuple[str, str]]:
    write(environment, [record])
    prepare(
        prepare_config(Path(tokenizer.name_or_path), objective="DPO", **changes),
        environment,
    )
    return rows_of(environment, tokenizer)


@pytest.mark.parametrize(
    "record",
    [
        TEXTS,
        {
            "chosen": "Some writer opens the file",
            "rejected": "Some writer closes a socket",
        },
        {
            **TEXTS,
            "prompt": None,
            "chosen": "Some writer opens the file",
            "rejected": "Some writer closes a socket",
        },
    ],
    ids=["prompt", "common beginning", "null prompt"],
)
def test_texts_become_a_chosen_and_a_rejected_row(
    environment: Environment, tokenizer: Any, record: dict[str, Any]
) -> None:
    assert prepared_rows(environment, tokenizer, record) == [
        ("Some writer opens the file<eos>", " opens the file<eos>"),
        ("Some writer closes a socket<eos>", " closes a socket<eos>"),
    ]
    rows = PackedRows(output_folder(environment), "train")
    assert rows.pairs
    assert not rows.packed


def test_common_beginning_is_cut_before_its_last_space(
    environment: Environment, tokenizer: Any
) -> None:
    record = {"chosen": "A reader opens", "rejected": "A reader opts"}
    rows = prepared_rows(environment, tokenizer, record)
    assert [trained for _, trained in rows] == [" opens<eos>", " opts<eos>"]


@pytest.mark.parametrize(
    "record",
    [
        MESSAGES,
        {"chosen": [USER, FILE], "rejected": [USER, SOCKET]},
        {"prompt": USER["content"], "chosen": [USER, FILE], "rejected": [USER, SOCKET]},
    ],
    ids=["prompt", "common messages", "prompt that repeats a message"],
)
def test_messages_become_a_chosen_and_a_rejected_row(
    environment: Environment, tokenizer: Any, record: dict[str, Any]
) -> None:
    prompt = "user: the file or a socket?\n\nassistant:"
    assert prepared_rows(environment, tokenizer, record) == [
        (f"{prompt} the file<eos>", " the file<eos>"),
        (f"{prompt} the socket<eos>", " the socket<eos>"),
    ]


@pytest.mark.parametrize("template", [None, TAGGED], ids=["located", "tagged"])
def test_turns_of_the_prompt_are_not_trained(
    environment: Environment, tmp_path: Path, template: str | None
) -> None:
    tokenizer = make_tokenizer(tmp_path / "tagged", chat_template=template)
    record = {
        "prompt": [USER, SOCKET, USER],
        "chosen": [FILE],
        "rejected": [SOCKET, USER, FILE],
    }
    space = "" if template else " "
    assert [
        trained
        for _, trained in prepared_rows(
            environment, tokenizer, record, context_length=128
        )
    ] == [
        f"{space}the file<eos>",
        f"{space}the socket<eos>{space}the file<eos>",
    ]


FORMATS_OF_PAIRS = [
    *((extension, TEXTS) for extension in FORMATS),
    *(
        (extension, MESSAGES) for extension in FORMATS if extension != "csv"
    ),  # a cell of CSV is text
]


@pytest.mark.parametrize(("extension", "record"), FORMATS_OF_PAIRS)
def test_every_format_yields_the_same_pairs(
    environment: Environment,
    manifest_dir: Path,
    tokenizer: Any,
    extension: str,
    record: dict[str, Any],
) -> None:
    expected = prepared_rows(environment, tokenizer, record)
    (environment.stage_dir("prepare", "b" * 16) / "result.json").unlink()
    FORMATS[extension](manifest_dir / f"other.{extension}", [{**record, "score": "1"}])
    config = prepare_config(
        Path(tokenizer.name_or_path), f"other.{extension}", objective="DPO"
    )
    prepare(config, environment)
    assert rows_of(environment, tokenizer) == expected


def test_columns_may_have_other_names(environment: Environment, tokenizer: Any) -> None:
    record = {"question": "Some writer", "answer": {"good": " opens"}, "bad": " closes"}
    columns = {"prompt": "question", "chosen": "answer.good", "rejected": "bad"}
    rows = prepared_rows(environment, tokenizer, record, columns=columns)
    assert [trained for _, trained in rows] == [" opens<eos>", " closes<eos>"]


DEFECTS: list[tuple[dict[str, Any], str]] = [
    (
        {"prompt": "a", "completion": "b"},
        "needs chosen and rejected, with or without prompt; it has completion, prompt",
    ),
    ({"prompt": "a", "chosen": "b"}, "rejected is missing"),
    ({"chosen": None, "rejected": "b"}, "chosen is null"),
    ({**TEXTS, "chosen": " "}, "chosen is empty"),
    ({**TEXTS, "rejected": 3}, "rejected must be a string, it is a number"),
    ({**TEXTS, "prompt": ["a"]}, "prompt must be a string, it is a list"),
    (
        {**TEXTS, "rejected": TEXTS["chosen"]},
        "chosen and rejected are equal: there is nothing to prefer",
    ),
    (
        {**TEXTS, "rejected": [SOCKET]},
        "chosen is a string and rejected is a list: write both as text or as messages",
    ),
    (
        MESSAGES,
        "has chosen and rejected messages, but earlier records have chosen and rejected texts",
    ),
]
DEFECTS_OF_MESSAGES: list[tuple[dict[str, Any], str]] = [
    (
        {**MESSAGES, "rejected": [USER]},
        "no message of rejected behind the prompt has the role assistant (roles: user)",
    ),
    (
        {"chosen": [USER, FILE], "rejected": [USER]},
        "no message of rejected behind the prompt has the role assistant",
    ),
    (
        {**MESSAGES, "prompt": "another"},
        "prompt is a string beside messages, and not the last message that chosen",
    ),
    ({**MESSAGES, "chosen": [{"role": "assistant"}]}, "chosen[0].content is missing"),
    ({**MESSAGES, "rejected": [FILE]}, "chosen and rejected are equal"),
    (
        TEXTS,
        "has chosen and rejected texts, but earlier records have chosen and rejected messages",
    ),
]


@pytest.mark.parametrize(
    ("first", "record", "expected"),
    [
        *((TEXTS, *defect) for defect in DEFECTS),
        *((MESSAGES, *defect) for defect in DEFECTS_OF_MESSAGES),
    ],
    ids=[expected[:40] for _, expected in (*DEFECTS, *DEFECTS_OF_MESSAGES)],
)
def test_invalid_pair_is_reported_with_its_reason(
    model: Path,
    environment: Environment,
    first: dict[str, Any],
    record: dict[str, Any],
    expected: str,
) -> None:
    write(environment, [first, record])
    message, code = run_to_failure(prepare_config(model, objective="DPO"), environment)
    assert code == ExitCode.DATA
    assert f"data.jsonl:2: {expected}" in message
    assert "1 of 2 records are invalid" in message


def test_invalid_pairs_within_the_fraction_are_left_out(
    model: Path, environment: Environment, manifest_dir: Path
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", [TEXTS, {"prompt": "a"}, TEXTS])
    result = prepare(
        prepare_config(model, objective="DPO", max_invalid_fraction=0.5), environment
    )
    assert result.records == 3
    assert result.invalid == 1
    assert result.train_rows == 4


def test_pair_without_the_objective_names_it(
    model: Path, environment: Environment, manifest_dir: Path
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", [TEXTS])
    message, code = run_to_failure(prepare_config(model), environment)
    assert code == ExitCode.DATA
    assert (
        "has chosen and rejected, but no completion: set train.objective to DPO"
        in message
    )


@pytest.mark.parametrize(
    ("objective", "columns", "expected"),
    [
        (
            "DPO",
            {"messages": "a"},
            "datasets[0].columns names messages, but train.objective DPO reads chosen and",
        ),
        (
            "SFT",
            {"chosen": "a"},
            "datasets[0].columns names chosen, but train.objective SFT reads messages, prompt",
        ),
    ],
)
def test_columns_of_another_objective_are_refused(
    model: Path,
    environment: Environment,
    objective: str,
    columns: dict[str, str],
    expected: str,
) -> None:
    write(environment, [TEXTS])
    message, code = run_to_failure(
        prepare_config(model, objective=objective, columns=columns), environment
    )
    assert code == ExitCode.CONFIG
    assert expected in message


LONG = " ".join(["opens the file"] * 40)


@pytest.mark.parametrize(
    ("record", "too_long", "counts"),
    [
        ({**TEXTS, "chosen": f" {LONG}"}, "Truncate", (1, 0)),
        ({**TEXTS, "chosen": f" {LONG}"}, "Drop", (0, 1)),
        ({**TEXTS, "prompt": LONG}, "Truncate", (0, 1)),
        (
            {**TEXTS, "chosen": f" {LONG} x", "rejected": f" {LONG} y"},
            "Truncate",
            (0, 1),
        ),
    ],
    ids=["long completion", "dropped", "prompt fills the row", "equal when truncated"],
)
def test_long_pair_is_truncated_or_dropped_as_one(
    model: Path,
    environment: Environment,
    record: dict[str, Any],
    too_long: str,
    counts: tuple[int, int],
) -> None:
    write(environment, [TEXTS, record])
    result = prepare(
        prepare_config(model, objective="DPO", too_long=too_long), environment
    )
    assert (result.truncated, result.dropped) == counts
    assert result.train_rows == 2 * (2 - counts[1])


def test_processes_and_parts_do_not_change_the_rows(
    model: Path,
    environment: Environment,
    manifest_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = [{**TEXTS, "chosen": f" opens {number}"} for number in range(3000)]
    write_jsonl(manifest_dir / "data.jsonl", records)
    config = prepare_config(
        model, objective="DPO", validation_fraction=0.2, context_length=32
    )
    alone = prepare(config, environment)
    (environment.stage_dir("prepare", config.identity) / "result.json").unlink()
    monkeypatch.setattr(batch_tokenizer, "POOL_CHARACTERS", 1)
    monkeypatch.setattr(batch_tokenizer, "process_count", lambda: 2)
    assert prepare(config, environment) == alone
    assert alone.validation_rows % 2 == alone.train_rows % 2 == 0
    assert alone.validation_rows + alone.train_rows == 6000


def test_conversations_of_pairs_need_the_chat_template(
    environment: Environment, tokenizer: Any
) -> None:
    prepared_rows(environment, tokenizer, MESSAGES)
    result = json.loads(
        (environment.stage_dir("prepare", "b" * 16) / "result.json").read_text()
    )
    assert result["conversations"]
