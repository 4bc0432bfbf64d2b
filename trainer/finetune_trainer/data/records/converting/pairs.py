"""Convert records of a preference: a prompt, and a chosen and a rejected completion."""

from finetune_trainer.data.records.converting.alpaca import instruction
from finetune_trainer.data.records.converting.conversations import with_system
from finetune_trainer.data.records.message_forms import read_messages
from finetune_trainer.data.records.records import (
    Fields,
    InvalidRecord,
    kind_of,
    text_of,
)


def pair(record: Fields) -> Fields:
    """Return the fields of a pair, with messages in the usual form."""
    fields = {
        name: _side(record[name], name)
        for name in ("prompt", "chosen", "rejected")
        if record.get(name) is not None
    }
    if record.get("tools") is not None:
        fields["tools"] = record["tools"]
    return fields


def _side(value: object, name: str) -> object:
    """Return the messages of a prompt or completion; a text stays a text."""
    if isinstance(value, dict):
        # A completion may be a single message.
        value = [value]
    return read_messages(value, name) if isinstance(value, list) else value


def sharegpt_pair(record: Fields) -> Fields:
    """Return the pair of a ShareGPT conversation and two answers."""
    prompt = read_messages(record["conversations"], "conversations")
    fields = pair(record | {"prompt": None})
    return {**fields, "prompt": with_system(record, prompt)}


def alpaca_pair(record: Fields) -> Fields:
    """Return the pair of Alpaca's instruction and two answers."""
    question = [{"role": "user", "content": instruction(record)}]
    return {
        "prompt": with_system(record, question),
        **{
            name: [{"role": "assistant", "content": text_of(record, name)}]
            for name in ("chosen", "rejected")
        },
    }


def openai_pair(record: Fields) -> Fields:
    """Return the pair of OpenAI's preference records."""
    given = record["input"]
    if not isinstance(given, dict) or not isinstance(given.get("messages"), list):
        raise InvalidRecord(
            f"input must be an object with messages, it is {kind_of(given)}"
        )
    unknown = given.keys() - {"messages", "tools", "parallel_tool_calls"}
    if unknown:
        raise InvalidRecord(
            f"input has also {min(unknown)}, which is not used: remove it"
        )
    fields = {
        "prompt": read_messages(given["messages"], "input.messages"),
        "chosen": _side(record["preferred_output"], "preferred_output"),
        "rejected": _side(record["non_preferred_output"], "non_preferred_output"),
    }
    if given.get("tools") is not None:
        fields["tools"] = given["tools"]
    return fields
