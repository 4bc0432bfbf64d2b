"""Read a record's conversation: its messages, and the tools that the assistant may call.

Tool calls have OpenAI's form. The chat template renders messages, so every key stays as the record has it, with some
exceptions. `arguments` as JSON text becomes an object, because templates of Hugging Face apply `tojson`. A call without
the object `function` gets it. A `content` that is null or absent becomes empty text. Other keys with null are left out.
`weight`, `train` and their other names become `train: false` if they take a message out of the loss.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from finetune_trainer.data.records.json_text import RepeatedKey, parse_json
from finetune_trainer.data.records.records import (
    Fields,
    InvalidRecord,
    check_not_blank,
    kind_of,
    shortened,
    text_of,
)

Message = dict[str, Any]
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
"""Names of the reasoning in templates and in data sets."""
_USUAL_KEYS = ("role", "content")
OPTIONAL_TEXTS = ("name", "tool_call_id", *REASONING_NAMES)
TEXT_KEYS = ("text", "answer", "response", "completion", "thoughts", "refusal")
"""Keys of a message that hold texts, however short. In any other key, a single word is a label."""
OTHER_ARGUMENTS = ("parameters", "input", "inputs", "args", "kwargs", "params")
"""Names that Llama, Anthropic and others give to the arguments of a call."""
IN_THE_LOSS = ("weight", "train", "training", "trainable", "loss", "loss_weight")
"""Keys with which OpenAI, axolotl and ms-swift take a message out of the loss."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and the function schemas of the tools."""

    messages: list[Message]
    tools: list[Any] | None = None

    def before(self, index: int) -> "Conversation":
        """Return the conversation up to a message, without it."""
        return replace(self, messages=self.messages[:index])

    def learned_turns(self, first: int = 0) -> list[int]:
        """Return the indexes of the assistant's messages from `first` on that are in the loss."""
        return [
            index
            for index, message in enumerate(self.messages)
            if index >= first
            and message["role"] == "assistant"
            and message.get("train", True)
        ]

    @property
    def last_turn(self) -> int:
        """The index of the assistant's last message, in the loss or not; -1 without any."""
        turns = [
            index
            for index, message in enumerate(self.messages)
            if message["role"] == "assistant"
        ]
        return turns[-1] if turns else -1

    def with_message(self, index: int, message: Message) -> "Conversation":
        """Return the conversation with another message at an index."""
        return replace(
            self,
            messages=[*self.messages[:index], message, *self.messages[index + 1 :]],
        )


def conversation_of(fields: Fields) -> Conversation:
    """Return the conversation of a record; raise InvalidRecord if its messages or tools have another form."""
    messages = messages_of(fields["messages"], "messages")
    check_can_be_learned(messages, "no message")
    return Conversation(messages, tools_of(fields))


def messages_of(value: object, name: str) -> list[Message]:
    """Return the messages of a field; raise InvalidRecord if it is no list of messages."""
    if not isinstance(value, list):
        raise InvalidRecord(
            f"{name} must be a list of {{role, content}}, it is {kind_of(value)}"
        )
    # Most messages are usual: this runs for every message.
    return [
        message if _is_usual(message) else _message(message, f"{name}[{index}]")
        for index, message in enumerate(value)
    ]


def check_can_be_learned(messages: list[Message], subject: str) -> None:
    """Raise InvalidRecord if no message is the assistant's, or if all turns of the assistant are out of the loss."""
    roles = list(dict.fromkeys(message["role"] for message in messages))
    if "assistant" not in roles:
        shown = ", ".join(roles)[:60] or "none"
        raise InvalidRecord(
            f"{subject} has the role assistant (roles: {shown}): write it as the role of the turns to learn"
        )
    if not Conversation(messages).learned_turns():
        raise InvalidRecord(
            f"{subject} of the assistant is in the loss: weight 0 and train false leave no turn to learn"
        )


def parts_left_out(conversation: Conversation) -> Iterator[tuple[str, Conversation]]:
    """Yield the name of the tools and of every tool call, and the conversation without this part.

    They may consist of numbers and names only, which are in a rendered text by chance.
    """
    if conversation.tools:
        yield "tools", replace(conversation, tools=None)
    for index, message in enumerate(conversation.messages):
        for number in range(len(message.get("tool_calls", []))):
            rest = _without_call(message, number)
            name = f"messages[{index}].tool_calls[{number}]"
            yield name, conversation.with_message(index, rest)


def _without_call(message: Message, number: int) -> Message:
    calls = message["tool_calls"]
    others = calls[:number] + calls[number + 1 :]
    if others:
        return message | {"tool_calls": others}
    # Templates test whether the field is there, so an empty list is not the same as no calls.
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _is_usual(value: object) -> bool:
    """Return whether a value is a message of a role and a text, and nothing else, of which nothing is to be changed."""
    if type(value) is not dict or len(value) != len(_USUAL_KEYS):
        return False
    role = value.get("role")
    content = value.get("content")
    if type(role) is not str or type(content) is not str:
        return False
    try:
        role.encode()
        content.encode()
    except UnicodeEncodeError:
        return False
    return role != "assistant" or bool(content.strip())


