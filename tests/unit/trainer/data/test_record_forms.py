"""Forms of records that people have: what the rows hold of each, and what is learned."""

from pathlib import Path
from typing import Any

import pytest
from support.trainer.formats import FORMATS
from support.trainer.models import write_jsonl
from support.trainer.prepared import (
    make_tokenizer,
    packed_documents,
    prepare,
    prepare_config,
)

from finetune_trainer.contract import Environment

TEMPLATE = (
    "{%- if tools %}[{{ tools | tojson }}]{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUESTION = {"role": "user", "content": "the file?"}
ANSWER = {"role": "assistant", "content": "a socket"}
OTHER = {"role": "assistant", "content": "the other one"}
HUMAN = {"from": "human", "value": "the file?"}
GPT = {"from": "gpt", "value": "a socket"}
ROW = "<user>the file?<eos><assistant>a socket<eos>"
LEARNED = "a socket<eos>"
CALLED = (
    '<user>the file?<eos><assistant>add{"a": 1}<eos><tool>so 2<eos>'
    "<assistant>a socket<eos>"
)
Row = tuple[str, str]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tokenizer(
        tmp_path_factory.mktemp("model") / "model", chat_template=TEMPLATE
    )


def rows_of(environment: Environment, tokenizer: Any) -> list[Row]:
    """Return text and learned text of every document."""
    return [
        (
            tokenizer.decode(tokens),
            tokenizer.decode(
                [
                    token
                    for token, is_learned in zip(tokens, mask, strict=True)
                    if is_learned
                ]
            ),
        )
        for tokens, mask in packed_documents(environment)
    ]


CONVERSATIONS: dict[str, tuple[dict[str, Any], Row]] = {
    "ShareGPT": ({"conversations": [HUMAN, GPT]}, (ROW, LEARNED)),
    "ShareGPT in conversation": ({"conversation": [HUMAN, GPT]}, (ROW, LEARNED)),
    "ShareGPT in messages": ({"messages": [HUMAN, GPT], "id": "a-1"}, (ROW, LEARNED)),
    "conversations with roles": ({"conversations": [QUESTION, ANSWER]}, (ROW, LEARNED)),
    "column system": (
        {"system": "Be old.", "conversations": [HUMAN, GPT], "tools": ""},
        (f"<system>Be old.<eos>{ROW}", LEARNED),
    ),
    "other names of roles": (
        {"messages": [{**QUESTION, "role": "Human"}, {**ANSWER, "role": "bot"}]},
        (ROW, LEARNED),
    ),
    "call and observation": (
        {
            "conversations": [
                HUMAN,
                {
                    "from": "function_call",
                    "value": '{"name": "add", "arguments": {"a": 1}}',
                },
                {"from": "observation", "value": "so 2"},
                GPT,
            ],
            "tools": '[{"name": "add"}]',
        },
        (
            f'[[{{"name": "add"}}]]{CALLED}',
            'add{"a": 1}<eos>a socket<eos>',
        ),
    ),
    "names of roles in ms-swift": (
        {
            "messages": [
                {**QUESTION, "role": "prompter"},
                {
                    "role": "tool_call",
                    "content": '{"name": "add", "arguments": {"a": 1}}',
                },
                {"role": "tool_response", "content": "so 2"},
                ANSWER,
            ],
        },
        (CALLED, 'add{"a": 1}<eos>a socket<eos>'),
    ),
    "OpenAI's earlier calls": (
        {
            "functions": [{"name": "add"}],
            "messages": [
                QUESTION,
                {
                    "role": "assistant",
                    "content": None,
                    "function_call": {"name": "add", "arguments": '{"a": 1}'},
                },
                {"role": "function", "name": "add", "content": "so 2"},
                ANSWER,
            ],
            "parallel_tool_calls": False,
        },
        (
            f'[[{{"type": "function", "function": {{"name": "add"}}}}]]{CALLED}',
            'add{"a": 1}<eos>a socket<eos>',
        ),
    ),
    "OpenAI's weight": (
        {"messages": [QUESTION, {**OTHER, "weight": 0}, QUESTION, ANSWER]},
        (f"<user>the file?<eos><assistant>the other one<eos>{ROW}", LEARNED),
    ),
    "content in parts": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "the"},
                        {"type": "text", "text": "file?"},
                    ],
                },
                ANSWER,
            ]
        },
        (ROW.replace("the file", "the\nfile"), LEARNED),
    ),
    "TRL's prompt and completion": (
        {"prompt": [QUESTION, OTHER, QUESTION], "completion": [ANSWER]},
        (f"<user>the file?<eos><assistant>the other one<eos>{ROW}", LEARNED),
    ),
    "Alpaca": (
        {"instruction": "the file?", "input": "a reader", "output": "a socket"},
        (ROW.replace("file?", "file?\n\na reader"), LEARNED),
    ),
    "Alpaca without input": (
        {"instruction": "the file?", "input": "", "output": "a socket"},
        (ROW, LEARNED),
    ),
    "Alpaca with history": (
        {
            "instruction": "the file?",
            "output": "a socket",
            "system": "Be old.",
            "history": [["or?", "no way"]],
        },
        (
            f"<system>Be old.<eos><user>or?<eos><assistant>no way<eos>{ROW}",
            f"no way<eos>{LEARNED}",
        ),
    ),
    "KTO's good answer": (
        {"prompt": [QUESTION], "completion": [ANSWER], "label": True},
        (ROW, LEARNED),
    ),
    "prompt that the messages hold": (
        {"prompt": "the file?", "messages": [QUESTION, ANSWER]},
        (ROW, LEARNED),
    ),
}


