"""Conversations rendered by the chat templates of real models: no text is lost, and each answer is learned once.

TRL ships the templates as data, and for many of them a variant whose marks say what to learn.
"""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trainer.renderings import (
    TEMPLATES,
    TokenizerWithTemplate,
    learned_by_example,
    rendering_of,
)
from transformers.utils.chat_template_utils import render_jinja_template

from finetune_trainer.data.records.chat_template import (
    ChatTemplate,
    dated_template_of,
)
from finetune_trainer.data.records.conversations import (
    REASONING_NAMES,
    conversation_of,
)
from finetune_trainer.data.records.records import InvalidRecord
from finetune_trainer.data.records.rendering import render

NAMES = sorted(
    path.stem
    for path in TEMPLATES.glob("*.jinja")
    if not path.stem.endswith("_training")
)
MARKED_NAMES = [
    name for name in NAMES if (TEMPLATES / f"{name}_training.jinja").exists()
]
CHATS: dict[str, ChatTemplate] = {}
"""Compiled once for all examples of a template."""

pieces = st.lists(
    st.sampled_from(["word", " ", "\n", "\n\n", "é", '"', "{", "<think>", "</think>"]),
    max_size=6,
).map("".join)


def text(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def chat_of(name: str) -> ChatTemplate:
    if name not in CHATS:
        CHATS[name] = ChatTemplate(TokenizerWithTemplate(text(name)))
    return CHATS[name]


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Return messages whose texts begin and end with words that are nowhere else."""
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        role = draw(st.sampled_from(["system", "developer"]))
        messages.append({"role": role, "content": f"s0 {draw(pieces)} e0"})
    for _ in range(draw(st.integers(1, 3))):
        number = len(messages)
        question = f"s{number} {draw(pieces)} e{number}"
        messages.append({"role": "user", "content": question})
        number += 1
        answer = {"role": "assistant", "content": f"s{number} {draw(pieces)} e{number}"}
        if draw(st.booleans()):
            name = draw(st.sampled_from(REASONING_NAMES))
            answer[name] = f"r{number} why t{number}"
        messages.append(answer | {"weight": draw(st.sampled_from([1, 1, 1, 0]))})
    return messages


def places(messages: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the texts of each place, without the tags around reasoning, which templates write themselves."""
    return {
        f"messages[{index}].{key}": re.split("</?think>", value)
        for index, message in enumerate(messages)
        for key, value in message.items()
        if isinstance(value, str) and key != "role"
    }


def without_spaces(value: str) -> str:
    return "".join(value.split())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(messages=conversations())
def test_each_text_is_rendered_or_named(
    name: str, messages: list[dict[str, Any]]
) -> None:
    try:
        rendering = render(chat_of(name), conversation_of({"messages": messages}))
    except InvalidRecord:
        return
    named = {sentence.partition(": ")[0] for sentence in rendering.unrendered}
    rows = [without_spaces(example.text) for example in rendering.examples]
    for place, texts in places(messages).items():
        is_there = all(
            any(without_spaces(part) in row for row in rows) for part in texts
        )
        assert is_there or place in named or is_behind(messages, place)

    in_loss = "".join(
        turn for example in learned_by_example(rendering) for turn in example
    )
    for index, message in enumerate(messages):
        if f"messages[{index}].content" in named:
            continue
        is_learned = message["role"] == "assistant" and message["weight"] == 1
        words = re.findall(r"\w+", in_loss)
        assert words.count(f"s{index}") == words.count(f"e{index}") == is_learned


def is_behind(messages: list[dict[str, Any]], place: str) -> bool:
    """Return whether no learned turn is at a place or behind it, so that nothing can be learned from it."""
    index = int(re.findall(r"\d+", place)[0])
    return all(
        message["role"] != "assistant" or message["weight"] == 0
        for message in messages[index:]
    )


def prompt_of(name: str, messages: list[dict[str, Any]]) -> str:
    prompts, _ = render_jinja_template(
        [messages],
        chat_template=dated_template_of(TokenizerWithTemplate(text(name))),
        add_generation_prompt=True,
        bos_token="<bos>",
        eos_token="<eos>",
    )
    return prompts[0]


THREE_TURNS = [
    {"role": role, "content": f"{role} {number}."}
    for number in (1, 2, 3)
    for role in ("user", "assistant")
]


@pytest.mark.parametrize("name", NAMES)
def test_turns_begin_behind_the_prompts_of_servers(name: str) -> None:
    rendering = rendering_of(text(name), {"messages": THREE_TURNS})
    if rendering.unrendered:
        assert name.startswith(("deepseek", "nemotron"))
        assert "servers ask for it behind" in rendering.unrendered[0]
        return
    if name in {"idefics3", "smolvlm", "llava_next"}:
        # These templates read parts, which the other side of this test does not write.
        return
    turns = {
        index: (example.text, span)
        for example in rendering.examples
        for index, span in example.spans.items()
    }
    assert sorted(turns) == [1, 3, 5]
    for index, (row, (start, _)) in turns.items():
        assert row[:start] == prompt_of(name, THREE_TURNS[:index])


def marked_by_trl(name: str, messages: list[dict[str, Any]]) -> list[str]:
    """Return what TRL's variant of a template marks in each turn."""
    if name in {"idefics3", "smolvlm", "llava_next"}:
        messages = [
            message | {"content": [{"type": "text", "text": message["content"]}]}
            for message in messages
        ]
    rows, spans = render_jinja_template(
        [messages],
        chat_template=text(f"{name}_training"),
        return_assistant_tokens_mask=True,
        bos_token="<bos>",
        eos_token="<eos>",
    )
    joined = "".join(rows[0][start:end] for start, end in spans[0])
    # A mark for each part of a turn, or for the turn: the answers divide them.
    return re.split(r"(?<=assistant [12]\.)", joined)


@pytest.mark.parametrize("reasoning", [False, True], ids=["plain", "reasoning"])
@pytest.mark.parametrize("name", MARKED_NAMES)
def test_turns_equal_what_marks_of_trl_learn(name: str, *, reasoning: bool) -> None:
    """Up to the ends, and to the beginning that is in the server's prompt: TRL marks some of it, too.

    With reasoning, the last turn is compared only: most variants drop the reasoning of earlier turns.
    """
    messages = THREE_TURNS
    if reasoning:
        messages = [
            message | {"reasoning_content": "So."}
            if message["role"] == "assistant"
            else message
            for message in messages
        ]
    rendering = rendering_of(text(name), {"messages": messages})
    texts = "".join(
        turn for example in learned_by_example(rendering) for turn in example
    )
    turns = re.split(r"(?<=assistant [12]\.)", texts)
    marked = marked_by_trl(name, messages)
    assert len(turns) == len(marked) == 3
    first = 2 if reasoning else 0
    for number in range(first, 3):
        answer = f"assistant {number + 1}."
        before, _, _ = turns[number].partition(answer)
        marked_before, _, _ = marked[number].partition(answer)
        # The end of the turn before is in front of the beginning.
        beginning = before.split(">")[-1] if number else before
        assert without_spaces(marked_before).endswith(without_spaces(beginning))
    if name == "glm4moe":
        # The template writes no end. TRL marks <|user|>, with which the next turn begins; here it is EOS.
        assert turns[2].endswith("assistant 3.<eos>")
    else:
        assert turns[2].split("3.")[-1] == marked[2].split("3.")[-1].rstrip()
