"""Texts that earlier records, other columns or a template's own faults must not hide."""

from pathlib import Path
from typing import Any

import pytest
from support.trainer.models import write_jsonl
from support.trainer.prepared import (
    make_tokenizer,
    packed_documents,
    prepare,
    prepare_config,
)
from support.trainer.renderings import learned, rendering_of
from support.trainer.stages import run_to_failure

from finetune_trainer.contract import Environment
from finetune_trainer.data.records.records import InvalidRecord

QUESTION = {"role": "user", "content": "the file?"}
ANSWER = {"role": "assistant", "content": "a socket"}
PAIR = {"prompt": "the file?", "completion": "a socket"}
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"  # noqa: E501


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    make_tokenizer(folder, chat_template=PLAIN)
    return folder


@pytest.fixture
def refused(model: Path, environment: Environment, manifest_dir: Path):
    """A function that returns the reason why prepare refuses records."""

    def refused(*records: dict[str, Any], **changes: Any) -> str:
        write_jsonl(manifest_dir / "data.jsonl", list(records))
        message, _ = run_to_failure(prepare_config(model, **changes), environment)
        return message

    return refused


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (
            {"note": None, **PAIR},
            {"note": "An important text", **PAIR},
            "data.jsonl:2: column note: its text is not used",
        ),
        (
            {"messages": None, "text": "a socket"},
            {"messages": [QUESTION, ANSWER], "text": "a socket"},
            "data.jsonl:2: has messages and also text",
        ),
    ],
    ids=["a column", "a form"],
)
def test_null_in_an_earlier_record_hides_no_column(refused, first, second, reason):
    assert reason in refused(first, second)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (
            {
                "messages": [
                    QUESTION,
                    {
                        "role": "assistant",
                        "function_call": {"name": "add", "arguments": "{}"},
                        "tool_calls": [{"function": {"name": "b", "arguments": {}}}],
                    },
                ]
            },
            "messages[1] has tool_calls and also function_call: keep one of them",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "q", "context": "lost words"}]},
                    ANSWER,
                ]
            },
            "messages[0].content[0].context is not used",
        ),
        ({**PAIR, "label": 0}, "label is 0, so the answer is to be avoided"),
        ({**PAIR, "label": "false"}, "label is false, so the answer is to be avoided"),
        ({**PAIR, "label": "A lost text"}, "label must be true or false, it is a text"),
        ({"messages": [QUESTION, ANSWER], "label": False}, "label is false"),
        ({**PAIR, "train": False}, "train is False, so the record is not to be learned"),
        ({**PAIR, "label": "Rejected"}, "label is rejected, so"),
        ({**PAIR, "label": -1}, "label is -1, so"),
        ({"messages": [QUESTION, ANSWER], "label": 0}, "label is 0, so"),
        ({"messages": [QUESTION, ANSWER], "label": "False"}, "label is false, so"),
        ({"messages": [QUESTION, ANSWER], "train": "no"}, "train is no, so"),
        ({**PAIR, "skip": True}, "skip is True, so the record is not to be learned"),
        ({**PAIR, "desirable": False}, "desirable is False, so"),
        ({**PAIR, "weight": 0.5}, "weight is 0.5, but no record counts more than another"),
        ({**PAIR, "weight": "2"}, "weight is 2, but no record"),
        (
            {"messages": [QUESTION, ANSWER], "chat_template_kwargs": {"enable_thinking": False}},
            "set prepare.chatTemplateArguments for all records",
        ),
        ({**PAIR, "image": "000.jpg"}, "image: only text is trained on"),
        ({"messages": [QUESTION, ANSWER], "audios": ["a.wav"]}, "audios: only text is trained on"),
        ({**PAIR, "choices": ["Paris", "London"]}, "column choices: its text is not used"),
        (
            {"prompt": ["a", "b"], "completion": ["c", "d"]},
            "prompt and completion are lists: write a record for each",
        ),
        ({"messages": [QUESTION, ANSWER | {"mask": True}]}, "messages[1].mask: neither the chat template nor the loss"),
        (
            {"messages": [QUESTION, ANSWER | {"train_detail": [{"begin_offset": 0, "end_offset": 3, "train": False}]}]},
            "messages[1].train_detail: neither the chat template nor the loss",
        ),
        ({"messages": [QUESTION, ANSWER | {"channel": "analysis"}]}, "messages[1].channel is analysis, and no answer"),
        ({"messages": [QUESTION, ANSWER | {"value": "Paris"}]}, "messages[1] has content and also value, which differ"),
        ({"messages": [QUESTION, ANSWER | {"from": "human"}]}, "messages[1] has role and also from, which differ"),
        ({"messages": [QUESTION, ANSWER | {"answer": "Paris"}]}, "messages[1].answer: the chat template does not"),
        (
            {"instruction": "Sum it", "output": "seven and a bit", "inputs": "3+4"},
            "column inputs: its text is not used",
        ),
        ({"prompt": "2 + 2 =", "completion": 4}, "completion must be a string, it is a number: write it in quotes"),
        ({"messages": [QUESTION, ANSWER | {"loss": False}]}, "leave no turn to learn"),
        ({"messages": [QUESTION, ANSWER | {"training": False}]}, "leave no turn to learn"),
        ({"messages": [QUESTION, ANSWER | {"loss_weight": 0.5}]}, "messages[1].loss_weight must be 0 or 1"),
        (
            {"messages": [QUESTION, {"role": "assistant", "tool_calls": [{"name": "add", "arguments": '{"a": 1'}]}]},
            "arguments is an object, but not JSON",
        ),
        ({**PAIR, "weight": 0}, "weight is 0, so the record is not to be learned"),
        ({**PAIR, "input": "cat"}, "column input: its text is not used"),
        ({"messages": [QUESTION, ANSWER | {"mask": 0}]}, "messages[1].mask: neither the chat template nor the loss"),
        ({"messages": [QUESTION, ANSWER | {"loss_mask": "no"}]}, "messages[1].loss_mask: neither the chat template"),
        ({"messages": [QUESTION, ANSWER | {"calculate_loss": 1}]}, "messages[1].calculate_loss: neither"),
        ({"messages": [QUESTION, ANSWER], "supervised_turns": [1]}, "supervised_turns is a list that is not used"),
        ({**PAIR, "Loss_Mask": [0, 1]}, "Loss_Mask is a list that is not used"),
        ({**PAIR, "Weight": 0}, "Weight is 0, so the record is not to be learned"),
        ({**PAIR, "label": "thumbs_down"}, "label is thumbs_down, so the answer is to be avoided"),
        ({**PAIR, "label": "negative"}, "label is negative, so the answer is to be avoided"),
        ({"turns": [QUESTION, ANSWER]}, "if turns is a list of messages, write columns: {messages: turns}"),
        ({"messages": [QUESTION, ANSWER | {"role": "gpt4"}]}, "write it as the role of the turns to learn"),
    ],
)  # fmt: skip
def test_record_that_would_lose_its_meaning_is_refused(refused, record, reason):
    assert reason in refused(record)


