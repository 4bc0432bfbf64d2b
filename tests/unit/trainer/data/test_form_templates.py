"""Generated conversations in each form of records, and the chat templates that TRL and transformers ship as data.

Each text is in a rendered row or refused by name, and each completion is in the loss exactly once.
"""

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trainer.renderings import learned_by_example
from support.trainer.shipped_templates import (
    ALL_TEMPLATES,
    rendering_in,
    with_parts,
)

from finetune_trainer.data.records.records import InvalidRecord
from finetune_trainer.data.records.rendering import Rendering

EXAMPLES = 50 if os.environ.get("TRAINING") == "all" else 4
Messages = list[dict[str, str]]

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
