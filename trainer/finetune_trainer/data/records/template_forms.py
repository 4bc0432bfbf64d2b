"""Find the forms in which a chat template reads messages, and give messages these forms.

Templates differ in small ways: the arguments of a call as an object or as JSON text, the content as text or as parts,
`developer` or `system`, reasoning in a key of its own or inside the content. Each is decided once for a template, by
rendering a short conversation with a marked text.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from finetune_trainer.data.records.conversations import (
    REASONING_NAMES,
    Conversation,
    Message,
)

MARK = "\ue000answer\ue001"
"""Two private-use characters make it distinct from any real content."""
THINKING = re.compile(r"\s*(?:<think>)?(.*?)</think>(.*)", re.DOTALL)
"""Reasoning and answer in one content. The opening tag may be missing: some servers write it into the prompt."""

TextOf = Callable[[Conversation], str | None]


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a template reads the calls of a message."""

    as_text: bool
    """Whether the arguments are JSON text in place of an object."""
    null_content: bool
    """Whether an empty content is null."""


PLAIN_CALLS = CallForm(as_text=False, null_content=False)
CALL_FORMS = (
    PLAIN_CALLS,
    CallForm(as_text=True, null_content=False),
    CallForm(as_text=False, null_content=True),
    CallForm(as_text=True, null_content=True),
)
"""In the order in which they are tried."""
MARKED_ARGUMENTS = {"value": MARK}
MARKED_NAME = "ask\ue002"


class TemplateForms:
    """The forms that a template reads; `text_of` renders messages as they are, or returns None."""

    def __init__(self, text_of: TextOf) -> None:
        self._text_of = text_of

    def messages(self, messages: list[Message]) -> list[Message]:
        """Return messages in the forms that the template reads."""
        return [self._message(message) for message in messages]

    def with_reasoning(self, conversation: Conversation) -> Conversation:
        """Return the conversation with reasoning in a key of its own if the template cuts it from the content."""
        messages = [self._with_reasoning(message) for message in conversation.messages]
        return replace(conversation, messages=messages)

    def _message(self, message: Message) -> Message:
        changes: Message = {}
        if message["role"] == "developer":
            changes["role"] = self._developer
        for name in REASONING_NAMES:
            if name in message:
                # Under all its names: what the record itself has under another name stays.
                changes |= dict.fromkeys(REASONING_NAMES, message[name]) | {
                    key: message[key] for key in REASONING_NAMES if key in message
                }
                break
        if "tool_calls" in message:
            changes |= in_form(message, self._calls)
        content = changes.get("content", message["content"])
        if content and self._reads_parts:
            changes["content"] = _parts(content)
        return message | changes if changes else message

    def _with_reasoning(self, message: Message) -> Message:
        content = message["content"]
        if message["role"] != "assistant" or "</think>" not in content:
            return message
        if not self._cuts_thinking or any(name in message for name in REASONING_NAMES):
            return message
        thinking = THINKING.fullmatch(content)
        if thinking is None:
            return message
        reasoning, answer = thinking.groups()
        return message | {
            "reasoning_content": reasoning.strip(),
            "content": answer.strip(),
        }

    @cached_property
    def _developer(self) -> str:
        """The role under which the template renders the message of a developer."""
        for role in ("developer", "system"):
            if self._shows([{"role": role, "content": MARK}, *_exchange("!")]):
                return role
        return "developer"

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template renders a content as parts, and no content as text."""
        as_text = _exchange(MARK)
        if self._shows(as_text):
            return False
        as_parts = [
            message | {"content": _parts(message["content"])} for message in as_text
        ]
        return self._shows(as_parts)

    @cached_property
    def _cuts_thinking(self) -> bool:
        """Whether the template cuts reasoning from the content, and renders it from its own key."""
        if self._shows(_exchange(f"<think>\n{MARK}\n</think>\n\n!")):
            return False
        question, answer = _exchange("!")
        return self._shows([question, answer | dict.fromkeys(REASONING_NAMES, MARK)])

    @cached_property
    def _calls(self) -> CallForm:
        """The form in which the template renders a call and its arguments as JSON or in a syntax of its own."""
        for form in CALL_FORMS:
            text = self._text_of_call(form) or ""
            # A template that writes an object without `tojson` writes Python's syntax, which is no JSON.
            if MARK in text and str(MARKED_ARGUMENTS) not in text:
                return form
        return PLAIN_CALLS

    @cached_property
    def shows_arguments(self) -> bool:
        """Whether the template renders the arguments of a call, as far as it renders a call at all."""
        text = self._text_of_call(self._calls) or ""
        return MARK in text or MARKED_NAME not in text

    def _text_of_call(self, form: CallForm) -> str | None:
        call = {
            "id": "000000000",
            "type": "function",
            "function": {"name": MARKED_NAME, "arguments": MARKED_ARGUMENTS},
        }
        question, answer = _exchange("")
        message = answer | {"tool_calls": [call]}
        return self._text_of(Conversation([question, message | in_form(message, form)]))

    def _shows(self, messages: list[Message]) -> bool:
        return MARK in (self._text_of(Conversation(messages)) or "")


def in_form(message: Message, form: CallForm) -> Message:
    """Return the keys of a message with calls that differ in a form."""
    changes: Message = {}
    if form.null_content and not message["content"]:
        changes["content"] = None
    if form.as_text:
        changes["tool_calls"] = [
            _with_text_arguments(call) for call in message["tool_calls"]
        ]
    return changes


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        return call
    text = json.dumps(arguments, ensure_ascii=False)
    return call | {"function": function | {"arguments": text}}


def _exchange(answer: str) -> list[Message]:
    return [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": answer},
    ]


def _parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]
