"""Render a conversation to examples, and name each text of the record that none of them holds."""

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from finetune_trainer.data.records.chat_template import ChatTemplate
from finetune_trainer.data.records.conversations import (
    REASONING_NAMES,
    TEXT_KEYS,
    Conversation,
    Message,
    parts_left_out,
)
from finetune_trainer.data.records.labels import LEARNING
from finetune_trainer.data.records.turns import Division, Example, divide
from finetune_trainer.data.records.unrendered import (
    Place,
    RenderedText,
    texts_of,
)

THINK_TAGS = re.compile(r"</?think>")
"""Templates write the tags around reasoning themselves."""
ENDS_REASONING = re.compile(r"\A\s*<think>|\n\s*</think>|</think>\s*(\n|\Z)")
"""Where a content has reasoning before its answer. A tag within a sentence is text that speaks of the tag."""
MAX_SHAPES = 1000
"""Limit of the shapes of conversations that are kept for a template."""
ROUTES = frozenset({"channel", "recipient"})
"""Keys of a message that say to whom it speaks: gpt-oss writes its reasoning as a message of the channel analysis."""
_USUAL_KEYS = ("role", "content")
_OWN_PLACES = frozenset({*_USUAL_KEYS, "tool_calls", "train", *REASONING_NAMES})
Places = list[list[Place]]
"""Reasoning and content of each message."""


class Rendering(NamedTuple):
    """A conversation as examples, and what is wrong with them."""

    examples: list[Example]
    unrendered: list[str]
    """A sentence for each text that is in no example or that no turn follows, and for each turn behind another prompt
    than a server's."""
    ends_unlearned: bool = False
    """Whether the last turns are out of the loss, so that no example needs what is there."""


def render(chat: ChatTemplate, conversation: Conversation, first: int = 0) -> Rendering:
    """Return the examples in which the turns of the assistant from message `first` on are learned.

    Raise InvalidRecord if the template rejects the conversation, or if nothing would end a turn.
    """
    chat = chat.variant_for(conversation)
    conversation = chat.forms.with_reasoning(conversation)
    division = divide(chat, conversation, first)
    places = [
        list(_ordered_places(index, message))
        for index, message in enumerate(conversation.messages)
    ]
    missing = [
        *_ignored_parts(chat, conversation, division.text),
        *_missing(chat, conversation, division, places),
    ]
    # A place may hold several texts.
    sentences = [_not_rendered(name) for name in dict.fromkeys(missing)]
    sentences += _unmarked(conversation, division, places)
    sentences += _taken_for_reasoning(conversation, division)
    sentences += _unread_switches(chat, conversation, division.text)
    last_turn = conversation.last_turn
    behind = [
        f"messages[{index}]: no turn of the assistant follows, so that nothing learns from it: "
        "remove it, or allow it with prepare.unrendered: Warn"
        for index, message in enumerate(conversation.messages)
        if index > last_turn and _has_text(index, message)
    ]
    learned = conversation.learned_turns(first)
    return Rendering(
        division.examples,
        sentences + behind + division.unasked,
        ends_unlearned=not learned or learned[-1] < last_turn,
    )


def _not_rendered(name: str) -> str:
    """Return the sentence about a place whose text is in no example, with the fixes."""
    _, _, key = name.rpartition(".")
    fix = "write its text into content, remove it" if key in TEXT_KEYS else "remove it"
    return (
        f"{name}: the chat template does not render it: "
        f"{fix}, set prepare.chatTemplate, or allow it with prepare.unrendered: Warn"
    )


def _ignored_parts(
    chat: ChatTemplate, conversation: Conversation, text: str
) -> Iterator[str]:
    """Yield the names of the tools and calls without which the rendered text is the same."""
    for name, rest in parts_left_out(conversation):
        if chat.text_or_none(rest) == text:
            yield name


def _unmarked(
    conversation: Conversation, division: Division, places: Places
) -> Iterator[str]:
    """Yield a sentence for each text of a learned turn that the template's {% generation %} tags leave out."""
    for example in division.examples:
        if example.marked is None:
            continue
        for index, (start, end) in example.spans.items():
            marks = [
                example.text[mark_start:mark_end]
                for mark_start, mark_end in example.marked
                if mark_end > start and mark_start < end
            ]
            if not marks:
                continue
            marked = [*places[index], *_called(index, conversation.messages[index])]
            names = [place.name for place in marked if not _holds(marks, place)]
            for name in dict.fromkeys(names):
                yield (
                    f"{name}: the marks {{% generation %}} of the chat template leave it out: "
                    "set prepare.chatTemplate or unrendered: Warn"
                )


