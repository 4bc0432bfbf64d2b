"""Tool calls: rendered by the chat templates of real models, in the loss to the character, or refused."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from support.trainer.models import write_jsonl
from support.trainer.prepared import (
    IDENTITY,
    make_tokenizer,
    packed_documents,
    prepare,
    prepare_config,
    trained_texts,
)
from support.trainer.renderings import TEMPLATES, TokenizerWithTemplate, learned
from support.trainer.stages import run_to_failure
from support.trainer.tool_calls import call, record

from finetune_trainer.contract import Environment
from finetune_trainer.data.records.chat_template import ChatTemplate
from finetune_trainer.data.records.conversations import conversation_of
from finetune_trainer.data.records.records import InvalidRecord
from finetune_trainer.data.records.rendering import render

QWEN = (TEMPLATES / "qwen2_5.jinja").read_text()
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def turns(template: str, fields: dict[str, Any]) -> list[str]:
    """Return the texts in the loss that a model's template gives for a record."""
    text = (TEMPLATES / f"{template}.jinja").read_text()
    examples = learned(text, fields, eos="<|im_end|>")
    return [turn for example in examples for turn in example]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "llama3_1",
            [
                '{"name": "add", "parameters": {"a": 2, "b": 3}}<|eot_id|>',
                "It is 5.<|eot_id|>",
            ],
        ),
        (
            "qwen2_5",
            [
                f"{CALL}<|im_end|>",
                "It is 5.<|im_end|>",
            ],
        ),
        (
            "qwen3",
            [
                f"<think>\n\n</think>\n\n{CALL}<|im_end|>",
                "<think>\n\n</think>\n\nIt is 5.<|im_end|>",
            ],
        ),
        (
            "lfm2_v2",
            [
                "<|tool_call_start|>[add(a=2, b=3)]<|tool_call_end|><|im_end|>",
                "It is 5.<|im_end|>",
            ],
        ),
        (
            "gptoss",
            [
                ' to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": 3}<|call|>',
                "<|channel|>final<|message|>It is 5.<|return|>",
            ],
        ),
        (
            "gemma4_v5",
            [
                "<|tool_call>call:add{a:2,b:3}<tool_call|><|tool_response>",
                "It is 5.<turn|>",
            ],
        ),
    ],
)
def test_spans_cover_calls_and_the_end_of_the_turn(
    template: str, expected: list[str]
) -> None:
    assert turns(template, record()) == expected


@pytest.mark.parametrize(
    "template", ["qwen2_5", "qwen3_instruct_2507", "lfm2_v2", "qwen3"]
)
@pytest.mark.parametrize(
    "calls",
    [
        [call()],
        [call(arguments={})],
        [call(arguments={"a": [1, {"b": None}], "b": "x"})],
        [call(), call(arguments={"a": 4, "b": "}}"})],
    ],
    ids=["numbers", "empty", "nested", "two calls"],
)
def test_spans_equal_those_of_generation_tags(
    template: str, calls: list[dict[str, Any]]
) -> None:
    """TRL's training variants mark the turns. Only spaces around a turn are marked differently."""
    # Qwen3 shows the reasoning of every turn after the last question, if there is one.
    reasoning = {"reasoning_content": "Adding."} if template == "qwen3" else {}
    fields = record(*calls, **reasoning)
    fields["messages"][3] |= reasoning
    by_tags = turns(f"{template}_training", fields)
    assert [turn.strip() for turn in turns(template, fields)] == [
        turn.strip() for turn in by_tags
    ]
    assert len(by_tags) == 2