@pytest.mark.parametrize("writes_date", [False, True])
def test_date_of_a_template_is_logged(
    environment: Environment, manifest_dir: Path, tmp_path: Path, capsys, writes_date
):
    date = "{{ strftime_now('%d %B %Y') }} " if writes_date else ""
    make_tokenizer(tmp_path / "dated", chat_template=date + PLAIN)
    write_jsonl(manifest_dir / "data.jsonl", [{"messages": [QUESTION, ANSWER]}])
    prepare(prepare_config(tmp_path / "dated"), environment)
    is_logged = "all rows have 26 July 2024" in capsys.readouterr().out
    assert is_logged is writes_date


@pytest.mark.parametrize(
    "record",
    [
        {**PAIR, "label": "sports"},
        {**PAIR, "weight": 1},
        {**PAIR, "loss": 1.37},
        {**PAIR, "images": []},
        {**PAIR, "skip": False, "label": 1},
        {"messages": [QUESTION, ANSWER | {"train": True, "loss": True}], "label": 3},
        {"messages": [QUESTION, ANSWER | {"index": 1, "score": 0, "constraint": 1}]},
    ],
)
def test_value_that_decides_nothing_is_accepted(
    record, model: Path, environment: Environment, manifest_dir: Path
):
    write_jsonl(manifest_dir / "data.jsonl", [record])
    result = prepare(prepare_config(model), environment)
    assert result.records == 1
    assert result.invalid == 0


def test_tools_beside_texts_of_a_pair_are_refused(refused):
    record = {
        "prompt": "a",
        "chosen": "b",
        "rejected": "c",
        "tools": [{"name": "add"}],
    }
    assert "nothing renders them" in refused(record, objective="DPO")


def test_ignored_columns_are_left_out(
    model: Path, environment: Environment, manifest_dir: Path
):
    record = {**PAIR, "title": "some words", "label": True}
    write_jsonl(manifest_dir / "data.jsonl", [record])
    columns = {"ignored": ["title"]}
    result = prepare(prepare_config(model, columns=columns), environment)
    assert result.records == 1
    assert result.invalid == 0
    assert result.unrendered == 0
    assert len(packed_documents(environment)) == 1


def test_question_and_answer_may_have_a_system_message(
    model: Path, environment: Environment, manifest_dir: Path
):
    record = {"system_prompt": "Be old.", "question": "the file?", "response": "a"}
    write_jsonl(manifest_dir / "data.jsonl", [record])
    columns = {"system": "system_prompt", "instruction": "question", "output": "response"}  # fmt: skip
    result = prepare(prepare_config(model, columns=columns), environment)
    assert result.records == 1
    assert result.invalid == 0