def _taken_for_reasoning(
    conversation: Conversation, division: Division
) -> Iterator[str]:
    """Yield a sentence for each learned answer that speaks of the tag </think>, and that the template divides there."""
    for example in division.examples:
        for index, (start, end) in example.spans.items():
            content = conversation.messages[index]["content"]
            if "</think>" not in content or _has_reasoning(content):
                continue
            if content.strip() not in example.text[start:end]:
                yield (
                    f"messages[{index}].content: the chat template takes the text before </think> for reasoning: "
                    "write the tag otherwise, or set prepare.chatTemplate or unrendered: Warn"
                )


def _has_reasoning(content: str) -> bool:
    # Few contents have the tag, and the search in long white space is slow.
    return "</think>" in content and ENDS_REASONING.search(content) is not None


def _called(index: int, message: Message) -> Iterator[Place]:
    """Yield the names and the arguments of the calls of a message."""
    for number, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        name = f"messages[{index}].tool_calls[{number}].function"
        yield Place(f"{name}.name", function["name"])
        yield from texts_of(function["arguments"], f"{name}.arguments", labels=True)


def _unread_switches(
    chat: ChatTemplate, conversation: Conversation, text: str
) -> Iterator[str]:
    """Yield a sentence for each switch of a turn that the template does not read, such as `mask: true`.

    It may mean that the turn, or a part of it, is not to be learned.
    """
    for index, message in enumerate(conversation.messages):
        if message["role"] != "assistant" or not message.keys() - _OWN_PLACES:
            continue
        for name, value in message.items():
            is_switch = name in ROUTES or LEARNING.search(name) or _may_be_switch(value)
            if name in _OWN_PLACES or not is_switch:
                continue
            rest = {key: inner for key, inner in message.items() if key != name}
            if chat.text_or_none(conversation.with_message(index, rest)) == text:
                yield (
                    f"messages[{index}].{name}: neither the chat template nor the loss reads it: "
                    "remove it, write train: false if the turn is not to be learned, or set unrendered: Warn"
                )


def _may_be_switch(value: object) -> bool:
    if isinstance(value, bool):
        return True
    # Such as axolotl's train_detail: a list of positions.
    # An empty list says nothing, such as OpenAI's annotations.
    is_list = isinstance(value, list | dict) and bool(value)
    return is_list and not list(texts_of(value, ""))


def _missing(
    chat: ChatTemplate, conversation: Conversation, division: Division, places: Places
) -> Iterator[str]:
    """Yield the names of the places whose text is in no example."""
    turns = {
        index: example.text[start:end]
        for example in division.examples
        for index, (start, end) in example.spans.items()
    }
    for place in texts_of(conversation.tools, "tools"):
        if not _holds([division.text], place):
            yield place.name
    are_others_certain = _are_in_order(conversation, division, places)
    for index, message in enumerate(conversation.messages):
        is_certain = are_others_certain
        if index in turns:
            is_certain = _position_behind(places[index], turns[index], 0) is not None
        # Nearly always: this runs for every message.
        if is_certain and len(message) == len(_USUAL_KEYS):
            continue
        # A learned turn must have its texts itself.
        rows = [turns[index]] if index in turns else _rows_with(division, index)
        for place in () if is_certain else places[index]:
            if not _holds(rows, place) or not _shows(
                chat, conversation, division, place
            ):
                yield place.name
        yield from _missing_beside(chat, index, message, rows)


def _missing_beside(
    chat: ChatTemplate, index: int, message: Message, rows: list[str]
) -> Iterator[str]:
    """Yield the names of the places of a message, besides reasoning and content, whose text is in no row."""
    for place in _other_places(index, message):
        if not _holds(rows, place):
            yield place.name
    if "tool_calls" in message and not chat.forms.shows_arguments:
        yield from _argument_places(index, message)


def _has_text(index: int, message: Message) -> bool:
    return bool([*_ordered_places(index, message), *_other_places(index, message)])


def _are_in_order(
    conversation: Conversation, division: Division, places: Places
) -> bool:
    """Return whether the last example has all texts as they are, and in the order of the messages.

    Then none of them is there by chance only, as a part of another text.
    """
    if not division.examples:
        return False
    # It has most of the messages.
    example = division.examples[-1]
    if example.messages < len(conversation.messages):
        return False
    position = 0
    for index in range(len(conversation.messages)):
        if index in example.spans:
            start, end = example.spans[index]
            if start < position:
                return False
            position = end
            continue
        behind = _position_behind(places[index], example.text, position)
        if behind is None:
            return False
        position = behind
    return True


