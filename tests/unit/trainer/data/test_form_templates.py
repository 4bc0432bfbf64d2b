"""Generated conversations in each form of records, and the chat templates that TRL and transformers ship as data.

Each text is in a rendered row or refused by name, and each completion is in the loss exactly once.
"""

import ast
import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trainer.renderings import (
    TEMPLATES,
    TokenizerWithTemplate,
    learned_by_example,
)
from transformers.utils.chat_template_utils import render_jinja_template

from finetune_trainer.data.records.chat_template import ChatTemplate
from finetune_trainer.data.records.conversations import conversation_of
from finetune_trainer.data.records.forms import form_of
from finetune_trainer.data.records.records import InvalidRecord
from finetune_trainer.data.records.rendering import Rendering, render

EXAMPLES = 50 if os.environ.get("TRAINING") == "all" else 4
Messages = list[dict[str, str]]


def shipped_by_transformers() -> dict[str, str]:
    """Return the chat templates in the source of transformers, by the names of models."""
    spec = importlib.util.find_spec("transformers")
    assert spec
    templates = {}
    for path in Path(str(spec.origin)).parent.glob("models/*/processing_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            if "{%" in node.value and "messages" in node.value:
                templates[f"transformers-{path.parent.name}"] = node.value
    return templates


TRL_TEMPLATES = {path.stem: path.read_text() for path in TEMPLATES.glob("*.jinja")}
ALL_TEMPLATES = TRL_TEMPLATES | shipped_by_transformers()
MARKED = [name for name in sorted(TRL_TEMPLATES) if f"{name}_training" in TRL_TEMPLATES]
OF_PARTS = ("idefics3", "smolvlm", "llava_next")
"""Templates that read a content of parts only."""
CHATS: dict[str, ChatTemplate] = {}
"""Compiled once for all examples of a template."""

pieces = st.lists(
    st.sampled_from(["word", " ", "\n\n", "é", "😀", "{{ x }}", '"', "#", "<b>"]),
    max_size=6,
).map("".join)


@st.composite
def conversations(draw: st.DrawFn) -> Messages:
    """Return messages whose texts begin and end with words that are nowhere else."""
    roles = ["system"] if draw(st.booleans()) else []
    roles += ["user", "assistant"] * draw(st.integers(1, 3))
    return [
        {"role": role, "content": f"s{number} {draw(pieces)} e{number}"}
        for number, role in enumerate(roles)
    ]


def with_parts(messages: Messages) -> list[dict[str, Any]]:
    return [
        message | {"content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]


def sharegpt(messages: Messages) -> dict[str, Any]:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    return {
        "conversations": [
            {"from": names[message["role"]], "value": message["content"]}
            for message in messages
        ]
    }


def alpaca(messages: Messages) -> dict[str, Any]:
    texts = [message["content"] for message in messages]
    record: dict[str, Any] = {}
    if messages[0]["role"] == "system":
        record["system"] = texts.pop(0)
    earlier = list(zip(texts[:-2:2], texts[1:-2:2], strict=True))
    record["history"] = [list(turn) for turn in earlier]
    return record | {"instruction": texts[-2], "output": texts[-1]}


FORMS: dict[str, Callable[[Messages], dict[str, Any]]] = {
    "messages": lambda messages: {"messages": messages},
    "content in parts": lambda messages: {"messages": with_parts(messages)},
    "ShareGPT": sharegpt,
    "Alpaca": alpaca,
    "TRL's prompt and completion": lambda messages: {
        "prompt": messages[:-1],
        "completion": messages[-1:],
    },
}


def rendering_in(name: str, record: dict[str, Any]) -> Rendering:
    """Return the rendering of a record of any form; raise InvalidRecord."""
    if name not in CHATS:
        CHATS[name] = ChatTemplate(TokenizerWithTemplate(ALL_TEMPLATES[name]))
    form = form_of([key for key, value in record.items() if value], "SFT")
    assert form
    return render(CHATS[name], conversation_of(form.convert(record)))


def words_in(texts: list[str]) -> list[str]:
    return re.findall(r"\b[se]\d\b", " ".join(texts))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", sorted(ALL_TEMPLATES))
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
@given(messages=conversations())
def test_each_form_is_rendered_whole_or_refused(
    name: str, form: str, messages: Messages
) -> None:
    try:
        rendering = rendering_in(name, FORMS[form](messages))
    except InvalidRecord as error:
        refusal = str(error)
    else:
        assert_whole(rendering, messages, form)
        return
    # Of these templates only those without a system message refuse a conversation of turns.
    assert messages[0]["role"] == "system"
    assert "the chat template rejected the conversation: System role" in refusal


def assert_whole(rendering: Rendering, messages: Messages, form: str) -> None:
    """Check that each text is in a row or named, and that each answer is in the loss once."""
    named = "\n".join(rendering.unrendered)
    rows = ["".join(example.text.split()) for example in rendering.examples]
    in_loss = words_in(["".join(turns) for turns in learned_by_example(rendering)])
    for number, message in enumerate(messages):
        if f"messages[{number}]" in named:
            continue
        text = "".join(message["content"].split())
        assert any(text in row for row in rows)
        is_learned = message["role"] == "assistant"
        if form == "TRL's prompt and completion":
            is_learned = message is messages[-1]
        assert in_loss.count(f"s{number}") == is_learned
        assert in_loss.count(f"e{number}") == is_learned


def marked_by_trl(name: str, messages: Messages) -> str:
    """Return what TRL's variant of a template marks."""
    of_template = with_parts(messages) if name in OF_PARTS else messages
    rows, spans = render_jinja_template(
        [of_template],
        chat_template=TRL_TEMPLATES[f"{name}_training"],
        return_assistant_tokens_mask=True,
        bos_token="<bos>",
        eos_token="<eos>",
    )
    return "".join(rows[0][start:end] for start, end in spans[0])


def answers_in(text: str) -> list[str]:
    """Return each text between its first and its last word."""
    return [match[0] for match in re.finditer(r"\bs(\d)\b.*?\be\1\b", text, re.DOTALL)]


@pytest.mark.parametrize("name", MARKED)
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
@given(messages=conversations())
def test_loss_has_the_answers_that_trl_marks(name: str, messages: Messages) -> None:
    try:
        rendering = rendering_in(name, {"messages": messages})
    except InvalidRecord:
        return
    if rendering.unrendered:
        return
    learned = "".join("".join(turns) for turns in learned_by_example(rendering))
    expected = [
        message["content"] for message in messages if message["role"] == "assistant"
    ]
    assert answers_in(learned) == answers_in(marked_by_trl(name, messages)) == expected