@pytest.mark.parametrize("template", ["llama3_1", "qwen2_5", "qwen3", "gemma4_v5"])
def test_arguments_as_json_text_equal_an_object(template: str) -> None:
    as_text = call(arguments=json.dumps({"a": 2, "b": 3}))
    flat = {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert (
        turns(template, record(as_text))
        == turns(template, record(flat))
        == turns(template, record())
    )


def test_arguments_that_are_no_json_stay_text() -> None:
    assert turns("qwen3", record(call(arguments="2 and 3")))[0].endswith(
        '<tool_call>\n{"name": "add", "arguments": 2 and 3}\n</tool_call><|im_end|>'
    )


def test_absent_content_equals_null_and_empty() -> None:
    absent = record()
    del absent["messages"][1]["content"]
    assert (
        turns("qwen3", absent)
        == turns("qwen3", record())
        == turns("qwen3", record(content=""))
    )


def test_text_beside_calls_is_in_the_loss() -> None:
    assert turns("qwen2_5", record(content="Adding."))[0].startswith(
        "Adding.\n<tool_call>"
    )


def test_reasoning_of_a_call_is_in_the_loss() -> None:
    assert turns("qwen3", record(reasoning_content="I add."))[0].startswith(
        "<think>\nI add.\n</think>\n\n<tool_call>"
    )


IGNORED = [
    (
        "qwen2_5_vl",
        record(),
        "tools: the chat template does not render it: remove it, set prepare.chatTemplate, or allow it with",
    ),
    (
        "lfm2",
        record(),
        r"messages\[1\].tool_calls\[0\]: the chat template does not render it",
    ),
    (
        "gptoss",
        record(call(), call(name="sub")),
        r"messages\[1\].tool_calls\[1\]: the chat template does not render it",
    ),
    (
        "llama3_1",
        record(content="Adding."),
        r"messages\[1\].content: the chat template does not render it",
    ),
    ("llama3_1", record(call(), call()), "only supports single tool-calls at once"),
    (
        "llama3_1",
        record(reasoning_content="so"),
        r"messages\[1\].reasoning_content: the chat template does not render it",
    ),
]


@pytest.mark.parametrize(
    ("template", "fields", "expected"),
    IGNORED,
    ids=[reason[:45] for _, _, reason in IGNORED],
)
def test_what_a_template_does_not_render_is_refused(
    template: str, fields: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InvalidRecord, match=expected):
        turns(template, fields)


def test_answer_of_a_tool_that_is_not_rendered_is_refused() -> None:
    with pytest.raises(
        InvalidRecord,
        match=r"messages\[2\].content: the chat template does not render it",
    ):
        learned(QWEN.replace("{{- message.content }}", ""), record())


def test_template_for_tool_use_renders_records_with_tools() -> None:
    """A tokenizer may have several templates; Hugging Face takes `tool_use` if there are tools."""

    class TwoTemplates(TokenizerWithTemplate):
        def get_chat_template(self) -> str:
            return str(self.chat_template["default"])

    chat = ChatTemplate(
        TwoTemplates(
            {
                "default": (TEMPLATES / "llama3.jinja").read_text(),
                "tool_use": QWEN,
            }
        )
    )
    [example] = render(chat, conversation_of(record())).examples
    assert "<tool_call>" in example.text
    without_tools = {
        "messages": [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "!"},
        ]
    }
    [example] = render(chat, conversation_of(without_tools)).examples
    assert "<|eot_id|>" in example.text


ASSISTANT = {"role": "assistant", "content": None}
INVALID = [
    (
        {**ASSISTANT, "function_call": "add"},
        "function_call must be a call such as {name: add, arguments: {…}}",
    ),
    ({**ASSISTANT, "tool_calls": "add"}, "tool_calls must be a list, it is a string"),
    (
        {**ASSISTANT, "tool_calls": ["add"]},
        "tool_calls[0] must be an object with function, it is a string",
    ),
    (
        {**ASSISTANT, "tool_calls": [{"function": 1}]},
        "tool_calls[0].function must be an object with name and arguments",
    ),
    (
        {**ASSISTANT, "tool_calls": [{"function": {}}]},
        "tool_calls[0].function.name must be a string, it is null",
    ),
    (
        {**ASSISTANT, "tool_calls": [{"name": "add"}]},
        "arguments is missing: write {} for a call without arguments",
    ),
    (
        {**ASSISTANT, "tool_calls": [{"name": "add", "arguments": 1}]},
        "arguments must be an object or its JSON text",
    ),
    ({**ASSISTANT, "tool_calls": []}, "content is missing"),
    (
        {"role": "user", "content": "", "tool_calls": [call()]},
        "only the role assistant calls tools, not user",
    ),
]


