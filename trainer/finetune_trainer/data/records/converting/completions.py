"""Convert records with a prompt and a completion, both texts or both messages, and records of plain text."""

from typing import Any

from finetune_trainer.data.records.labels import check_label
from finetune_trainer.data.records.message_forms import read_messages
from finetune_trainer.data.records.records import Fields, InvalidRecord, kind_of


def completion_record(record: Fields) -> Fields:
    """Return prompt and completion, or for two lists of messages a conversation whose completion is learned."""
    prompt = record["prompt"]
    completion = record["completion"]
    _check_is_a_record(prompt, completion)
    if "label" in record:
        check_label(record, "label")
    if not isinstance(prompt, list) and not isinstance(completion, list):
        if record.get("tools"):
            raise InvalidRecord(
                "tools beside a prompt that is no list of messages: nothing renders them"
            )
        return {"prompt": prompt, "completion": completion}
    if not isinstance(completion, list):
        raise InvalidRecord(
            f"prompt is a list of messages and completion is {kind_of(completion)}: "
            'write completion as [{"role": "assistant", "content": …}]'
        )
    if not isinstance(prompt, list):
        raise InvalidRecord(
            f"completion is a list of messages and prompt is {kind_of(prompt)}: "
            'write prompt as [{"role": "user", "content": …}]'
        )
    learned = read_messages(completion, "completion")
    if not any(_is_assistants(message) for message in learned):
        raise InvalidRecord("no message of completion has the role assistant")
    given = [_not_learned(message) for message in read_messages(prompt, "prompt")]
    fields: Fields = {"messages": given + learned}
    if record.get("tools") is not None:
        fields["tools"] = record["tools"]
    return fields


def _check_is_a_record(prompt: object, completion: object) -> None:
    """Raise InvalidRecord if both are lists of texts: a file of columns, and not of records."""
    if _are_texts(prompt) and _are_texts(completion):
        raise InvalidRecord("prompt and completion are lists: write a record for each")
    if completion and isinstance(completion, list) and _are_texts(completion):
        raise InvalidRecord("completion is a list of texts: write a record for each")


def _are_texts(value: object) -> bool:
    texts = value if isinstance(value, list) else [None]
    return all(isinstance(text, str) for text in texts)


def _is_assistants(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _not_learned(message: Any) -> Any:
    return message | {"weight": 0} if _is_assistants(message) else message


def text_record(record: Fields) -> Fields:
    """Return the text of a record."""
    return {"text": record["text"]}