def _position_behind(places: Iterable[Place], text: str, position: int) -> int | None:
    """Return the position behind all places if the text has them in this order from a position on, else None."""
    for place in places:
        trimmed = place.text.strip()
        start = text.find(trimmed, position)
        if start < 0:
            return None
        position = start + len(trimmed)
    return position


def _rows_with(division: Division, index: int) -> list[str]:
    """Return the texts of the examples with a message. A message behind all examples is in the whole text."""
    texts = [example.text for example in division.examples if index < example.messages]
    return texts or [division.text]


def _holds(rows: list[str], place: Place) -> bool:
    trimmed = place.text.strip()
    # Nearly always: the search for other forms takes longer.
    if any(trimmed in row for row in rows):
        return True
    return any(RenderedText(row).holds(place.text) for row in rows)


def _shows(
    chat: ChatTemplate, conversation: Conversation, division: Division, place: Place
) -> bool:
    """Return whether the template shows a mark in a place: the place's text may be a part of another text."""
    shown = _shown_places(chat, conversation, division)
    return shown is None or place.name in shown


def _shown_places(
    chat: ChatTemplate, conversation: Conversation, division: Division
) -> frozenset[str] | None:
    """Return the names of the places that the template renders, found by marks; None if it rejects marks."""
    lengths = tuple(example.messages for example in division.examples)
    shape = (
        lengths,
        bool(conversation.tools),
        tuple(
            (message["role"], bool(message["content"]), *message)
            for message in conversation.messages
        ),
    )
    if shape not in chat.shown_places:
        if len(chat.shown_places) >= MAX_SHAPES:
            chat.shown_places.clear()
        chat.shown_places[shape] = _marked_places(chat, conversation, lengths)
    return chat.shown_places[shape]


def _marked_places(
    chat: ChatTemplate, conversation: Conversation, lengths: tuple[int, ...]
) -> frozenset[str] | None:
    marks: dict[str, str] = {}
    messages = []
    for index, message in enumerate(conversation.messages):
        marked = dict(message)
        for place in _ordered_places(index, message):
            _, _, key = place.name.rpartition(".")
            mark = f"\ue000{len(marks)}\ue001"
            marks[mark] = place.name
            marked[key] = mark
        messages.append(marked)
    marked_conversation = Conversation(messages, conversation.tools)
    texts = []
    for length in {*lengths, len(messages)}:
        text = chat.text_or_none(marked_conversation.before(length))
        if text is None:
            return None
        texts.append(text)
    return frozenset(
        name for mark, name in marks.items() if any(mark in text for text in texts)
    )


def _ordered_places(index: int, message: Message) -> Iterator[Place]:
    """Yield reasoning and content, in the order in which templates render them."""
    # Few messages have reasoning: this runs for every message.
    if not message.keys().isdisjoint(REASONING_NAMES):
        yield from _reasoning_places(index, message)
    content = message["content"]
    name = f"messages[{index}].content"
    pieces = [content]
    if message["role"] == "assistant" and _has_reasoning(content):
        pieces = THINK_TAGS.split(content)
    for piece in pieces:
        if piece.strip():
            yield Place(name, piece)


def _reasoning_places(index: int, message: Message) -> Iterator[Place]:
    reasoning = {
        message[name]: f"messages[{index}].{name}"
        for name in REASONING_NAMES
        if name in message
    }
    for text, name in reasoning.items():
        if text.strip():
            yield Place(name, text)


def _other_places(index: int, message: Message) -> Iterator[Place]:
    """Yield the texts of a message besides reasoning and content."""
    for key, value in message.items():
        if key not in _OWN_PLACES:
            is_text = key in TEXT_KEYS
            yield from texts_of(value, f"messages[{index}].{key}", labels=is_text)
    for number, call in enumerate(message.get("tool_calls", ())):
        yield from _call_places(call, f"messages[{index}].tool_calls[{number}]")


def _argument_places(index: int, message: Message) -> Iterator[str]:
    """Yield the names of the arguments of all calls that have any."""
    for number, call in enumerate(message["tool_calls"]):
        if call["function"]["arguments"]:
            yield f"messages[{index}].tool_calls[{number}].function.arguments"


def _call_places(call: dict[str, Any], name: str) -> Iterator[Place]:
    for key, value in call.items():
        if key != "function":
            yield from texts_of(value, f"{name}.{key}")
    for key, value in call["function"].items():
        # An argument is what the model has to write, so that a single word of it counts, too.
        labels = key == "arguments"
        yield from texts_of(value, f"{name}.function.{key}", labels=labels)