@pytest.mark.parametrize(
    ("message", "expected"), INVALID, ids=[expected[:45] for _, expected in INVALID]
)
def test_invalid_call_is_reported_with_its_place(
    tokenizer_folder: Path,
    environment: Environment,
    manifest_dir: Path,
    message: dict[str, Any],
    expected: str,
) -> None:
    messages = [
        {"role": "user", "content": "?"},
        message,
        {"role": "assistant", "content": "!"},
    ]
    write_jsonl(manifest_dir / "data.jsonl", [{"messages": messages}])

    failure, _ = run_to_failure(prepare_config(tokenizer_folder), environment)
    assert "data.jsonl:1: messages[1]." in failure
    assert expected in failure


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        ("[oops", "tools is not JSON"),
        ({"a": 1}, "tools must be a list of function schemas, it is an object"),
    ],
)
def test_invalid_tools_are_reported(tools: Any, expected: str) -> None:
    with pytest.raises(InvalidRecord, match=expected):
        conversation_of(record() | {"tools": tools})


def test_lone_surrogate_in_arguments_is_an_invalid_record(
    tmp_path: Path, environment: Environment, manifest_dir: Path
) -> None:
    make_tokenizer(tmp_path / "model", chat_template=QWEN)
    (manifest_dir / "data.jsonl").write_text(
        json.dumps(record(call(arguments={"a": "\ud800"})))
    )

    failure, _ = run_to_failure(
        prepare_config(tmp_path / "model", context_length=1024), environment
    )
    assert "a lone surrogate" in failure


def test_default_template_refuses_tool_calls(
    tokenizer_folder: Path, environment: Environment, manifest_dir: Path
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", [record()])

    failure, _ = run_to_failure(prepare_config(tokenizer_folder), environment)
    assert "tools: the chat template does not render it" in failure


def test_every_format_gives_the_same_tool_calls(
    tmp_path: Path, environment: Environment, manifest_dir: Path
) -> None:
    """In CSV both fields are JSON text; in Parquet tools may be text, or objects in which absent fields are null."""
    tokenizer = make_tokenizer(tmp_path / "model", chat_template=QWEN)
    fields = record()
    write_jsonl(manifest_dir / "lines.jsonl", [fields])
    quoted = [
        '"' + json.dumps(fields[name]).replace('"', '""') + '"'
        for name in ("messages", "tools")
    ]
    (manifest_dir / "table.csv").write_text(f"messages,tools\n{','.join(quoted)}\n")
    parquet.write_table(
        pa.Table.from_pylist([fields]), manifest_dir / "objects.parquet"
    )
    as_text = fields | {"tools": json.dumps(fields["tools"])}
    parquet.write_table(pa.Table.from_pylist([as_text]), manifest_dir / "text.parquet")

    packed = {}
    for name in ("lines.jsonl", "table.csv", "objects.parquet", "text.parquet"):
        prepare(
            prepare_config(tmp_path / "model", name, context_length=1024), environment
        )
        packed[name] = packed_documents(environment)
        assert trained_texts(environment, tokenizer) == [
            '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>|It is 5.<|im_end|>'
        ]
        (environment.stage_dir("prepare", IDENTITY) / "result.json").unlink()
    assert (
        packed["lines.jsonl"]
        == packed["table.csv"]
        == packed["objects.parquet"]
        == packed["text.parquet"]
    )
