"""Convert records with a conversation in a column: of OpenAI, of ShareGPT, and of the libraries that read both."""

from collections.abc import Callable
from typing import Any

from finetune_trainer.data.records.conversations import schemas_fix
from finetune_trainer.data.records.labels import check_avoided, check_label
from finetune_trainer.data.records.message_forms import parsed_json, read_messages
from finetune_trainer.data.records.records import (
    Fields,
    InvalidRecord,
    kind_of,
    text_of,
)

KTO_TAG = "kto_tag"
"""LLaMA-Factory's column for the label of KTO."""


def conversation(column: str) -> Callable[[Fields], Fields]:
    """Return the function that converts a record with a conversation in a column."""

    def convert(record: Fields) -> Fields:
        if KTO_TAG in record:
            check_label(record, KTO_TAG)
        check_avoided(record, "label")
        messages = read_messages(record[column], column)
        fields = {"messages": with_system(record, messages)}
        tools = _tools(record)
        if tools is not None:
            fields["tools"] = tools
        return fields

    return convert


def with_system(record: Fields, messages: Any) -> Any:
    """Return messages that begin with the column `system`, if the record has a text there."""
    system = record.get("system")
    if system is None or not isinstance(messages, list):
        return messages
    text = text_of(record, "system")
    if not text.strip():
        return messages
    first = messages[0] if messages else None
    if isinstance(first, dict) and first.get("role") == "system":
        if first.get("content") == text:
            return messages
        raise InvalidRecord(
            "has a column system and also a message of the role system: keep one of them"
        )
    return [{"role": "system", "content": text}, *messages]


def _tools(record: Fields) -> Any:
    """Return the column `tools`, or OpenAI's earlier column `functions` in the form of tools."""
    functions = record.get("functions")
    if isinstance(functions, str):
        functions = parsed_json(functions, "functions") if functions.strip() else None
    if not functions:
        return record.get("tools")
    if record.get("tools"):
        raise InvalidRecord("has tools and also functions: keep one of them")
    if not isinstance(functions, list):
        raise InvalidRecord(
            f"functions must be a list of function schemas, it is {kind_of(functions)}{schemas_fix(functions)}"
        )
    return [{"type": "function", "function": function} for function in functions]
