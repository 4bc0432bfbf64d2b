"""Convert records of Alpaca: an instruction, its input, and the output, which is learned."""

from finetune_trainer.data.records.converting.conversations import (
    KTO_TAG,
    with_system,
)
from finetune_trainer.data.records.labels import check_label
from finetune_trainer.data.records.message_forms import parsed_json
from finetune_trainer.data.records.records import (
    Fields,
    InvalidRecord,
    check_not_blank,
    kind_of,
    text_of,
)

# A blank line, as in the prompts of Alpaca and of LLaMA-Factory.
INPUT_SEPARATOR = "\n\n"


def instruction(record: Fields) -> str:
    """Return the question of an Alpaca record: the instruction, and its input after a blank line."""
    texts = [text_of(record, "instruction")]
    if record.get("input") is not None:
        texts.append(text_of(record, "input"))
    question = INPUT_SEPARATOR.join(text for text in texts if text.strip())
    check_not_blank(question, "instruction")
    return question


def alpaca(record: Fields) -> Fields:
    """Return the conversation of an Alpaca record: its history, its instruction and its output."""
    check_label(record, "label")
    check_label(record, KTO_TAG)
    output = text_of(record, "output")
    check_not_blank(output, "output")
    turns = [*_history(record.get("history")), (instruction(record), output)]
    messages = []
    for question, answer in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return {"messages": with_system(record, messages)}


def _history(value: object) -> list[tuple[str, str]]:
    if isinstance(value, str):
        value = parsed_json(value, "history") if value.strip() else None
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidRecord(
            f"history must be a list of [question, answer], it is {kind_of(value)}"
        )
    turns = []
    for index, turn in enumerate(value):
        match turn:
            case [str() as question, str() as answer]:
                turns.append((question, answer))
            case _:
                raise InvalidRecord(
                    f"history[{index}] must be [question, answer], two texts"
                )
    return turns
