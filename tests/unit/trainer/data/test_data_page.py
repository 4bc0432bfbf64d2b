"""The page about data: each example is read as it says, and each row of its table of refused forms is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.trainer.renderings import TEMPLATES, TokenizerWithTemplate

from finetune_trainer.contract import Columns, Objective
from finetune_trainer.data.reading.columns import FieldColumns
from finetune_trainer.data.records.chat_template import ChatTemplate
from finetune_trainer.data.records.forms import FORMS
from finetune_trainer.data.records.records import InvalidRecord
from finetune_trainer.data.tokenizing.record_tokenizer import FORMATTERS

PAGE = (Path(__file__).parents[4] / "docs" / "guides" / "data.md").read_text()
FORMS_SECTION = PAGE.partition("\n## Forms\n")[2].partition("\n## ")[0]
EXAMPLES = [
    json.loads(example)
    for example in re.findall(
        r"^```\n(.*?)^```$", FORMS_SECTION, re.MULTILINE | re.DOTALL
    )
]
QUESTION = {"role": "user", "content": "2 + 3?"}
ANSWER = {"role": "assistant", "content": "It is 5."}
SYSTEM = {"role": "system", "content": "Be kind."}
MESSAGES = [QUESTION, ANSWER]
PROMPT = {"prompt": "2 + 3 =", "completion": " 5"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
IMAGE = {"type": "image_url", "image_url": {"url": "a.png"}}
ROUTED = {
    "role": "assistant",
    "channel": "analysis",
    "recipient": "python",
    "content": "print(2 + 3)",
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "several forms in a record": ({"text": "a b", "messages": MESSAGES}, "columns: {messages: messages}"),
    "a part of an image": ({"messages": [{**QUESTION, "content": [IMAGE]}, ANSWER]}, "remove the record, or the part"),
    "a column `image`": ({"messages": MESSAGES, "images": ["a.png"]}, "columns: {ignored: [images]}"),
    "a column `system` beside": (
        {"messages": [SYSTEM, *MESSAGES], "system": "Be short."}, "keep one of them"),
    "`tools` and also `functions`": (
        {"messages": MESSAGES, "tools": [TOOL], "functions": [TOOL["function"]]}, "keep one of them"),
    "`tools` that are a single schema": ({"messages": MESSAGES, "tools": TOOL}, "write it in a list"),
    "a call with `parameters` or `input`": (
        {"messages": [QUESTION, {"role": "assistant", "tool_calls": [{"name": "add", "parameters": {"a": 2}}]}]},
        "write parameters as arguments"),
    "a message with another `weight`": ({"messages": [QUESTION, {**ANSWER, "weight": 0.5}]}, "must be 0 or 1"),
    "`mask_history: true`": ({"messages": MESSAGES, "mask_history": True}, "columns: {ignored: [mask_history]}"),
    "a list of numbers in `loss_mask`": (
        {"messages": MESSAGES, "loss_mask": [0, 1]}, "columns: {ignored: [loss_mask]}"),
    "a message whose text is in `refusal`": (
        {"messages": [QUESTION, {"role": "assistant", "content": None, "refusal": "I cannot."}]},
        "write the text of refusal there"),
    "a message with another switch": ({"messages": [QUESTION, {**ANSWER, "mask": 1}]}, "write train: false"),
    "axolotl's `segments`": (
        {"segments": [{"label": False, "text": "2 + 3 ="}, {"label": True, "text": " 5"}]},
        "write the texts of segments as prompt and completion"),
    "messages as `prompt`": ({"prompt": [QUESTION], "completion": "It is 5."}, "write completion as"),
    "a message with `content` and also `value`": (
        {"messages": [QUESTION, {**ANSWER, "value": "Paris"}]}, "keep one of them"),
    "a record whose `label` or `kto_tag` is false": ({**PROMPT, "label": False}, "remove the record"),
    "a record with `train`, `loss`": ({**PROMPT, "train": False}, "remove it"),
    "a record with another `weight`": ({**PROMPT, "weight": 0.5}, "columns: {ignored: [weight]}"),
    "a record with `chat_template_kwargs`": (
        {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}}, "prepare.chatTemplateArguments"),
    "a message on another channel": ({"messages": [QUESTION, ROUTED, ANSWER]}, "unrendered: Warn"),
    "a message on `analysis` that no answer follows": (
        {"messages": [*MESSAGES, {**ANSWER, "channel": "analysis"}]}, "add it, or remove the message"),
    "`function_call` whose value is no JSON": (
        {"conversations": [{"from": "human", "value": "?"}, {"from": "function_call", "value": "add 2"}]},
        "write it as JSON, or its role as gpt"),
    "`question` and `answer`": ({"question": "2 + 3?", "answer": "5"}, "write columns: {instruction: question"),
}  # fmt: skip
"""Beginning of a row of the table -> a record that is refused, and the fix in the message."""


def read(record: dict[str, Any], objective: Objective = "SFT") -> Any:
    """Return the formatted record; raise InvalidRecord as `prepare` does by default."""
    chat = ChatTemplate(TokenizerWithTemplate((TEMPLATES / "qwen3.jinja").read_text()))
    fields = FieldColumns(None, objective).select(record)
    formatted = FORMATTERS[objective](chat).format(fields)
    if formatted.unrendered:
        raise InvalidRecord(formatted.unrendered[0])
    return formatted


def objective_of(record: dict[str, Any]) -> Objective:
    return "DPO" if record.keys() & {"chosen", "preferred_output"} else "SFT"


@pytest.mark.parametrize("record", EXAMPLES, ids=", ".join)
def test_example_of_a_form_is_read(record):
    formatted = read(record, objective_of(record))
    texts = "".join(example.text for example in formatted.examples)
    assert any(text in texts for text in ("5", "chat", '"a": 2'))


def test_each_form_has_an_example():
    columns = [set(example) for example in EXAMPLES]
    # A column with a conversation may have any of three names.
    names = {"messages", "conversations", "conversation"}
    for forms in FORMS.values():
        for form in forms:
            required = set(form.required)
            is_shown = any(required <= shown for shown in columns)
            assert is_shown or required <= names, form.words


def test_examples_are_short():
    for example in re.findall(
        r"^```\n(.*?)^```$", FORMS_SECTION, re.MULTILINE | re.DOTALL
    ):
        assert len(example.splitlines()) <= 3, example


@pytest.mark.parametrize("row", REFUSED)
def test_refused_form_is_refused_with_its_fix(row):
    assert f"\n| {row}" in FORMS_SECTION
    record, fix = REFUSED[row]
    with pytest.raises(InvalidRecord) as refused:
        read(record)
    assert fix in str(refused.value)


def leaves_out(fix: str) -> Columns | None:
    """Return the columns of the manifest that a message names as its fix; None if it names none to leave out."""
    match = re.search(r"columns: ({ignored: \[[a-z_]+\]})", fix)
    return Columns.model_validate(yaml.safe_load(match[1])) if match else None


LABELS = ["label", "kto_tag"]


@pytest.mark.parametrize(
    "record",
    [
        *(record for record, fix in REFUSED.values() if leaves_out(fix)),
        *({**PROMPT, "label": label} for label in (False, -1, "bad", "too long")),
        *({"messages": MESSAGES, label: False} for label in LABELS),
        *({"instruction": "2?", "output": "5", label: False} for label in LABELS),
    ],
)
def test_column_that_a_message_leaves_out_is_left_out(record):
    with pytest.raises(InvalidRecord) as refused:
        read(record)
    columns = leaves_out(str(refused.value))
    assert columns is not None
    assert FieldColumns(columns).select(record)


def test_each_row_of_refused_forms_is_tried():
    table = FORMS_SECTION.partition("| refused | the fix |")[2].strip().splitlines()[1:]
    rows = [row.removeprefix("| ") for row in table if row.startswith("| ")]
    untried = [row for row in rows if not row.startswith(tuple(REFUSED))]
    assert untried == []