def _message(value: object, path: str) -> Message:
    value = _checked(value, path)
    # Templates read keys of their own, and what they do not read is found in the rendered text.
    message: Message = {
        key: inner
        for key, inner in value.items()
        if inner is not None and key not in (*IN_THE_LOSS, "tool_calls")
    }
    message["role"] = text_of(value, "role", f"{path}.")
    calls = _tool_calls(value.get("tool_calls"), f"{path}.tool_calls")
    if calls:
        if message["role"] != "assistant":
            raise InvalidRecord(
                f"{path}.tool_calls: only the role assistant calls tools, not {message['role']}"
            )
        message["tool_calls"] = calls
    if value.get("content") is None and not calls:
        raise InvalidRecord(f"{path}.content is missing{_text_beside(value)}")
    message["content"] = _content(value, path)
    if message["role"] == "assistant" and not calls:
        check_not_blank(message["content"], f"{path}.content", _text_beside(value))
    if not all(_is_in_the_loss(value, name, path) for name in IN_THE_LOSS):
        message["train"] = False
    return message


def _checked(value: object, path: str) -> dict[str, Any]:
    """Return an object that may be a message; raise InvalidRecord if it is another value or has another form."""
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
    for name in OPTIONAL_TEXTS:
        if value.get(name) is not None:
            text_of(value, name, f"{path}.")
    return value


def _text_beside(message: Message) -> str:
    """Return the fix for a message whose text is under another key; empty if it has none."""
    for key in TEXT_KEYS:
        if isinstance(message.get(key), str) and message[key].strip():
            return f": write the text of {key} there"
    return ""


def _is_in_the_loss(message: Message, name: str, path: str) -> bool:
    """Return whether a key leaves a message in the loss; raise InvalidRecord for another value than 0, 1 or null."""
    value = message.get(name)
    if value is None:
        return True
    if not isinstance(value, (bool, int, float)) or value not in {0, 1}:
        shown = shortened(json.dumps(value, default=str), 20)
        raise InvalidRecord(
            f"{path}.{name} must be 0 or 1, false or true, it is {shown}: no turn counts more than another"
        )
    is_switch = name != "weight" and value
    if is_switch and message["role"] != "assistant":
        raise InvalidRecord(
            f"{path}.{name} is true, but only turns of the assistant are learned: remove it"
        )
    return bool(value)


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
    if function.get("arguments") is None:
        raise _no_arguments(function, f"{path}.function.arguments")
    arguments = _arguments(function["arguments"], f"{path}.function.arguments")
    known = {"name": name, "arguments": arguments}
    is_flat = function is value
    others = {} if is_flat else _without_nulls(function)
    call = {"type": "function", **_without_nulls(value)}
    for key in known if is_flat else ():
        del call[key]
    call["function"] = others | known
    return call


def _no_arguments(function: dict[str, Any], path: str) -> InvalidRecord:
    """Return the error of a call without `arguments`: they may have another name."""
    for name in OTHER_ARGUMENTS:
        if function.get(name) is not None:
            return InvalidRecord(f"{path} is missing: write {name} as arguments")
    return InvalidRecord(f"{path} is missing: write {{}} for a call without arguments")


def _without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    return {key: inner for key, inner in value.items() if inner is not None}


def _arguments(value: object, path: str) -> dict[str, Any] | str:
    match value:
        case dict():
            return value
        case str():
            try:
                parsed = parse_json(value)
            except RepeatedKey as error:
                raise InvalidRecord(f"{path}: {error}") from None
            except (ValueError, RecursionError) as error:
                if value.lstrip().startswith("{"):
                    raise InvalidRecord(
                        f"{path} is an object, but not JSON: {error}"
                    ) from None
                # The template may render text, too.
                return value
            return parsed if isinstance(parsed, dict) else value
        case _:
            raise InvalidRecord(
                f"{path} must be an object or its JSON text, it is {kind_of(value)}"
            )


def schemas_fix(value: object) -> str:
    """Return the fix for a value in place of a list of function schemas, as the end of a sentence."""
    if not isinstance(value, dict):
        return ""
    # A schema has its own name; other objects have the names of functions as their keys.
    if "name" in value or "function" in value:
        return ": write it in a list, as [{…}]"
    return ": write a list of its schemas, each with its name"


def tools_of(fields: Fields) -> list[Any] | None:
    """Return the function schemas of a record's tools, or None; raise InvalidRecord if they are no list of objects."""
    value = fields.get("tools")
    if isinstance(value, str):
        try:
            value = parse_json(value) if value.strip() else None
        except RepeatedKey as error:
            raise InvalidRecord(f"tools: {error}") from None
        except (ValueError, RecursionError) as error:
            raise InvalidRecord(f"tools is not JSON: {error}") from None
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise InvalidRecord(
            f"tools must be a list of function schemas, it is {kind_of(value)}{schemas_fix(value)}"
        )
    for index, tool in enumerate(value):
        if not isinstance(tool, dict):
            raise InvalidRecord(
                f"tools[{index}] must be an object, it is {kind_of(tool)}: "
                "write the function's schema, and not its name or its JSON text"
            )
    return value
