"""Conversations that Hypothesis generates, and the forms of records that hold them.

They have calls and answers of tools, reasoning under all its names, weights, and messages of system and developer. Each
text begins and ends with words that are nowhere else in its conversation.
"""

import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from support.trainer.tool_calls import ADD

from finetune_trainer.data.records.conversations import REASONING_NAMES

Message = dict[str, Any]
Messages = list[Message]
Record = dict[str, Any]

pieces = st.lists(
    st.sampled_from(["word", " ", "\n\n", "é", "😀", "{{ x }}", '"', "#", "<b>"]),
    max_size=6,
).map("".join)
words = st.lists(st.sampled_from(["word", " ", "two"]), max_size=4).map("".join)


@st.composite
def conversations(draw: st.DrawFn) -> Messages:
    """Return messages, of which some call tools."""
    messages: Messages = []
    if draw(st.booleans()):
        role = draw(st.sampled_from(["system", "developer"]))
        messages.append(
            {
                "role": role,
                "content": text(draw, 0),
            }
        )
    for _ in range(draw(st.integers(1, 2))):
        messages.append(
            {
                "role": "user",
                "content": text(draw, len(messages)),
            }
        )
        if draw(st.booleans()):
            messages.append(calling(draw, len(messages)))
            for call in messages[-1]["tool_calls"]:
                messages.append(answer_of(draw, len(messages), call))
        answer = {
            "role": "assistant",
            "content": text(draw, len(messages)),
        }
        messages.append(with_reasoning(draw, len(messages), answer))
    return messages


def text(draw: st.DrawFn, number: int) -> str:
    return f"s{number} {draw(pieces)} e{number}"


def calling(draw: st.DrawFn, number: int) -> Message:
    """Return a message of the assistant with one call or two, with or without a text."""
    calls = [
        {
            "id": f"call0000{index}",
            "type": "function",
            "function": {
                "name": "add",
                "arguments": {"a": f"a{number}{index} {draw(words)} b{number}{index}"},
            },
        }
        for index in range(draw(st.integers(1, 2)))
    ]
    content = text(draw, number) if draw(st.booleans()) else ""
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    return with_reasoning(draw, number, message)


def answer_of(draw: st.DrawFn, number: int, call: dict[str, Any]) -> Message:
    return {
        "role": "tool",
        "content": text(draw, number),
        "name": "add",
        "tool_call_id": call["id"],
    }


def with_reasoning(draw: st.DrawFn, number: int, message: Message) -> Message:
    """Return the message, perhaps with reasoning, and perhaps out of the loss."""
    if draw(st.booleans()):
        name = draw(st.sampled_from(REASONING_NAMES))
        message = message | {name: f"r{number} why t{number}"}
    if draw(st.integers(0, 3)) == 0:
        message = message | {"weight": 0}
    return message


def tools_for(messages: Messages) -> dict[str, Any]:
    """Return the column of the tools; empty if nothing calls them."""
    has_calls = any("tool_calls" in message for message in messages)
    return {"tools": [ADD]} if has_calls else {}


def with_text_arguments(messages: Messages) -> Messages:
    """Return the messages with the arguments of calls as JSON text, as OpenAI writes them."""
    return [
        message
        | {
            "tool_calls": [
                call | {"function": _as_text(call["function"])}
                for call in message["tool_calls"]
            ]
        }
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _as_text(function: dict[str, Any]) -> dict[str, Any]:
    return function | {"arguments": json.dumps(function["arguments"])}


def openai(messages: Messages) -> Record:
    return {"messages": with_text_arguments(messages)} | tools_for(messages)


def sharegpt(messages: Messages) -> Record:
    """Return a record in which each call is a message of its own."""
    names = {"user": "human", "assistant": "gpt", "tool": "observation"}
    entries = []
    for message in messages:
        role = message["role"]
        rest = {
            key: value
            for key, value in message.items()
            if key in {"weight", *REASONING_NAMES}
        }
        for call in message.get("tool_calls", ()):
            value = json.dumps(call["function"])
            entries.append({"from": "function_call", "value": value} | rest)
            # The reasoning leads to the first call.
            rest = {key: value for key, value in rest.items() if key == "weight"}
        if message["content"] and "tool_calls" not in message:
            name = names.get(role, role)
            entries.append({"from": name, "value": message["content"]} | rest)
    return {"conversations": entries} | tools_for(messages)


def prompt_and_completion(messages: Messages) -> Record:
    return {"prompt": messages[:-1], "completion": messages[-1:]} | tools_for(messages)


FORMS: dict[str, Callable[[Messages], Record]] = {
    "messages": lambda messages: {"messages": messages} | tools_for(messages),
    "OpenAI": openai,
    "ShareGPT": sharegpt,
    "TRL's prompt and completion": prompt_and_completion,
}
"""Forms of records that hold calls of tools, by their names."""
