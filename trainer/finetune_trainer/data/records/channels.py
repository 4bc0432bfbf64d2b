"""Read messages of OpenAI's harmony format, in which gpt-oss speaks on channels.

Its reasoning is a message of the channel analysis, a call of a function a message of the channel commentary to
`functions.NAME`, and its answer a message of the channel final. They become reasoning, tool calls and content, which
chat templates render. The template of gpt-oss writes these channels again.
"""

from typing import Any

from finetune_trainer.data.records.conversations import REASONING_NAMES
from finetune_trainer.data.records.records import Fields, InvalidRecord

FUNCTIONS = "functions."
"""Beginning of the name of a function to which a call goes."""
JSON_TYPES = frozenset({"json", "<|constrain|>json"})
"""Types of the content of a call, which is always JSON in a chat template."""


def has_channels(messages: list[Any]) -> bool:
    """Return whether a message speaks on a channel."""
    return any(
        isinstance(message, dict) and message.get("channel") is not None
        for message in messages
    )


def without_channels(messages: list[Any], path: str) -> list[Any]:
    """Return messages with reasoning, calls and answers in place of channels; raise InvalidRecord for lost reasoning.

    A message on a channel that has no such form is returned as it is: the check of the rendered text names it.
    """
    read: list[Any] = []
    reasoning: list[str] = []
    for index, message in enumerate(messages):
        if _is_reasoning(message):
            reasoning.append(message["content"])
            continue
        converted = _converted(message)
        if reasoning:
            converted = _with_reasoning(converted, reasoning, f"{path}[{index - 1}]")
            reasoning = []
        read.append(converted)
    if reasoning:
        raise _without_answer(f"{path}[{len(messages) - 1}]")
    return read


def _is_reasoning(message: Any) -> bool:
    if not isinstance(message, dict) or message.get("channel") != "analysis":
        return False
    others = {key for key, value in message.items() if value is not None}
    is_plain = others == {"role", "channel", "content"}
    return (
        is_plain
        and message["role"] == "assistant"
        and isinstance(message["content"], str)
    )


def _with_reasoning(message: Any, reasoning: list[str], place: str) -> Fields:
    """Return the answer or the call with the reasoning before it; raise InvalidRecord if it is neither."""
    if not isinstance(message, dict) or message.get("role") != "assistant":
        raise _without_answer(place)
    if any(message.get(name) is not None for name in REASONING_NAMES):
        raise InvalidRecord(
            f"{place} is reasoning, and the next message has reasoning of its own: keep one of them"
        )
    return {**message, "thinking": "\n".join(reasoning)}


def _without_answer(place: str) -> InvalidRecord:
    return InvalidRecord(
        f"{place}.channel is analysis, and no answer or call of the assistant follows it: add it, or remove the message"
    )


def _converted(message: Any) -> Any:
    """Return a message without its channel; one that is neither call, answer nor a tool's result as it is."""
    if not isinstance(message, dict):
        return message
    channel = message.get("channel")
    recipient = message.get("recipient")
    match message.get("role"):
        case "assistant" if _is_call(message):
            return _call(message)
        case "assistant" if channel == "final" and recipient in {None, "all", "user"}:
            return _without(message, "channel", "recipient")
        case "tool" if recipient in {None, "assistant"}:
            result = _without(message, "channel", "recipient")
            name = result.get("name")
            if isinstance(name, str):
                result["name"] = name.removeprefix(FUNCTIONS)
            return result
        case _:
            return message


def _is_call(message: Fields) -> bool:
    recipient = message.get("recipient")
    kind = message.get("content_type")
    return (
        message.get("channel") == "commentary"
        and isinstance(recipient, str)
        and recipient.startswith(FUNCTIONS)
        and (kind is None or kind in JSON_TYPES)
    )


def _call(message: Fields) -> Fields:
    """Return OpenAI's tool call of a message to a function, whose content is the arguments."""
    function = {
        "name": message["recipient"].removeprefix(FUNCTIONS),
        "arguments": message.get("content"),
    }
    rest = _without(message, "channel", "recipient", "content_type")
    return {
        **rest,
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }


def _without(message: Fields, *keys: str) -> Fields:
    return {key: value for key, value in message.items() if key not in keys}
