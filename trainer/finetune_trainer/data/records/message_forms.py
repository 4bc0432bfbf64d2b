"""Read messages of several forms as messages with role and content, which chat templates render.

ShareGPT writes `from` and `value`, and has other names of roles. OpenAI's earlier form writes `function_call`. Content
may be a list of parts. gpt-oss speaks on channels. Messages of the usual form are returned as they are.
"""

import json
from typing import Any

from finetune_trainer.data.records.channels import has_channels, without_channels
from finetune_trainer.data.records.json_text import RepeatedKey, parse_json
from finetune_trainer.data.records.records import (
    Fields,
    InvalidRecord,
    kind_of,
    shortened,
)
from finetune_trainer.data.records.unrendered import texts_of

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
"""The role of a chat template for each name of a role."""
USUAL_ROLES = frozenset(ROLES.values())
_OTHER_FORMS = frozenset({"function_call", "channel", "from", "value"})
"""Keys of a message that another form has beside or in place of role and content."""
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
"""Types of the parts of a content that are text."""
OTHER_PARTS = {
    "thinking": "write its text as reasoning of the message",
    "tool_use": "write it into tool_calls of the message",
    "tool_result": "write it as a message of the role tool",
}
"""Anthropic's parts that other keys or messages have here -> the fix."""
# vLLM joins the parts of a message in the same way, for a template that takes text.
PART_SEPARATOR = "\n"


def read_messages(value: object, path: str) -> Any:
    """Return a list of messages with role and content; raise InvalidRecord if one has an unknown form.

    A value that is no list, and a message that is no object, are returned as they are: their readers refuse them.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        # In CSV, and in some tables of the hub.
        value = parsed_json(value, path)
    if not isinstance(value, list) or are_usual(value):
        return value
    if has_channels(value):
        value = without_channels(value, path)
    return [
        _message(message, f"{path}[{index}]") if isinstance(message, dict) else message
        for index, message in enumerate(value)
    ]


def parsed_json(text: str, path: str) -> object:
    """Return the value of a JSON text; raise InvalidRecord if it is not JSON."""
    try:
        return parse_json(text)
    except RepeatedKey as error:
        raise InvalidRecord(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRecord(f"{path} is not JSON: {error}") from None


def are_usual(messages: list[Any]) -> bool:
    """Return whether all messages have a role of a chat template and a text, so that nothing is to be converted."""
    # Without a call for each message: this runs for every record.
    for message in messages:
        if type(message) is not dict or type(message.get("content")) is not str:
            return False
        role = message.get("role")
        # A list has no hash, so that `in` would raise TypeError.
        if type(role) is not str or role not in USUAL_ROLES:
            return False
        if not _OTHER_FORMS.isdisjoint(message):
            return False
    return True


def _message(message: Fields, path: str) -> Fields:
    """Return a message with role and content, and with all its other fields."""
    is_sharegpt = message.get("role") is None and message.get("from") is not None
    role_key = "from" if is_sharegpt else "role"
    text_key = "content"
    if message.get("content") is None and message.get("value") is not None:
        text_key = "value"
    _check_keys(message, path)
    role = _role(message, role_key, path)
    used = {role_key, text_key, "function_call", "role", "content"}
    if _known_role(message.get("from")) is not None:
        used.add("from")
    if message.get("value") == message.get("content"):
        used.add("value")
    others = {key: value for key, value in message.items() if key not in used}
    if role == "function_call":
        calls = _written_calls(message.get(text_key), f"{path}.{text_key}")
        return {"role": "assistant", "content": "", **others, "tool_calls": calls}
    read: Fields = {"role": role, **others}
    if message.get(text_key) is not None:
        read["content"] = _content(message[text_key], f"{path}.{text_key}")
    if message.get("function_call") is not None:
        if message.get("tool_calls"):
            raise InvalidRecord(
                f"{path} has tool_calls and also function_call: keep one of them"
            )
        call = _call(message["function_call"], f"{path}.function_call")
        read["tool_calls"] = [call]
    return read


def _check_keys(message: Fields, path: str) -> None:
    """Raise InvalidRecord if a message names its role or its text by no known name, or by two that differ."""
    keys = message.keys()
    _check_agree(message, path)
    if message.get("from") is not None and keys.isdisjoint({"value", "content"}):
        raise InvalidRecord(f"{path}.value is missing")
    if keys.isdisjoint({"role", "from"}) and keys:
        shown = shortened(", ".join(map(str, message)))
        raise InvalidRecord(
            f"{path}.role is missing: a message has role and content, or from and value; it has {shown}"
        )


def _check_agree(message: Fields, path: str) -> None:
    """Raise InvalidRecord if a message has two texts, or two roles, that differ."""
    texts = (message.get("content"), message.get("value"))
    roles = [_known_role(message.get(key)) for key in ("role", "from")]
    for names, values in (
        ("content and also value", texts),
        ("role and also from", roles),
    ):
        if None not in values and values[0] != values[1]:
            raise InvalidRecord(f"{path} has {names}, which differ: keep one of them")


def unknown_roles(fields: Fields) -> list[str]:
    """Return the roles of a record's messages that only a chat template may know, in their order."""
    messages = fields.get("messages")
    if not isinstance(messages, list):
        return []
    roles = [message.get("role") for message in messages if isinstance(message, dict)]
    # A role that is no text is refused later.
    return [
        shortened(role)
        for role in roles
        if isinstance(role, str) and role not in USUAL_ROLES
    ]