@pytest.mark.parametrize(
    "fault", ["{{ 1 / 0 }}", "{{ messages[0].x.y.z() }}", "{{ tools.items() }}"]
)
def test_template_that_fails_in_any_way_refuses_the_record(fault):
    with pytest.raises(InvalidRecord, match="the chat template rejected"):
        learned(PLAIN + fault, {"messages": [QUESTION, ANSWER]})


def test_turn_that_the_marks_leave_out_is_named():
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}{% generation %}"
        "{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{{ eos_token }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    conversation = [QUESTION, {**ANSWER, "content": "so"}, QUESTION, ANSWER]
    rendering = rendering_of(template, {"messages": conversation})
    assert [text.partition(" of the")[0] for text in rendering.unrendered] == [
        "messages[1]: the marks {% generation %}"
    ]


MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}BEFORE{% generation %}INSIDE"
    "{% endgeneration %}BEHIND{{ eos_token }}{% else %}{{ m.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
CALL = {"function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("before", "inside", "behind", "message", "places"),
    [
        (
            "",
            "{{ m.content }}",
            CALLS,
            {**ANSWER, "tool_calls": [CALL]},
            ["messages[1].tool_calls[0].function.name"],
        ),
        (
            "{{ m.reasoning_content }}",
            "{{ m.content }}",
            "",
            {**ANSWER, "reasoning_content": "It is old."},
            ["messages[1].reasoning_content"],
        ),
        (
            "",
            "{{ m.content[:1] }}",
            "{{ m.content[1:] }}",
            ANSWER,
            ["messages[1].content"],
        ),
        (
            "",
            "{{ m.content }}" + CALLS,
            "",
            {**ANSWER, "tool_calls": [CALL]},
            [],
        ),
    ],
)
def test_text_that_the_marks_leave_out_is_named(
    before, inside, behind, message, places
):
    template = MARKED.replace("BEFORE", before)
    template = template.replace("INSIDE", inside).replace("BEHIND", behind)
    rendering = rendering_of(template, {"messages": [QUESTION, message]})
    named = [text.partition(": the marks")[0] for text in rendering.unrendered]
    assert named == places
    # The end of the turn is in the loss, whatever is between it and the marks.
    example = rendering.examples[0]
    _, end = example.loss_spans[-1]
    assert end == len(example.text.rstrip())


@pytest.mark.parametrize(
    ("content", "is_named"),
    [
        ("<think>\nIt is old.\n</think>\n\na socket", False),
        ("It is old.\n</think>\n\na socket", False),
        ("Use the tag </think> to end your thinking.", True),
    ],
)
def test_answer_that_speaks_of_a_tag_is_no_reasoning(content, is_named):
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if '</think>' in m.content %}"
        "<think>\n{{ m.content.split('</think>')[0].replace('<think>', '').strip() }}\n</think>\n\n"
        "{{ m.content.split('</think>')[1].strip() }}{% else %}{{ m.content }}{% endif %}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    messages = [QUESTION, {**ANSWER, "content": content}]
    rendering = rendering_of(template, {"messages": messages})
    assert bool(rendering.unrendered) is is_named


def test_pair_of_other_questions_is_refused(refused):
    record = {
        "chosen": [QUESTION, ANSWER],
        "rejected": [{**QUESTION, "content": "a file"}, ANSWER],
    }
    reason = refused(record, objective="DPO")
    assert "chosen begins with the role user behind the prompt" in reason


@pytest.mark.parametrize(
    ("columns", "entry"),
    [
        ({"reasoning": "It is old."}, 'completion: "{{ reasoning }}\\n\\n{{ completion }}"'),
        ({"system": "Be old."}, 'prompt: "{{ system }}\\n\\n{{ prompt }}"'),
        ({"note": "It is old."}, 'prompt: "{{ prompt }}\\n\\n{{ note }}"'),
    ],
)  # fmt: skip
def test_fix_puts_a_column_to_its_place(refused, columns, entry):
    assert entry in refused({**PAIR, **columns})


def test_text_in_a_tool_that_the_template_drops_is_named():
    template = "{% if tools %}[{{ tools[0].function.name }}]{% endif %}" + PLAIN
    tool = {"type": "function", "function": {"name": "add", "description": "Add two numbers."}}  # fmt: skip
    rendering = rendering_of(
        template,
        {
            "messages": [QUESTION, ANSWER],
            "tools": [tool],
        },
    )
    [sentence] = rendering.unrendered
    assert sentence.startswith("tools[0].function.description: the chat template")


def test_message_as_openai_dumps_it_is_read(model, environment, manifest_dir):
    empty: dict[str, Any] = {
        "refusal": None,
        "annotations": [],
        "audio": None,
        "from": "Ann",
    }
    record = {"messages": [QUESTION, ANSWER | empty]}
    write_jsonl(manifest_dir / "data.jsonl", [record] * 4)
    assert prepare(prepare_config(model), environment).invalid == 0
