"""Generated conversations with calls of tools, in each form of records, and the chat templates shipped as data.

Each text is in a rendered row or refused by name, and each turn is in the loss exactly once.
"""

import json
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trainer.generated_conversations import (
    FORMS,
    Messages,
    conversations,
    tools_for,
)
from support.trainer.renderings import learned_by_example
from support.trainer.shipped_templates import ALL_TEMPLATES, rendering_in
from support.trainer.tool_calls import DESCRIPTION

from finetune_trainer.data.records.conversations import REASONING_NAMES
from finetune_trainer.data.records.records import InvalidRecord
from finetune_trainer.data.records.rendering import Rendering

EXAMPLES = 200 if os.environ.get("TRAINING") == "all" else 8
PLACE = re.compile(r"(messages\[\d+\](?:\.[\w\[\]]+)*|tools[\w.\[\]]*)(?:: | )")
REFUSAL = re.compile(
    r"the chat template rejected the conversation: "
    r"|no message of the assistant is in the loss|the role assistant"
)


class Text(NamedTuple):
    """A text of a record."""

    message: int | None
    """Index of its message; None for a text of the tools."""
    text: str
    is_learned: bool


def texts_in(messages: Messages, form: str) -> Iterator[Text]:
    """Yield all texts of a conversation."""
    last = len(messages) - 1
    for index, message in enumerate(messages):
        is_learned = message["role"] == "assistant" and message.get("weight", 1) == 1
        if form == "TRL's prompt and completion":
            is_learned = is_learned and index == last
        if message["content"]:
            yield Text(index, message["content"], is_learned)
        for name in REASONING_NAMES:
            if name in message:
                yield Text(index, message[name], is_learned)
        for call in message.get("tool_calls", ()):
            yield Text(index, call["function"]["arguments"]["a"], is_learned)
    if tools_for(messages):
        yield Text(None, DESCRIPTION, is_learned=False)


def letters(text: str) -> str:
    """Return the letters and digits of a text: templates write other white space, and escape quotes."""
    return re.sub(r"[\W_]+", "", text)


def forms_of(text: str) -> set[str]:
    """Return a text as it may be rendered: as it is, or as JSON, whose escapes have letters."""
    escaped = (json.dumps(text, ensure_ascii=is_ascii) for is_ascii in (False, True))
    return {letters(form) for form in (text, *escaped)}


def places_named(rendering: Rendering) -> set[str]:
    """Return the messages, by their indexes, and the tools of which a sentence speaks."""
    named = set()
    for sentence in rendering.unrendered:
        match = PLACE.match(sentence)
        assert match, sentence
        named.add(match[1])
    return named


def is_named(text: Text, places: set[str]) -> bool:
    prefix = "tools" if text.message is None else f"messages[{text.message}]"
    return any(place.startswith(prefix) for place in places)


def check_is_whole(rendering: Rendering, messages: Messages, form: str) -> None:
    """Check that each text is in a row or named, and that a learned text is in the loss once."""
    places = places_named(rendering)
    rows = [letters(example.text) for example in rendering.examples]
    in_loss = letters(
        "".join("".join(turns) for turns in learned_by_example(rendering))
    )
    texts = list(texts_in(messages, form))
    last = max(text.message or 0 for text in texts if text.is_learned)
    for text in texts:
        if is_named(text, places):
            continue
        forms = forms_of(text.text)
        is_rendered = any(form in row for row in rows for form in forms)
        # Behind the last turn of the loss, no example needs a text.
        assert is_rendered or (text.message or 0) > last, text
        if text.message is not None:
            counts = [in_loss.count(form) for form in forms]
            assert max(counts) == text.is_learned, text


def checked_messages(form: str, messages: Messages) -> Messages:
    """Return the messages as the record of a form has them: ShareGPT has a message for each call."""
    if form != "ShareGPT":
        return messages
    divided: Messages = []
    for message in messages:
        rest: dict[str, Any] = {
            key: value for key, value in message.items() if key != "tool_calls"
        }
        calls = message.get("tool_calls", ())
        for call in calls:
            divided.append(rest | {"content": "", "tool_calls": [call]})
            rest = {
                key: value for key, value in rest.items() if key not in REASONING_NAMES
            }
        if not calls and message["content"]:
            divided.append(rest)
    return divided


@pytest.mark.parametrize("name", sorted(ALL_TEMPLATES))
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
@given(form=st.sampled_from(sorted(FORMS)), messages=conversations())
def test_calls_are_rendered_whole_or_refused(
    name: str, form: str, messages: Messages
) -> None:
    try:
        rendering = rendering_in(name, FORMS[form](messages))
    except InvalidRecord as error:
        refusal = str(error)
    else:
        check_is_whole(rendering, checked_messages(form, messages), form)
        return
    assert REFUSAL.search(refusal), refusal


def test_turn_begins_at_no_earlier_turn_with_the_same_opening() -> None:
    """The prompt of a server ends with empty reasoning here, which an earlier turn has, and the last turn has not."""
    function = {"name": "add", "arguments": {"a": "a4 b4"}}
    call = {"id": "call00000", "type": "function", "function": function}
    messages: Messages = [
        {"role": "user", "content": "s0 e0"},
        {"role": "assistant", "content": "s1 e1", "tool_calls": [call]},
        {"role": "tool", "content": "s2 e2", "tool_call_id": "call00000"},
        {"role": "assistant", "content": "s3 e3"},
        {"role": "user", "content": "s4 e4"},
        {"role": "assistant", "content": "s5 e5", "tool_calls": [call]},
        {"role": "tool", "content": "s6 e6", "tool_call_id": "call00000"},
        {"role": "assistant", "content": "s7 e7", "reasoning_content": "r7 why t7"},
    ]
    form = "TRL's prompt and completion"
    rendering = rendering_in("qwen3_5_nothink_training", FORMS[form](messages))
    check_is_whole(rendering, messages, form)