def _known_role(name: object) -> str | None:
    # `from` beside `role` may also be the name of a person.
    return ROLES.get(name.strip().lower()) if isinstance(name, str) else None


def _role(message: Fields, key: str, path: str) -> Any:
    role = message.get(key)
    if not isinstance(role, str):
        return role
    known = _known_role(role)
    if known is not None:
        return known
    name = role.strip().lower()
    if name in {"function_call", "tool_call"}:
        return "function_call"
    if name == "function":
        # OpenAI's earlier form has the function's answer here, ShareGPT's the call.
        return "tool" if key == "role" else "function_call"
    if key == "from":
        raise InvalidRecord(
            f"{path}.from is {shortened(role)}: write human, gpt, system, function_call or observation"
        )
    # Templates may have roles of their own.
    return role


def _content(value: object, path: str) -> object:
    """Return the text of a content; raise InvalidRecord if it has a part that is no text."""
    if not isinstance(value, list):
        return value
    texts = [_part(part, f"{path}[{index}]") for index, part in enumerate(value)]
    return PART_SEPARATOR.join(texts)


def _check_has_no_other_text(part: Fields, path: str) -> None:
    for key, value in part.items():
        if key not in {"type", "text"} and list(texts_of(value, key)):
            raise InvalidRecord(
                f"{path}.{key} is not used: put it into the text of the part, or remove it"
            )


def _part(part: object, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRecord(
            f"{path} must be a part such as {{type: text, text: …}}, it is {kind_of(part)}"
        )
    kind = part.get("type")
    text = part.get("text")
    is_text = isinstance(kind, str) and kind in TEXT_PARTS
    if is_text and isinstance(text, str):
        _check_has_no_other_text(part, path)
        return text
    if is_text:
        raise InvalidRecord(f"{path}.text must be a string, it is {kind_of(text)}")
    shown = shortened(str(kind)) if kind else "without a type"
    fix = "remove the record, or the part from its content"
    if isinstance(kind, str):
        fix = OTHER_PARTS.get(kind, fix)
    raise InvalidRecord(f"{path} is a part {shown}: only text is trained on; {fix}")


def _written_calls(value: object, path: str) -> list[Fields]:
    """Return the tool calls that ShareGPT writes as JSON text."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except RepeatedKey as error:
            raise InvalidRecord(f"{path}: {error}") from None
        except (ValueError, RecursionError):
            raise InvalidRecord(
                f'{path} is no call in JSON, such as {{"name": "add", "arguments": {{…}}}}: '
                "write it as JSON, or its role as gpt"
            ) from None
    calls = value if isinstance(value, list) else [value]
    return [_call(call, path) for call in calls]


def _call(value: object, path: str) -> Fields:
    """Return OpenAI's tool call of a function's name and arguments."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise InvalidRecord(
            f"{path} must be a call such as {{name: add, arguments: {{…}}}}, it is {shortened(json.dumps(value))}"
        )
    return {"type": "function", "function": value}
