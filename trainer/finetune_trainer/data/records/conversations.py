"""Read a record's conversation: its messages, and the tools that the assistant may call.

Tool calls have OpenAI's form. The chat template renders them, so everything stays as the record has it, with three
exceptions. `arguments` as JSON text becomes an object, because templates of Hugging Face apply `tojson`. A call without
the object `function` gets it. A `content` that is null or absent becomes empty text, which all templates accept.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from finetune_trainer.data.records.records import (
    Fields,
    InvalidRecord,
    check_not_blank,
    kind_of,
    text_of,
)

Message = dict[str, Any]
OPTIONAL_TEXTS = ("name", "tool_call_id", "reasoning_content")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and the function schemas of the tools."""

    messages: list[Message]
    tools: list[Any] | None = None

    def before(self, index: int) -> "Conversation":
        """Return the conversation up to a message, without it."""
        return replace(self, messages=self.messages[:index])

    def with_message(self, index: int, message: Message) -> "Conversation":
        """Return the conversation with another message at an index."""
        return replace(
            self,
            messages=[*self.messages[:index], message, *self.messages[index + 1 :]],
        )


def conversation_of(fields: Fields) -> Conversation:
    """Return the conversation of a record; raise InvalidRecord if its messages or tools have another form."""
    messages = messages_of(fields["messages"], "messages")
    check_has_assistant(messages, "no message")
    return Conversation(messages, tools_of(fields))


def messages_of(value: object, name: str) -> list[Message]:
    """Return the messages of a field; raise InvalidRecord if it is no list of messages."""
    if not isinstance(value, list):
        raise InvalidRecord(
            f"{name} must be a list of {{role, content}}, it is {kind_of(value)}"
        )
    return [
        _message(message, f"{name}[{index}]") for index, message in enumerate(value)
    ]


def check_has_assistant(messages: list[Message], subject: str) -> None:
    """Raise InvalidRecord if no message is the assistant's."""
    roles = list(dict.fromkeys(message["role"] for message in messages))
    if "assistant" not in roles:
        shown = ", ".join(roles)[:60] or "none"
        raise InvalidRecord(f"{subject} has the role assistant (roles: {shown})")


def with_last_arguments(message: Message, text: str) -> Message:
    """Return an assistant's message whose last tool call has this text as its only argument."""
    *others, last = message["tool_calls"]
    function = last["function"]
    # Arguments keep their type: a template renders text and objects differently.
    arguments = text if isinstance(function["arguments"], str) else {"value": text}
    changed = last | {"function": function | {"arguments": arguments}}
    return message | {"tool_calls": [*others, changed]}


def parts_left_out(conversation: Conversation) -> Iterator[tuple[str, Conversation]]:
    """Yield the name of each part that a chat template may ignore, and the conversation without this part.

    These are the tools, every tool call, the text beside tool calls, and the content of every tool's message.
    """
    if conversation.tools:
        yield "tools", replace(conversation, tools=None)
    for index, message in enumerate(conversation.messages):
        for name, rest in _message_parts_left_out(message):
            yield f"messages[{index}].{name}", conversation.with_message(index, rest)


def _message_parts_left_out(message: Message) -> Iterator[tuple[str, Message]]:
    calls = message.get("tool_calls", [])
    is_easily_ignored = bool(calls) or message["role"] == "tool"
    if is_easily_ignored and message["content"].strip():
        yield "content", message | {"content": ""}
    for number in range(len(calls)):
        yield f"tool_calls[{number}]", _without_call(message, number)


def _without_call(message: Message, number: int) -> Message:
    calls = message["tool_calls"]
    others = calls[:number] + calls[number + 1 :]
    if others:
        return message | {"tool_calls": others}
    # Templates test whether the field is there, so an empty list is not the same as no calls.
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _message(value: object, path: str) -> Message:
    if not isinstance(value, dict):
        raise InvalidRecord(
            f"{path} must be an object with role and content, it is {kind_of(value)}"
        )
    if value.get("role") is None:
        raise InvalidRecord(f"{path}.role is missing")
    if value.get("function_call") is not None:
        raise InvalidRecord(
            f"{path}.function_call is OpenAI's earlier form: use tool_calls"
        )
    message: Message = {"role": text_of(value, "role", f"{path}.")}
    calls = _tool_calls(value.get("tool_calls"), f"{path}.tool_calls")
    if calls:
        if message["role"] != "assistant":
            raise InvalidRecord(
                f"{path}.tool_calls: only the role assistant calls tools, not {message['role']}"
            )
        message["tool_calls"] = calls
    if value.get("content") is None and not calls:
        raise InvalidRecord(f"{path}.content is missing")
    message["content"] = _content(value, path)
    if message["role"] == "assistant" and not calls:
        check_not_blank(message["content"], f"{path}.content")
    for name in OPTIONAL_TEXTS:
        if value.get(name) is not None:
            message[name] = text_of(value, name, f"{path}.")
    return message


def _content(message: Message, path: str) -> str:
    if message.get("content") is None:
        return ""
    return text_of(message, "content", f"{path}.")


def _tool_calls(value: object, path: str) -> list[dict[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidRecord(f"{path} must be a list, it is {kind_of(value)}")
    return [_tool_call(call, f"{path}[{index}]") for index, call in enumerate(value)]


def _tool_call(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRecord(
            f"{path} must be an object with function, it is {kind_of(value)}"
        )
    # Some data sets leave out `function` and write name and arguments directly into the call.
    function = value.get("function", value)
    if not isinstance(function, dict):
        raise InvalidRecord(
            f"{path}.function must be an object with name and arguments, it is {kind_of(function)}"
        )
    name = text_of(function, "name", f"{path}.function.")
    arguments = _arguments(function.get("arguments"), f"{path}.function.arguments")
    call: dict[str, Any] = {"type": "function"}
    for key in ("id", "type"):
        if value.get(key) is not None:
            call[key] = value[key]
    call["function"] = {"name": name, "arguments": arguments}
    return call


def _arguments(value: object, path: str) -> dict[str, Any] | str:
    match value:
        case None:
            raise InvalidRecord(
                f"{path} is missing: write {{}} for a call without arguments"
            )
        case dict():
            return value
        case str():
            try:
                parsed = json.loads(value)
            except (ValueError, RecursionError):
                # The template may render text, too.
                return value
            return parsed if isinstance(parsed, dict) else value
        case _:
            raise InvalidRecord(
                f"{path} must be an object or its JSON text, it is {kind_of(value)}"
            )


def tools_of(fields: Fields) -> list[Any] | None:
    """Return the function schemas of a record's tools, or None; raise InvalidRecord if they are no list of objects."""
    value = fields.get("tools")
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise InvalidRecord(f"tools is not JSON: {error}") from None
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise InvalidRecord(
            f"tools must be a list of function schemas, it is {kind_of(value)}"
        )
    for index, tool in enumerate(value):
        if not isinstance(tool, dict):
            raise InvalidRecord(
                f"tools[{index}] must be an object, it is {kind_of(tool)}"
            )
    return value
