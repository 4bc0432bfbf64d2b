"""Records of other tools that are refused: the message has the fix for what the record has."""

from typing import Any

import pytest
from support.trainer.renderings import TEMPLATES, TokenizerWithTemplate

from finetune_trainer.data.reading.columns import FieldColumns
from finetune_trainer.data.records.chat_template import ChatTemplate
from finetune_trainer.data.records.records import InvalidRecord
from finetune_trainer.data.tokenizing.encoder import RecordFormatter

QUESTION = {"role": "user", "content": "2 + 3?"}
ANSWER = {"role": "assistant", "content": "It is 5."}
MESSAGES = [QUESTION, ANSWER]


def answer(**message: Any) -> dict[str, Any]:
    return {"messages": [QUESTION, {"role": "assistant", **message}]}


def reason_of(record: dict[str, Any], template: str = "qwen3") -> str:
    """Return why a record is refused."""
    chat = ChatTemplate(
        TokenizerWithTemplate((TEMPLATES / f"{template}.jinja").read_text())
    )
    with pytest.raises(InvalidRecord) as refused:
        RecordFormatter(chat).format(FieldColumns().select(record))
    return str(refused.value)


@pytest.mark.parametrize(
    ("record", "fix"),
    [
        (answer(content=None, refusal="I cannot."), "content is missing: write the text of refusal there"),
        (answer(content="", refusal="I cannot."), "content is empty: write the text of refusal there"),
        (answer(content="", refusal=""), "content is empty: there is nothing to learn"),
        (answer(content=[{"type": "thinking", "thinking": "hm"}]), "write its text as reasoning of the message"),
        (answer(content=[{"type": "tool_use", "name": "add"}]), "write it into tool_calls of the message"),
        ({"messages": [*MESSAGES, {"role": "user", "content": [{"type": "tool_result"}]}, ANSWER]},
         "write it as a message of the role tool"),
        ({"messages": MESSAGES, "loss_mask": [0, 1]}, "loss_mask is a list that is not used: write train: false"),
        ({"messages": MESSAGES, "weights": [0.0, 1.0]}, "columns: {ignored: [weights]}"),
        (answer(tool_calls=[{"function": {"name": "add", "parameters": {"a": 2}}}]),
         "tool_calls[0].function.arguments is missing: write parameters as arguments"),
        (answer(tool_calls=[{"type": "tool_use", "name": "add", "input": {"a": 2}}]), "write input as arguments"),
        (answer(tool_calls=[{"function": {"name": "now"}}]), "write {} for a call without arguments"),
        ({"messages": [QUESTION, {"from": "function_call", "value": '{"name": "add", "args": {"a": 2}}'}, ANSWER]},
         "write args as arguments"),
        ({"messages": MESSAGES, "tools": {"name": "add", "parameters": {}}}, "write it in a list, as [{…}]"),
        ({"messages": MESSAGES, "tools": {"type": "function", "function": {"name": "add"}}}, "in a list, as [{…}]"),
        ({"messages": MESSAGES, "tools": {"add": {"parameters": {}}}}, "write a list of its schemas, each with its"),
        ({"messages": MESSAGES, "tools": ["add"]}, "write the function's schema, and not its name or its JSON text"),
        ({"messages": MESSAGES, "functions": {"name": "add"}}, "write it in a list, as [{…}]"),
        ({"messages": None}, "messages is null: write a list of messages"),
        ({"prompt": "2 + 3?", "response": "5"}, "completion is missing: write columns: {completion: response}"),
        ({"prompt": "2 + 3?", "completion": ["It is 5.", "5"]}, "completion is a list of texts: write a record for"),
        ({"system_prompt": "Be kind.", "question": "2 + 3?", "response": "It is 5."},
         "write columns: {instruction: question, output: response, system: system_prompt}"),
        ({"inputs": "2 + 3?", "targets": "It is 5."}, "write columns: {instruction: inputs, output: targets}"),
        ({"human": "2 + 3?", "bot": "It is 5."}, "write columns: {instruction: human, output: bot}"),
        ({"input_ids": [1, 2], "labels": [-100, 2]}, "write the texts of which input_ids are the tokens"),
        ({"segments": [{"label": True, "text": "a b"}]}, "write the texts of segments as prompt and completion"),
    ],
)  # fmt: skip
def test_refused_record_has_its_fix(record: dict[str, Any], fix: str) -> None:
    assert fix in reason_of(record)


def test_template_that_rejects_a_record_has_a_fix() -> None:
    system = {"role": "system", "content": "Be kind."}
    assert reason_of({"messages": [system, *MESSAGES]}, "gemma") == (
        "the chat template rejected the conversation: System role not supported: "
        "correct its messages, or set prepare.chatTemplate"
    )


def test_list_of_labels_is_no_mask() -> None:
    record = {
        "messages": MESSAGES,
        "labels": ["math", "sums"],
        "mask": 1,
    }
    assert FieldColumns().select(record) == {"messages": MESSAGES}
