"""Messages behind the last learned turn, from which nothing learns: refused by name, or used and counted."""

from pathlib import Path
from typing import Any

import pytest
from support.trainer.models import write_jsonl
from support.trainer.prepared import make_tokenizer, prepare, prepare_config
from support.trainer.renderings import TEMPLATES, rendering_of
from support.trainer.stages import run_to_failure

from finetune_trainer.contract import Environment, ExitCode

USER = {"role": "user", "content": "Is it good?"}
ANSWER = {"role": "assistant", "content": "Yes it is."}
MORE = {"role": "user", "content": "the file?"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": {"a": "two"}}}
    ],
}
RESULT = {"role": "tool", "content": "5"}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def template(name: str) -> str:
    return CHATML if name == "chatml" else (TEMPLATES / f"{name}.jinja").read_text()


@pytest.mark.parametrize("name", ["chatml", "qwen3", "gptoss", "llama3"])
@pytest.mark.parametrize(
    ("messages", "unused"),
    [
        ([USER, ANSWER], []),
        ([USER, ANSWER, MORE], [2]),
        ([USER, ANSWER, MORE, MORE], [2, 3]),
        ([USER, ANSWER, MORE, ANSWER | {"train": False}], []),
        ([USER, ANSWER, MORE, ANSWER | {"weight": 0}, MORE], [4]),
    ],
)
def test_messages_that_no_turn_follows_are_named(
    name: str, messages: list[dict[str, Any]], unused: list[int]
) -> None:
    sentences = rendering_of(template(name), {"messages": messages}).unrendered
    named = [text for text in sentences if "no turn of the assistant follows" in text]
    assert [text.partition(":")[0] for text in named] == [
        f"messages[{index}]" for index in unused
    ]


def test_result_of_a_call_that_no_turn_follows_is_named() -> None:
    rendering = rendering_of(template("qwen3"), {"messages": [USER, CALL, RESULT]})
    assert any(
        text.startswith("messages[2]: no turn of the assistant")
        for text in rendering.unrendered
    )


CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": [USER, ANSWER, MORE]},
    {"messages": [USER, ANSWER, MORE, ANSWER | {"weight": 0}]},
]


def test_trailing_message_is_refused_or_counted(
    environment: Environment,
    manifest_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tmp_path / "model"
    make_tokenizer(model, chat_template=CHATML)
    write_jsonl(manifest_dir / "data.jsonl", CONVERSATIONS)
    message, code = run_to_failure(
        prepare_config(model, context_length=512), environment
    )
    assert code == ExitCode.DATA
    assert "data.jsonl:1: messages[2]: no turn of the assistant follows" in message
    capsys.readouterr()
    config = prepare_config(model, context_length=512, unrendered="Warn")
    result = prepare(config, environment)
    assert result.unrendered == 1
    assert result.invalid == 0
    log = capsys.readouterr().out
    assert "data.jsonl:1: messages[2]: no turn of the assistant follows" in log
    assert "1 conversations end with turns that weight 0 or train false takes" in log