@pytest.mark.parametrize(("record", "row"), CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_form_becomes_a_conversation(
    environment: Environment,
    manifest_dir: Path,
    tokenizer: Any,
    record: dict[str, Any],
    row: Row,
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", [record])
    config = prepare_config(Path(tokenizer.name_or_path), context_length=256)
    assert prepare(config, environment).conversations
    assert rows_of(environment, tokenizer) == [row]


@pytest.mark.parametrize("extension", FORMATS)
def test_form_is_recognised_in_every_format(
    environment: Environment, manifest_dir: Path, tokenizer: Any, extension: str
) -> None:
    FORMATS[extension](
        manifest_dir / f"data.{extension}", [{"conversations": [HUMAN, GPT], "n": 1}]
    )
    prepare(
        prepare_config(Path(tokenizer.name_or_path), f"data.{extension}"), environment
    )
    assert rows_of(environment, tokenizer) == [(ROW, LEARNED)]


PAIRS: dict[str, dict[str, Any]] = {
    "OpenAI": {
        "input": {"messages": [QUESTION], "parallel_tool_calls": True},
        "preferred_output": [ANSWER],
        "non_preferred_output": [OTHER],
    },
    "ShareGPT": {
        "conversations": [HUMAN],
        "chosen": GPT,
        "rejected": {"from": "gpt", "value": "the other one"},
    },
    "from and value": {
        "prompt": [HUMAN],
        "chosen": [GPT],
        "rejected": [{"from": "gpt", "value": "the other one"}],
    },
    "Alpaca": {
        "instruction": "the file?",
        "chosen": "a socket",
        "rejected": "the other one",
    },
}


@pytest.mark.parametrize("record", PAIRS.values(), ids=PAIRS)
def test_form_of_pairs_becomes_two_conversations(
    environment: Environment,
    manifest_dir: Path,
    tokenizer: Any,
    record: dict[str, Any],
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", [record])
    prepare(prepare_config(Path(tokenizer.name_or_path), objective="DPO"), environment)
    assert rows_of(environment, tokenizer) == [
        (ROW, LEARNED),
        ("<user>the file?<eos><assistant>the other one<eos>", "the other one<eos>"),
    ]


@pytest.mark.parametrize(
    ("record", "note"),
    [
        (CONVERSATIONS["ShareGPT"][0], "read as ShareGPT conversations"),
        (CONVERSATIONS["Alpaca"][0], "read as Alpaca records, each a conversation"),
        (
            CONVERSATIONS["TRL's prompt and completion"][0],
            "read as prompts and completions of messages, of which the completion is learned",
        ),
    ],
)
def test_log_names_the_form_once(
    *,
    environment: Environment,
    manifest_dir: Path,
    tokenizer: Any,
    capsys: pytest.CaptureFixture[str],
    record: dict[str, Any],
    note: str,
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", [record] * 3)
    prepare(
        prepare_config(Path(tokenizer.name_or_path), context_length=128), environment
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "read as" in line] == [
        f"prepare: data.jsonl: {note}"
    ]


@pytest.mark.parametrize(
    ("columns", "record"),
    [
        ({"messages": "conversations"}, {"conversations": [HUMAN, GPT]}),
        (
            {"messages": "messages"},
            {"messages": [QUESTION, ANSWER], "text": "<user>the file?"},
        ),
        (
            {"instruction": "question", "output": "answer"},
            {"question": "the file?", "answer": "a socket"},
        ),
        (
            {"prompt": "asked", "completion": "said"},
            {"asked": [QUESTION], "said": [ANSWER]},
        ),
        (
            {"output": "output"},
            {"instruction": "the file?", "output": "a socket", "text": "Below is"},
        ),
    ],
    ids=["ShareGPT", "beside text", "question", "TRL", "Alpaca beside text"],
)
def test_columns_of_the_manifest_choose_the_form(
    environment: Environment,
    manifest_dir: Path,
    tokenizer: Any,
    columns: dict[str, str],
    record: dict[str, Any],
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", [record])
    prepare(prepare_config(Path(tokenizer.name_or_path), columns=columns), environment)
    assert rows_of(environment, tokenizer) == [(ROW, LEARNED)]


def test_system_message_may_come_from_a_template(
    environment: Environment, manifest_dir: Path, tokenizer: Any
) -> None:
    write_jsonl(
        manifest_dir / "data.jsonl", [{"messages": [QUESTION, ANSWER], "who": "old"}]
    )
    columns = {"system": "Be {{ who }}."}
    prepare(prepare_config(Path(tokenizer.name_or_path), columns=columns), environment)
    assert rows_of(environment, tokenizer) == [(f"<system>Be old.<eos>{ROW}", LEARNED)]
